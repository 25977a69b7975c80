"""Requests of a member to a controller, and the translation of answers to events. Pure.

Besides RocketMQ's fields, neve's members send `incarnation`, `starts`, `process` (1003 and 904), `minInSyncReplicas`,
`registerCheckCode` (1003), `masterEpoch`, `syncStateSetEpoch` (904) and `requestId` (1001); see `controller.requests`.

An answer without an event is None: the member asks again later.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import msgspec

from broker.ha.member_events import (
    Alter,
    AlterRefused,
    ApplyBrokerId,
    Ask,
    AskNextBrokerId,
    AskReplicaInfo,
    BrokerIdApplied,
    BrokerIdLost,
    BrokerIdTaken,
    Elect,
    Event,
    Heartbeat,
    Life,
    NextBrokerId,
    NotRegistered,
    Register,
    Registered,
    SetSeen,
    Superseded,
    View,
)
from neve.remoting.body import dumps, loads_as
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import Int32, Int64, optional_int, require_int, require_str

_NOT_REGISTERED = frozenset({
    ResponseCode.CONTROLLER_BROKER_METADATA_NOT_EXIST, ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED,
})  # fmt: skip

# Answers to a 1001 after which the change may be in force: the SSS has another epoch. Apache's controller does not
# recognize a repeated request, and refuses a set that equals the present one.
_PERHAPS_DONE = frozenset({ResponseCode.CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH})
_PERHAPS_DONE_AT_STOCK = _PERHAPS_DONE | {ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED}


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that identify a member in each request, besides its `Life`."""

    cluster: str
    name: str
    address: str  # host:port at which clients and controllers reach it
    min_in_sync_replicas: int
    heartbeat_timeout_ms: int
    election_priority: int


class ControllerCall(msgspec.Struct, frozen=True):
    """A request to a controller."""

    code: RequestCode
    ext: dict[str, str]
    body: bytes = b""


class _SyncStateSet(msgspec.Struct, rename="camel"):
    sync_state_set: list[Int64]
    sync_state_set_epoch: Int32 | None = None


# ---- requests


def call_of(ask: Ask, own: Identity, broker_id: int, *, log_epoch: int) -> ControllerCall:
    """Return the request for an action. `log_epoch` is the epoch of the last byte of the log."""
    code, names = RequestCode, {"clusterName": own.cluster, "brokerName": own.name}
    match ask:
        case AskNextBrokerId():
            return ControllerCall(code.CONTROLLER_GET_NEXT_BROKER_ID, names)
        case ApplyBrokerId():
            ext = {**names, "appliedBrokerId": str(ask.broker_id), "registerCheckCode": ask.check_code}
            return ControllerCall(code.CONTROLLER_APPLY_BROKER_ID, ext)
        case Register():
            ext = {
                **names,
                **_life(ask.life),
                "brokerAddress": own.address,
                "minInSyncReplicas": str(own.min_in_sync_replicas),
                "registerCheckCode": ask.check_code,
            }
            return ControllerCall(code.CONTROLLER_REGISTER_BROKER, ext)
        case Heartbeat():
            return ControllerCall(code.BROKER_HEARTBEAT, {**names, **_heartbeat(ask, own, log_epoch)})
        case Elect():
            who, designate = (broker_id, "false") if ask.designate is None else (ask.designate, "true")
            return ControllerCall(
                code.CONTROLLER_ELECT_MASTER, {**names, "brokerId": str(who), "designateElect": designate}
            )
        case AskReplicaInfo():
            return ControllerCall(code.CONTROLLER_GET_REPLICA_INFO, names)
        case Alter():
            ext = {
                **names,
                "masterBrokerId": str(broker_id),
                "masterEpoch": str(ask.master_epoch),
                "requestId": ask.request_id,
            }
            wanted = {"syncStateSet": list(ask.members), "syncStateSetEpoch": ask.sync_state_set_epoch}
            return ControllerCall(code.CONTROLLER_ALTER_SYNC_STATE_SET, ext, dumps(wanted))


def _life(life: Life) -> dict[str, str]:
    return {
        "brokerId": str(life.broker_id),
        "incarnation": life.incarnation,
        "starts": str(life.starts),
        "process": life.process,
    }


