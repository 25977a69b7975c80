"""Requests from a controller to brokers: GET_BROKER_EPOCH_CACHE (1007) and NOTIFY_BROKER_ROLE_CHANGED (1008).

Each call opens its own connection: calls are rare, and a shared connection would first have to be checked for a
frozen broker.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from access.wiring import peer_security
from controller.broker_set import BrokerSet, Member
from controller.controller_config import ControllerConfig
from controller.decision import UNKNOWN, Asked
from infra.net.remoting_peer import RemotingPeer
from neve.errors import NeveError
from neve.remoting.body import dumps, loads_as
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import Int32, Int64

log = logging.getLogger(__name__)

# An election waits this long for its slowest candidate; candidates without an answer are skipped.
ASK_S = 1.0
_TELL_S = 3.0


class _EpochEntry(msgspec.Struct, rename="camel"):
    epoch: Int32


class _EpochCache(msgspec.Struct, rename="camel"):
    max_offset: Int64
    broker_name: str | None = None
    epoch_list: list[_EpochEntry] | None = None


class BrokerCalls:
    """Calls to brokers. Each call has a time limit, and a failure is logged and not raised."""

    def __init__(self, config: ControllerConfig) -> None:
        self._security = peer_security(config)

    async def ask(self, name: str, member: Member) -> Asked:
        """Ask a member for its log's end. The answer must be of the process that registered, if it contains one."""
        peer = RemotingPeer(member.address, self._security, connect_s=ASK_S)
        try:
            async with asyncio.timeout(ASK_S):
                answer = await peer.invoke(RequestCode.GET_BROKER_EPOCH_CACHE, {}, timeout=ASK_S)
            return _asked(name, member, answer)
        except (OSError, TimeoutError, NeveError, ValueError) as error:
            log.warning(
                "broker %d of %r at %r does not report the end of its log: %r", member.id, name, member.address, error
            )
            return Asked(reachable=False)
        finally:
            peer.close()

    async def notify(self, broker_set: BrokerSet, member: Member) -> None:
        """Send the roles to a member as a one-way request; a member that misses it polls for them."""
        master = broker_set.member(broker_set.master)
        assert master is not None
        ext = {
            "masterAddress": master.address,
            "masterBrokerId": str(master.id),
            "masterEpoch": str(broker_set.master_epoch),
            "syncStateSetEpoch": str(broker_set.sync_state_set_epoch),
        }
        body = dumps({"syncStateSet": broker_set.sync_state_set, "syncStateSetEpoch": broker_set.sync_state_set_epoch})
        peer = RemotingPeer(member.address, self._security, connect_s=_TELL_S)
        try:
            connection = await peer.connect()
            connection.send_oneway(peer.request(RequestCode.NOTIFY_BROKER_ROLE_CHANGED, ext, body))
        except (OSError, TimeoutError, NeveError) as error:
            log.warning(
                "broker %d of %r at %r is not notified of its role: %r",
                member.id,
                broker_set.name,
                member.address,
                error,
            )
        finally:
            peer.close()


def _asked(name: str, member: Member, answer: RemotingCommand) -> Asked:
    if answer.code != ResponseCode.SUCCESS:
        raise NeveError(answer.code, answer.remark or "refused")
    cache = loads_as(answer.body, _EpochCache)
    if cache.broker_name not in (None, name):
        raise NeveError(None, f"it is a broker of {cache.broker_name!r}")
    born = (answer.ext.get("incarnation", ""), answer.ext.get("starts", "0"), answer.ext.get("process", ""))
    if born != (member.incarnation, str(member.starts), member.process):
        raise NeveError(None, "it is another process than the one that registered")
    entries = cache.epoch_list or []
    return Asked(reachable=True, epoch=entries[-1].epoch if entries else UNKNOWN, max_offset=cache.max_offset)
