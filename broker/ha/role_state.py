"""Interfaces to the role-dependent parts of a broker besides its log: `ChangeOfRole` and the archive."""

from __future__ import annotations

from typing import Protocol


class RoleState(Protocol):
    """Role-dependent state of the broker. Runs on the event loop.

    Only `prepare`, `record_settled` and `reload` suspend.
    """

    async def prepare(self) -> None:
        """Do the slow steps before `lead`. The whole log is confirmed. Raise as `lead`."""

    def lead(self, epoch: int) -> None:
        """Accept this broker's own records in the log from now on.

        Raise StoreError or ValueError: then the log is as before.
        """

    async def record_settled(self) -> bool:
        """Record in the log, after `lead`, that the archive is settled. Return False if the log is closed now."""

    def follow(self) -> None:
        """Reject own records from this moment on."""

    def before_truncation(self) -> None:
        """Stop applying changes to the tables until a master is followed again, because the log will be truncated."""

    async def reload(self) -> None:
        """Load the tables again, after `follow` or a truncation, because they contain more than the log.

        Called before a master is followed, while requests are refused. Raise as `lead`; the caller retries.
        """

    def confirmed(self) -> None:
        """Apply growth of the visible log."""

    def following(self, address: str, epoch: int, *, is_stock: bool) -> None:
        """Synchronize with a master, once the whole log is its.

        `is_stock`: it is Apache's, and has no tables in its log.
        """

    @property
    def has_image(self) -> bool:
        """Return whether all tables of the followed master have been installed."""


class SetArchive(Protocol):
    """The set's archive, during a change of role. Called on the event loop; only `settle` suspends."""

    @property
    def log_uuid(self) -> str:
        """Return the name by which the archive knows the log that all members have; empty: there is no archive."""

    @property
    def unsettled(self) -> str:
        """Return why `settle` fails; empty: it does not."""

    @property
    def eviction_frontier(self) -> int:
        """Return the offset below which the log is not needed: a new member's log may begin there."""

    def lead(self, master_epoch: int) -> None:
        """Begin the archive of a new master, which has appended nothing yet."""

    async def settle(self) -> bool:
        """Settle the archive of a master that may lack archived bytes, before it appends. Waits for the store.

        Return False if the term has ended.
        """

    def follow(self) -> None:
        """Stop archiving as the master."""

    def is_same_log(self, log_uuid: str) -> None:
        """Record that the own log is the master's, which the archive knows by this name."""

    def was_same_log(self, log_uuid: str) -> None:
        """Restore a name that `is_same_log` recorded in an earlier life."""
