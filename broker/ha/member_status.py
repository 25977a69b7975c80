"""State of a member for operators: its faults, and its status page."""

from __future__ import annotations

from typing import Any, NamedTuple

from broker.ha.confirm import HeldBack
from broker.ha.member import State
from broker.ha.replicas_manager import ReplicasManager
from broker.role import Role

_MEANINGS = {
    HeldBack.TOO_FEW: "sends are refused with code 1",
    HeldBack.AWAY: "sends are answered FLUSH_SLAVE_TIMEOUT, until it comes back or leaves the SyncStateSet",
    HeldBack.SILENT: "sends are answered FLUSH_SLAVE_TIMEOUT, until it reports or leaves the SyncStateSet",
    HeldBack.CUT_OFF: "sends are refused with code 1: another may be master",
}


class MemberFault(NamedTuple):
    """A fault of a member: its name, its start (ms), its cause, and its effect on users."""

    name: str
    since_ms: int
    why: str
    means: str


def faults(replicas: ReplicasManager) -> list[MemberFault]:
    """Return the faults that keep this member from its work. A start of 0 ms means that it is unknown."""
    fault = _fault(replicas)
    found = [] if fault is None else [fault]
    if unsettled := replicas.term.settling.fault:
        means = "this member was elected, and accepts no sends until the archive is settled"
        found.append(MemberFault("broker set: archive not settled", 0, unsettled, means))
    return found


def _fault(replicas: ReplicasManager) -> MemberFault | None:
    member, role, requests = replicas.member, replicas.role, replicas.requests
    state, since = member.state, replicas.state_since_ms
    if state is State.REFUSED:
        why = replicas.operator_message or "it must not continue without an operator"
        return MemberFault("broker set: an operator is needed", since, why, "this member serves no requests")
    if member.is_to_join and requests.knows_member:
        means = "this member waits and has no data of the set; if no member has, use `neve broker-set elect`"
        why = "no controller knows a master of the set, and brokerSetExists=true: is the register lost?"
        return MemberFault("broker set: not found", since, why, means)
    if role.is_truncating:
        why = "its diverged tail is being truncated: another member was elected without it"
        return MemberFault("broker set: truncating", since, why, "this member serves no requests until that is done")
    if role.broker.current is Role.FENCED:
        unheard = "; ".join(f"{address}: {why}" for address, why in sorted(requests.controllers.troubles.items()))
        means = "this member serves no requests until a controller assigns its role"
        return MemberFault("broker set: no role", since, unheard or f"its state is {state.value}", means)
    if state is State.SLAVE and not role.is_attached:
        fault = role.client.trouble if role.client is not None else None
        why = fault.text if fault is not None else replicas.follower.lookup.trouble or "the master can't be reached"
        return MemberFault("broker set: no master followed", 0, why, "new messages of the set are not copied here")
    if (confirming := replicas.term.confirming) is not None:
        held, who = confirming.held(replicas.clock.monotonic())
        if held in _MEANINGS:
            why = f"{held.value} (member {who})" if who else held.value
            return MemberFault("broker set: not confirmed", 0, why, _MEANINGS[held])
    return None


def status(replicas: ReplicasManager) -> dict[str, Any]:
    """Return the state for display."""
    member, term, role = replicas.member, replicas.term, replicas.role
    view, confirming = member.record.view, term.confirming
    slaves = {} if confirming is None else {one: confirming.end_of(one) for one in sorted(term.ha_service.slaves)}
    return {
        "member": member.broker_id,
        "state": member.state.value,
        "role": role.broker.current.name.lower().replace("_", " "),
        "master": view.master,
        "masterAddress": view.master_address,
        "masterEpoch": view.master_epoch,
        "syncStateSet": sorted(view.sync_state_set),
        "syncStateSetEpoch": view.sync_state_set_epoch,
        "end": replicas.end,
        "confirmed": member.confirm,
        "slaves": slaves,
        "epochs": replicas.epochs.entries(),
        "controllers": replicas.requests.controllers.connected,
        "troubles": [fault._asdict() for fault in faults(replicas)],
    }