def _heartbeat(ask: Heartbeat, own: Identity, log_epoch: int) -> dict[str, str]:
    return {
        **_life(ask.life),
        "brokerAddr": own.address,
        "epoch": str(log_epoch),
        "maxOffset": str(ask.end),
        "confirmOffset": str(ask.confirm),
        "heartbeatTimeoutMills": str(own.heartbeat_timeout_ms),
        "electionPriority": str(own.election_priority),
        "masterEpoch": str(ask.pair[0]),
        "syncStateSetEpoch": str(ask.pair[1]),
    }


# ---- answers


def event_of(
    ask: Ask, answer: RemotingCommand, own: Identity, broker_id: int, *, is_known: bool, is_stock: bool = False
) -> Event | None:
    """Return the event of an answer; None: the answer has none. Raise ProtocolError or ValueError if it can't be read.

    `is_known`: a controller has accepted this life of the member before. If a controller reports a later life then,
    that process is a copy of this data directory. Before that, it may be the previous life, whose end the controller
    has not noticed yet. `is_stock`: the controller is Apache's.
    """
    code = answer.code
    match ask:
        case AskNextBrokerId() if code == ResponseCode.SUCCESS:
            return NextBrokerId(require_int(answer.ext, "nextBrokerId"))
        case ApplyBrokerId() if code == ResponseCode.SUCCESS:
            return BrokerIdApplied(ask.broker_id)
        case ApplyBrokerId() if code == ResponseCode.CONTROLLER_BROKER_ID_INVALID:
            return BrokerIdTaken()
        case Register():
            return _registered(ask, answer, is_known=is_known)
        case Alter():
            return _altered(ask, answer, own, broker_id, _PERHAPS_DONE_AT_STOCK if is_stock else _PERHAPS_DONE)
        case Elect() | AskReplicaInfo():
            if code in _NOT_REGISTERED:
                return NotRegistered()
            if code in {ResponseCode.SUCCESS, ResponseCode.CONTROLLER_MASTER_STILL_EXIST}:
                return SetSeen(view_of(answer.ext, answer.body), ask.ask if isinstance(ask, AskReplicaInfo) else 0)
    return None


def _registered(ask: Register, answer: RemotingCommand, *, is_known: bool) -> Event | None:
    if answer.code in _NOT_REGISTERED:
        return NotRegistered()
    if answer.code == ResponseCode.CONTROLLER_BROKER_ID_INVALID:
        return BrokerIdLost(ask.life.broker_id)
    if answer.code == ResponseCode.CONTROLLER_INVALID_REQUEST and is_known:
        return Superseded(answer.remark or "the controller knows a later start of this directory")
    if answer.code == ResponseCode.SUCCESS:
        return Registered(view_of(answer.ext, answer.body) if answer.ext.get("masterBrokerId") else None)
    return None


def _altered(ask: Alter, answer: RemotingCommand, own: Identity, broker_id: int, perhaps_done: Set[int]) -> Event:
    if answer.code != ResponseCode.SUCCESS:
        return AlterRefused(ask.request_id, answer.code in perhaps_done)
    reply = loads_as(answer.body, _SyncStateSet)
    epoch = reply.sync_state_set_epoch
    if epoch is None:
        epoch = require_int(answer.ext, "newSyncStateSetEpoch")
    return SetSeen(View(ask.master_epoch, epoch, frozenset(reply.sync_state_set), broker_id, own.address))


def members_of(ext: Mapping[str, str]) -> int:
    """Return the number of members of the set from an answer to 1004; 0: Apache's controller omits it. Raise
    ProtocolError.
    """
    return optional_int(ext, "members", 0)


def view_of(ext: Mapping[str, str], body: bytes) -> View:
    """Return the view in an answer to 1002, 1003 or 1004, or in a 1008. Raise ProtocolError or ValueError."""
    reply: Any = loads_as(body, _SyncStateSet)
    epoch = reply.sync_state_set_epoch
    if epoch is None:
        epoch = require_int(ext, "syncStateSetEpoch")
    has_master = bool(ext.get("masterBrokerId"))
    return View(
        optional_int(ext, "masterEpoch", 0),
        epoch,
        frozenset(reply.sync_state_set),
        require_int(ext, "masterBrokerId") if has_master else None,
        require_str(ext, "masterAddress") if has_master else "",
    )
