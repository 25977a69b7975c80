"""Requests of a member to its controllers: times, numbers, and the pending change of the SyncStateSet. Pure."""

from __future__ import annotations

from broker.ha.confirm import Confirm
from broker.ha.member_events import Action, Alter, AlterRefused, AskReplicaInfo, Heartbeat, Register
from broker.ha.member_rules import MemberRules


class MemberRequests:
    """Requests of one life of a member. A request is due once, and again after its interval (s)."""

    def __init__(self, rules: MemberRules, process: str) -> None:
        self._rules, self._process = rules, process
        self._due: dict[type, float] = {}
        self._replica_infos = 0  # number of the last 1004
        self._alters = 0
        self._altering: Alter | None = None  # the last 1001

    def is_due(self, what: type, now: float, every: float) -> bool:
        """Return whether this kind of request is due, and set its next time."""
        if now < self._due.get(what, now):
            return False
        self._due[what] = now + every
        return True

    def registered(self, now: float) -> None:
        """Set the time of the next registration of a life that a controller has accepted."""
        self._due[Register] = now + self._rules.register_every

    def regular(self, heartbeat: Heartbeat | None, register: Register, now: float) -> list[Action]:
        """Return the regular requests that are due now. `heartbeat` None: none is sent."""
        rules, actions = self._rules, list[Action]()
        if heartbeat is not None and self.is_due(Heartbeat, now, rules.heartbeat_every):
            actions.append(heartbeat)
        if self.is_due(AskReplicaInfo, now, rules.poll_every):
            actions.append(self.replica_info(now))
        if self.is_due(Register, now, rules.register_every):
            actions.append(register)
        return actions

    def replica_info(self, now: float) -> AskReplicaInfo:
        """Return the next 1004, which may be earlier than its time."""
        self._replica_infos += 1
        self._due[AskReplicaInfo] = now + self._rules.poll_every
        return AskReplicaInfo(self._replica_infos)

    # -- change of the SyncStateSet, as master

    def alter(self, confirming: Confirm, now: float, *, may_begin: bool) -> list[Action]:
        """Return the requests that change the SyncStateSet. `may_begin`: a change may begin if none is pending."""
        if not confirming.is_altering:
            wish = confirming.wish(now) if may_begin else None
            return [] if wish is None else [self._alter(confirming, wish, now)]
        if not self.is_due(Alter, now, self._rules.ask_again_after):
            return []
        assert self._altering is not None
        wanted = frozenset(self._altering.members)
        if confirming.allows(wanted):
            confirming.asked(wanted)
            again: Action = self._altering
        else:
            again = self._alter(confirming, confirming.sync_state_set.members, now)
        return [again, self.replica_info(now)]

    def _alter(self, confirming: Confirm, wanted: frozenset[int], now: float) -> Alter:
        based_on = confirming.asked(wanted)
        self._alters += 1
        self._due[Alter] = now + self._rules.ask_again_after
        request_id = f"{self._process}-{self._alters}"
        self._altering = Alter(request_id, confirming.master_epoch, based_on, tuple(sorted(wanted)))
        return self._altering

    def alter_refused(self, event: AlterRefused, confirming: Confirm) -> None:
        """Record that a try of a change had no effect."""
        altering = self._altering
        if altering is not None and altering.request_id == event.request_id and not event.has_moved:
            confirming.refused(altering.members, altering.sync_state_set_epoch)

    def altered(self) -> None:
        """Forget the last change: it is decided, or the term has ended."""
        self._altering = None
