"""What a member's set says of each append, and of each answer that waits (`broker.intake.replication`'s BrokerSet).

Asked for every message; told by the `ReplicasManager`, which knows the member and leads the log.
"""

from __future__ import annotations

import logging

from broker.ha.confirm import Held
from broker.ha.ha_service import HaService
from broker.ha.member import Member
from infra.clock import Clock

log = logging.getLogger(__name__)


class Reign:
    """Of one broker, whether it is master or not. `leads` and `member` are the manager's to set."""

    def __init__(self, ha_service: HaService, clock: Clock) -> None:
        self._ha_service, self._now = ha_service, clock.monotonic
        self.member: Member | None = None
        #: This member is the master, its books are read, and it hands over to nobody.
        self.leads = False

    def may_append(self) -> bool:
        """Whether enough members are in sync."""
        return self.leads and self.member is not None and self.member.may_append(self._now())

    def acknowledged(self) -> int:
        """Below this a record may be acknowledged; -1: nothing may."""
        return -1 if self.member is None else self.member.acknowledged(self._now())

    def why_silent(self) -> str:
        """For who is refused while nothing may be acknowledged."""
        confirming = None if self.member is None else self.member.confirming
        held = Held.FENCED if confirming is None else confirming.held(self._now())[0]
        return f"{held.value}: another may be master" if held is Held.CUT_OFF else held.value

    def archivable(self, synced: int) -> int:
        """How far a round of the archive may go, with so much on the own disk; -1: not known, or no master."""
        confirming = None if self.member is None else self.member.confirming
        return -1 if confirming is None else confirming.archivable(synced)

    def deposed(self) -> None:
        """The archive has a later master's EPOCH: who that is the next look at the controllers shows (1004)."""
        log.warning("the archive has a later master: this one archives nothing until it knows who that is")

    def appended(self) -> None:
        """The log has grown: it leaves for the slaves in this turn of the loop."""
        self._ha_service.appended()
