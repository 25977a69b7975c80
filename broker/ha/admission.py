"""Admission of appends and answers by a member of a set: implements `broker.intake.replication`'s BrokerSetState.

It is called for every message. The `ReplicasManager` updates it.
"""

from __future__ import annotations

import logging

from broker.ha.confirm import HeldBack
from broker.ha.ha_service import HaService
from broker.ha.member import Member
from infra.clock import Clock

log = logging.getLogger(__name__)


class MemberAdmission:
    """Admission of one broker, as master or slave. The set's part `MemberRole` sets `leads`."""

    def __init__(self, member: Member, ha_service: HaService, clock: Clock) -> None:
        self._member, self._ha_service, self._now = member, ha_service, clock.monotonic
        #: This member is the master, its role-dependent state is loaded, and no switchover is in progress.
        self.leads = False

    def may_append(self) -> bool:
        """Return whether appends are allowed: this member leads, and enough members are in sync."""
        return self.leads and self._member.may_append(self._now())

    def acknowledged(self) -> int:
        """Return the offset below which records may be acknowledged; -1: none."""
        return self._member.acknowledged(self._now())

    def why_silent(self) -> str:
        """Return the reason for the error answers that clients get while nothing may be acknowledged."""
        confirming = self._member.confirming
        held = HeldBack.FENCED if confirming is None else confirming.held(self._now())[0]
        return f"{held.value}: another may be master" if held is HeldBack.CUT_OFF else held.value

    def archivable(self, synced: int) -> int:
        """Return the offset up to which the archive may upload; -1: unknown, or no master.

        `synced` is the own durable end.
        """
        confirming = self._member.confirming
        return -1 if confirming is None else confirming.archivable(synced)

    def deposed(self) -> None:
        """Take the news that the archive has a later master's EPOCH.

        The next answer to a 1004 shows which member that is.
        """
        log.warning(
            "the archive has an EPOCH of a later master: this member archives nothing until it knows that master"
        )

    def appended(self) -> None:
        """Take growth of the log. The new bytes are sent to slaves later in this iteration of the event loop."""
        self._ha_service.appended()
