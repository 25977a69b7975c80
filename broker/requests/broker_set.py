"""A broker in its set: its HA port (906), who follows (907), hand-over (1002), who wrote its log (1007), news (1008).

906 is RocketMQ's way for a slave to find the HA port: it asks its master with an empty request. 1002 is a controller's
request: asked of a master of neve's, it has all of its log reach the next one before that is elected.
"""

from __future__ import annotations

from typing import Any

from broker.ha.controller_calls import view_of
from broker.ha.frames import FORMAT, HELLO_FORMAT
from broker.ha.plain_slave import PlainSlave
from broker.ha.replicas_manager import HandOverRefused, ReplicasManager
from broker.store.message_store import MessageStore
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.body import dumps
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import optional_int

_ANYBODY = -1
_ALONE = "this request only for controllerMode"


class BrokerSetProcessor:
    """A part of RocketMQ's AdminBrokerProcessor."""

    def __init__(
        self,
        store: MessageStore,
        replicas: ReplicasManager | None,
        plain_slave: PlainSlave | None = None,
        *,
        cluster: str,
        name: str,
        address: tuple[str, int],
    ) -> None:
        """`replicas`: None of a broker in no set; `plain_slave`: of one that follows a master without a controller."""
        self._store, self._replicas, self._plain_slave = store, replicas, plain_slave
        self._cluster, self._name, self._address = cluster, name, address

    def exchange_ha_info(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """906: asked of a master, nothing is told to it. `masterFlushOffset` is where its log ended at its start."""
        replicas, (host, port) = self._in_set(), self._address
        ext = {
            "masterHaAddress": f"{host}:{replicas.ha_service.port}",
            "masterAddress": f"{host}:{port}",
            "masterFlushOffset": str(replicas.end_at_start),
            HELLO_FORMAT: str(FORMAT),
        }
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext=ext)

    def ha_status(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """907."""
        replicas, end = self._replicas, self._store.max_physical_offset
        slave = self._plain_slave
        is_master = slave is None and (replicas is None or replicas.leads)
        as_slave = dict[str, Any]()
        if slave is not None:
            as_slave = self._as_slave(slave.master_address, activated=slave.is_attached)
        elif replicas is not None and not is_master:
            session = replicas.client.session if replicas.client is not None else None
            as_slave = self._as_slave(replicas.member.view.master_address, activated=session is not None)
        body: dict[str, Any] = {
            "haClientRuntimeInfo": as_slave,
            "haConnectionInfo": [] if replicas is None else _slaves(replicas, end),
            "inSyncSlaveNums": 0 if replicas is None else replicas.in_sync_slaves,
            "master": is_master,
            "masterCommitLogMaxOffset": end,
        }
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps(body))

    def _as_slave(self, master_address: str, *, activated: bool) -> dict[str, Any]:
        return {
            "activated": activated,
            "lastReadTimestamp": 0,
            "lastWriteTimestamp": 0,
            "masterAddr": master_address,
            "masterFlushOffset": 0,
            "maxOffset": self._store.max_physical_offset,
            "transferredByteInSecond": 0,
        }

    async def elect_master(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """1002: `brokerId` shall lead, or whoever has most. The answer comes when it is elected."""
        replicas, target = self._in_set(), optional_int(request.ext, "brokerId", _ANYBODY)
        try:
            elected = await replicas.hand_over(None if target == _ANYBODY else target)
        except HandOverRefused as error:
            raise BrokerError(ResponseCode.CONTROLLER_ELECT_MASTER_FAILED, str(error)) from error
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext={"masterBrokerId": str(elected)})

    def epoch_cache(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """1007: with which life of this broker answers, for a controller that is about to elect."""
        replicas = self._in_set()
        entries, end, life = replicas.epochs.entries(), self._store.max_physical_offset, replicas.member.life
        ends = [start for _, start in entries[1:]] + [end]
        body = {
            "brokerId": life.broker_id,
            "brokerName": self._name,
            "clusterName": self._cluster,
            "epochList": [
                {"endOffset": stop, "epoch": epoch, "startOffset": start}
                for (epoch, start), stop in zip(entries, ends, strict=bool(entries))
            ],
            "maxOffset": end,
        }
        ext = {"incarnation": life.incarnation, "process": life.process, "starts": str(life.starts)}
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext=ext, body=dumps(body))

    def role_changed(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """1008: one-way as a rule."""
        self._in_set().notified(view_of(request.ext, request.body))
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    def _in_set(self) -> ReplicasManager:
        if self._replicas is None:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, _ALONE)
        return self._replicas


def _slaves(replicas: ReplicasManager, end: int) -> list[dict[str, Any]]:
    """As `mqadmin haStatus` shows them."""
    confirming = replicas.member.confirming
    if confirming is None:
        return []
    found = []
    for member_id, session in sorted(replicas.ha_service.slaves.items()):
        acknowledged = max(confirming.end_of(member_id), 0)
        found.append({
            "addr": f"member {member_id}",
            "diff": end - acknowledged,
            "inSync": confirming.in_sync(member_id),
            "slaveAckOffset": acknowledged,
            "transferFromWhere": max(session.position, 0),
            "transferredByteInSecond": 0,
        })  # fmt: skip
    return found
