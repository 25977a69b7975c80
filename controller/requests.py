"""Request handlers of a controller: convert header fields and bodies to and from the requests of `decision`.

In addition to RocketMQ's fields, neve's brokers send `incarnation`, `starts`, `process` (1003 and 904),
`minInSyncReplicas` (1003), `masterEpoch`, `syncStateSetEpoch` (904) and `requestId` (1001). `broker_set` explains them.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from access.permissions import GET, UPDATE, of_cluster
from access.route import Route, routes_of
from controller.broker_sets import SetRegistry
from controller.controller_config import ControllerConfig
from controller.decision import (
    BY_CONTROLLER,
    DEFAULT_TIMEOUT_MS,
    LOWEST_PRIORITY,
    UNKNOWN,
    AlterSyncStateSet,
    Answer,
    ApplyBrokerId,
    CleanBrokerData,
    ElectMaster,
    GetNextBrokerId,
    GetReplicaInfo,
    GetSyncStateData,
    RegisterBroker,
    ReplicaInfo,
    Report,
)
from controller.liveness import Liveness
from infra.config.properties import ConfigError, parse_properties, to_properties, update_live
from infra.net.remoting_server import Connection
from infra.observe import log as logs
from neve.errors import BrokerError
from neve.remoting.body import dumps, dumps_object_keys, loads_as
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import Int32, Int64, optional_bool, optional_int, require_int, require_str

log = logging.getLogger(__name__)

MAX_NAME = 255
MAX_MARK = 64  # length of incarnations, processes and request ids
FIRST_HEARTBEAT_S = 1.0
MAX_NAMES = 1_000  # names in one GET_SYNC_STATE_DATA request
_TIMEOUTS_MS = range(100, 600_001)
_INT32 = range(2**31)
_NOBODY = b'{"syncStateSet":[],"syncStateSetEpoch":0}'


class _SyncStateSet(msgspec.Struct, rename="camel"):
    sync_state_set: list[Int64]
    sync_state_set_epoch: Int32


class ControllerProcessor:
    """Twelve request codes of RocketMQ's controller, and BROKER_HEARTBEAT (904)."""

    def __init__(self, config: ControllerConfig, sets: SetRegistry, liveness: Liveness) -> None:
        self._config, self._sets, self._liveness = config, sets, liveness

    # ---- metadata

    @Route(Code.CONTROLLER_GET_METADATA_INFO, of_cluster(GET), reads=True)
    def metadata(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Serve 1005. Each controller answers every request, so each reports itself as the leader."""
        config, peer = self._config, self._config.peer
        host, port = (peer.host, peer.port) if peer is not None else connection.local
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        own_id = config.controller_dleger_self_id
        ext = {
            "group": config.controller_dleger_group,
            "controllerLeaderId": own_id,
            "controllerLeaderAddress": address,
            "isLeader": "true",
            "peers": "".join(f"{one.id}:{one.host}:{one.port};" for one in config.peers) or f"{own_id}:{address};",
            "knowsIncarnations": "true",  # neve's brokers join only controllers that report it
        }
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext=ext)

    # ---- becoming a member

    @Route(Code.CONTROLLER_GET_NEXT_BROKER_ID, of_cluster(UPDATE), reads=True)
    async def next_broker_id(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        """Serve 1012."""
        identity = _cluster_and_name(request)
        answer = await self._sets.carry_out(GetNextBrokerId(**identity))
        return _answered(request, answer, {**_wire(identity), "nextBrokerId": answer.next_broker_id})

    @Route(Code.CONTROLLER_APPLY_BROKER_ID, of_cluster(UPDATE), reads=False)
    async def apply_broker_id(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        """Serve 1013."""
        identity = _cluster_and_name(request)
        applied = ApplyBrokerId(
            **identity,
            broker_id=require_int(request.ext, "appliedBrokerId"),
            check_code=_name(request, "registerCheckCode"),
        )
        return _answered(request, await self._sets.carry_out(applied), _wire(identity))

    @Route(Code.CONTROLLER_REGISTER_BROKER, of_cluster(UPDATE), reads=False)
    async def register_broker(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        """Serve 1003."""
        identity, ext = _cluster_and_name(request), request.ext
        incarnation = _mark(request, "incarnation")
        least = optional_int(ext, "minInSyncReplicas", 1)
        if not 1 <= least <= MAX_MARK:
            raise BrokerError(ResponseCode.CONTROLLER_INVALID_REQUEST, f"minInSyncReplicas {least}")
        registered = RegisterBroker(
            **identity,
            broker_id=require_int(ext, "brokerId"),
            address=_name(request, "brokerAddress"),
            incarnation=incarnation,
            starts=_bounded(request, "starts", 0) if incarnation else 0,
            process=_mark(request, "process") if incarnation else "",
            min_in_sync_replicas=least,
            check_code=_name(request, "registerCheckCode") if ext.get("registerCheckCode") else "",
        )
        answer = await self._sets.carry_out(registered)
        roles = _roles(answer) if answer.master is not None else {}
        body = _sync_state_set(answer)
        if answer.code == ResponseCode.SUCCESS and answer.sync_state_set is None:
            body = _NOBODY  # the set is frozen: no role is returned, but Apache's broker requires a body to continue
        return _answered(request, answer, {**_wire(identity), **roles}, body)

    @Route(Code.BROKER_HEARTBEAT, of_cluster(UPDATE), reads=False)
    async def heartbeat(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Serve 904."""
        ext = request.ext
        if not ext.get("brokerId"):
            raise BrokerError(ResponseCode.CONTROLLER_INVALID_REQUEST, "Heart beat with empty brokerId")
        identity, broker_id = _cluster_and_name(request), require_int(ext, "brokerId")
        incarnation = _mark(request, "incarnation")
        timeout_ms = optional_int(ext, "heartbeatTimeoutMills", DEFAULT_TIMEOUT_MS)
        report = Report(
            heard_ms=0,
            timeout_ms=min(max(timeout_ms, _TIMEOUTS_MS[0]), _TIMEOUTS_MS[-1]),
            address=_name(request, "brokerAddr"),
            cluster=identity["cluster"],
            epoch=_bounded(request, "epoch", UNKNOWN),
            max_offset=optional_int(ext, "maxOffset", UNKNOWN),
            confirm_offset=optional_int(ext, "confirmOffset", UNKNOWN),
            priority=_bounded(request, "electionPriority", LOWEST_PRIORITY),
            incarnation=incarnation,
            starts=_bounded(request, "starts", 0) if incarnation else 0,
            process=_mark(request, "process") if incarnation else "",
            master_epoch=_bounded(request, "masterEpoch", UNKNOWN),
            sync_state_set_epoch=_bounded(request, "syncStateSetEpoch", UNKNOWN),
        )
        name = identity["name"]
        stored = self._sets.glance(name)  # a heartbeat must be accepted even if the register is unavailable
        if stored is not None and stored.cluster != report.cluster:
            remark = f"{name} is a broker set of cluster {stored.cluster}, not {report.cluster}"
            raise BrokerError(ResponseCode.CONTROLLER_INVALID_REQUEST, remark)
        member = stored.member(broker_id) if stored is not None else None
        if connection.is_closed:  # the close event has already passed, so the member would never count as lost
            raise BrokerError(ResponseCode.CONTROLLER_INVALID_REQUEST, "the connection is closed")
        if not self._liveness.record_heartbeat(name, broker_id, report, connection, member):
            remark = f"brokerId {broker_id} of {name} is another process, which lives"
            raise BrokerError(ResponseCode.CONTROLLER_INVALID_REQUEST, remark)
        self._sets.heard(name)
        return RemotingCommand.response(request, ResponseCode.SUCCESS, "Heart beat success")

    # ---- roles

    @Route(Code.CONTROLLER_ELECT_MASTER, of_cluster(UPDATE), reads=False)
    async def elect_master(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Serve 1002."""
        ext = request.ext
        asked = ElectMaster(
            _name(request, "brokerName"),
            optional_int(ext, "brokerId", BY_CONTROLLER),
            optional_bool(ext, "designateElect"),
            ext.get("clusterName", ""),
        )
        if asked.designate:
            log.warning("%s:%d designates broker %d of %r", *connection.remote, asked.broker_id, asked.name)
        stored = await self._sets.stored(asked.name)
        if stored is not None and stored.member(asked.broker_id) is not None and not asked.designate:
            # Apache's broker sends its first heartbeat concurrently with this request. It waits 3 seconds for the
            # answer and retries only after 5 seconds.
            heard = self._liveness.until_alive(asked.name, asked.broker_id, FIRST_HEARTBEAT_S)
            if stored.master_epoch:
                await heard
            else:
                await asyncio.gather(heard, self._sets.until_all_have_beaten())
        answer = await self._sets.carry_out(asked)
        if answer.master is None:
            return _answered(request, answer, {})
        body: dict[str, Any] = {}
        if answer.addresses is not None:
            body["brokerMemberGroup"] = {
                "brokerAddrs": answer.addresses,
                "brokerName": asked.name,
                "cluster": answer.cluster,
            }
        body["syncStateSet"] = list(answer.sync_state_set or ())
        return _answered(request, answer, _roles(answer), dumps_object_keys(body))

    @Route(Code.CONTROLLER_ALTER_SYNC_STATE_SET, of_cluster(UPDATE), reads=False)
    async def alter_sync_state_set(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        """Serve 1001."""
        wanted = loads_as(request.body, _SyncStateSet)
        altered = AlterSyncStateSet(
            _name(request, "brokerName"),
            require_int(request.ext, "masterBrokerId"),
            require_int(request.ext, "masterEpoch"),
            tuple(wanted.sync_state_set),
            wanted.sync_state_set_epoch,
            _mark(request, "requestId"),
        )
        answer = await self._sets.carry_out(altered)
        ext = {"newSyncStateSetEpoch": answer.sync_state_set_epoch or 0}
        return _answered(request, answer, ext, _sync_state_set(answer))

    @Route(Code.CONTROLLER_GET_REPLICA_INFO, of_cluster(GET), reads=True)
    async def replica_info(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        """Serve 1004. `members` is the number of members; RocketMQ's answer does not have it."""
        answer = await self._sets.carry_out(GetReplicaInfo(_name(request, "brokerName")))
        roles = {**_roles(answer), "members": answer.members}
        del roles["syncStateSetEpoch"]
        return _answered(request, answer, roles, _sync_state_set(answer))

    @Route(Code.CONTROLLER_GET_SYNC_STATE_DATA, of_cluster(GET), reads=True)
    async def sync_state_data(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        """Serve 1006. Unknown names are left out of the answer."""
        names = loads_as(request.body, list[str]) if request.body else []
        if not names:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, "not set any response code")
        if len(names) > MAX_NAMES:
            raise BrokerError(ResponseCode.CONTROLLER_INVALID_REQUEST, f"{len(names)} names, {MAX_NAMES} at most")
        table: dict[str, Any] = {}
        for name in dict.fromkeys(names):
            answer = await self._sets.carry_out(GetSyncStateData(name))
            if answer.code == ResponseCode.SUCCESS:
                table[name] = {
                    "inSyncReplicas": _replicas(name, answer.in_sync),
                    "masterAddress": answer.master_address,
                    "masterBrokerId": answer.master,
                    "masterEpoch": answer.master_epoch,
                    "notInSyncReplicas": _replicas(name, answer.not_in_sync),
                    "syncStateSetEpoch": answer.sync_state_set_epoch,
                }
        body = dumps_object_keys({"replicasInfoTable": table})
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=body)

    @Route(Code.CLEAN_BROKER_DATA, of_cluster(UPDATE), reads=False)
    async def clean_broker_data(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Serve 1011."""
        ext = request.ext
        cleaned = CleanBrokerData(
            _name(request, "brokerName"),
            ext.get("brokerControllerIdsToClean", ""),
            optional_bool(ext, "isCleanLivingBroker"),
            ext.get("clusterName", ""),
        )
        what = cleaned.broker_ids or "the whole set"
        log.warning("%s:%d wants %r of %r forgotten", *connection.remote, what, cleaned.name)
        return _answered(request, await self._sets.carry_out(cleaned), {})

    # ---- settings

    @Route(Code.UPDATE_CONTROLLER_CONFIG, of_cluster(UPDATE), reads=False)
    def update_config(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Serve 1009. Only keys of an allow-list change; paths and ports never change over the wire."""
        try:
            changes = {key: value for _, key, value in parse_properties(request.body.decode(), "update")}
            update_live(self._config, changes)
        except (ConfigError, UnicodeDecodeError) as error:
            raise BrokerError(ResponseCode.NO_PERMISSION, str(error)) from error
        if "logLevel" in changes:
            logs.set_level(self._config.log_level)
        log.info("%s:%d changed %s", *connection.remote, sorted(changes))
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    @Route(Code.GET_CONTROLLER_CONFIG, of_cluster(GET), reads=True)
    def get_config(self, _: Connection, request: RemotingCommand) -> RemotingCommand:
        """Serve 1010."""
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=to_properties(self._config).encode())


ROUTES = routes_of(Route, [ControllerProcessor])

# ---- parsing of requests


def _name(request: RemotingCommand, field: str) -> str:
    value = require_str(request.ext, field)
    if not 0 < len(value) <= MAX_NAME:
        raise BrokerError(ResponseCode.CONTROLLER_INVALID_REQUEST, f"{field} has {len(value)} characters")
    return value


def _cluster_and_name(request: RemotingCommand) -> dict[str, str]:
    return {"cluster": _name(request, "clusterName"), "name": _name(request, "brokerName")}


def _mark(request: RemotingCommand, field: str) -> str:
    value = request.ext.get(field, "")
    if len(value) > MAX_MARK:
        raise BrokerError(ResponseCode.CONTROLLER_INVALID_REQUEST, f"{field} has {len(value)} characters")
    return value


def _bounded(request: RemotingCommand, field: str, default: int) -> int:
    value = optional_int(request.ext, field, default)
    if value != default and value not in _INT32:
        return default  # Apache's brokers send -1 for unknown values
    return value


# ---- building of answers


def _wire(identity: dict[str, str]) -> dict[str, Any]:
    return {"clusterName": identity["cluster"], "brokerName": identity["name"]}


def _roles(answer: Answer) -> dict[str, Any]:
    return {
        "masterBrokerId": answer.master,
        "masterAddress": answer.master_address,
        "masterEpoch": answer.master_epoch,
        "syncStateSetEpoch": answer.sync_state_set_epoch,
    }


def _sync_state_set(answer: Answer) -> bytes:
    if answer.sync_state_set is None:
        return b""
    return dumps({"syncStateSet": answer.sync_state_set, "syncStateSetEpoch": answer.sync_state_set_epoch})


def _replicas(name: str, replicas: tuple[ReplicaInfo, ...] | None) -> list[dict[str, Any]]:
    return [
        {"alive": replica.alive, "brokerAddress": replica.address, "brokerId": replica.id, "brokerName": name}
        for replica in replicas or ()
    ]


def _answered(request: RemotingCommand, answer: Answer, fields: dict[str, Any], body: bytes = b"") -> RemotingCommand:
    ext = {name: str(value) for name, value in fields.items() if value is not None}
    return RemotingCommand.response(request, answer.code, answer.remark or None, ext, body)
