"""Events of a member's tables, for its membership, which is created after them."""

from __future__ import annotations

from broker.ha.replicas_manager import ReplicasManager


class MemberEvents:
    """Passes events to the membership. A broker outside a set drops them."""

    def __init__(self) -> None:
        self._replicas: ReplicasManager | None = None

    def subscribe(self, replicas: ReplicasManager) -> None:
        """Pass all later events to the membership."""
        self._replicas = replicas

    def master_settled(self, epoch: int) -> None:
        """Report the record in the log that its master has settled its archive in `epoch`."""
        if self._replicas is not None:
            self._replicas.master_settled(epoch)

    def tables_lost(self) -> None:
        """Report that the tables contain changes that the log lost."""
        if self._replicas is not None:
            self._replicas.follower.tables_lost()

    def can_not_follow(self, why: str) -> None:
        """Report that a change in the log can't be applied here."""
        if self._replicas is not None:
            self._replicas.can_not_follow(why)
