"""Requests of a broker set: HA address (906), slaves (907), switchover (1002), epochs (1007), role changes (1008).

By 906, RocketMQ's slaves ask their master for its HA port, with an empty request. 1002 is a request to controllers. A
neve master accepts it too, and replicates its whole log to the target before the election.
"""

from __future__ import annotations

from typing import Any

from access.permissions import GET, UPDATE, of_cluster
from broker.ha.controller_calls import view_of
from broker.ha.frames import FORMAT, HELLO_FORMAT
from broker.ha.plain_slave import PlainSlave
from broker.ha.replicas_manager import ReplicasManager, SwitchoverRefused
from broker.requests.route import ANY_ROLE, BrokerRoute, Waits
from broker.store.message_store import MessageStore
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.body import dumps
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import optional_int

_ANYBODY = -1
_ALONE = "this request only for controllerMode"


class BrokerSetProcessor:
    """Handles requests of a broker set (a part of RocketMQ's AdminBrokerProcessor)."""

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
        """Create it; `replicas` is None without a broker set, `plain_slave` is set for a slave without a controller."""
        self._store, self._replicas, self._plain_slave = store, replicas, plain_slave
        self._cluster, self._name, self._address = cluster, name, address

    @BrokerRoute(Code.EXCHANGE_BROKER_HA_INFO, of_cluster(GET), ANY_ROLE, Waits.NO, reads=True, hides_topics=False)
    def exchange_ha_info(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return the addresses of this master (906); `masterFlushOffset` is the end of its log at its start."""
        replicas, (host, port) = self._in_set(), self._address
        ext = {
            "masterHaAddress": f"{host}:{replicas.term.ha_service.port}",
            "masterAddress": f"{host}:{port}",
            "masterFlushOffset": str(replicas.life.end_at_start),
            HELLO_FORMAT: str(FORMAT),
        }
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext=ext)

    @BrokerRoute(Code.GET_BROKER_HA_STATUS, of_cluster(GET), ANY_ROLE, Waits.NO, reads=True, hides_topics=False)
    def ha_status(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return the state of replication (907)."""
        replicas, end = self._replicas, self._store.max_physical_offset
        slave = self._plain_slave
        is_master = slave is None and (replicas is None or replicas.role.leads)
        as_slave = dict[str, Any]()
        if slave is not None:
            as_slave = self._as_slave(slave.master_address, activated=slave.is_attached)
        elif replicas is not None and not is_master:
            client = replicas.role.client
            session = client.session if client is not None else None
            as_slave = self._as_slave(replicas.member.record.view.master_address, activated=session is not None)
        body: dict[str, Any] = {
            "haClientRuntimeInfo": as_slave,
            "haConnectionInfo": [] if replicas is None else _slaves(replicas, end),
            "inSyncSlaveNums": 0 if replicas is None else len(replicas.term.in_sync),
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

    @BrokerRoute(Code.CONTROLLER_ELECT_MASTER, of_cluster(UPDATE), ANY_ROLE, Waits.NO, reads=False, hides_topics=False)
    async def elect_master(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Switch over to `brokerId`, or to the most advanced member (1002); answer after the election."""
        replicas, target = self._in_set(), optional_int(request.ext, "brokerId", _ANYBODY)
        try:
            elected = await replicas.switch_over(None if target == _ANYBODY else target)
        except SwitchoverRefused as error:
            raise BrokerError(ResponseCode.CONTROLLER_ELECT_MASTER_FAILED, str(error)) from error
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext={"masterBrokerId": str(elected)})

    @BrokerRoute(Code.GET_BROKER_EPOCH_CACHE, of_cluster(GET), ANY_ROLE, Waits.NO, reads=True, hides_topics=False)
    def epoch_cache(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return the epochs of the log (1007), and the identity of this process for a controller's election."""
        replicas = self._in_set()
        entries, end, life = replicas.epochs.entries(), self._store.max_physical_offset, replicas.member.record.life
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

    @BrokerRoute(
        Code.NOTIFY_BROKER_ROLE_CHANGED, of_cluster(UPDATE), ANY_ROLE, Waits.NO, reads=False, hides_topics=False
    )
    def role_changed(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Process a notification of a role change (1008), usually one-way."""
        self._in_set().notified(view_of(request.ext, request.body))
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    def _in_set(self) -> ReplicasManager:
        if self._replicas is None:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, _ALONE)
        return self._replicas


def _slaves(replicas: ReplicasManager, end: int) -> list[dict[str, Any]]:
    """Return the slaves in the form that `mqadmin haStatus` displays."""
    confirming = replicas.member.confirming
    if confirming is None:
        return []
    found = []
    for member_id, session in sorted(replicas.term.ha_service.slaves.items()):
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
