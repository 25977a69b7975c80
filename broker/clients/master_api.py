"""Requests of a slave to its master (a part of RocketMQ's BrokerOuterAPI)."""

from __future__ import annotations

from access.config import SecurityConfig
from access.wiring import peer_security
from infra.net.remoting_peer import RemotingPeer
from neve.errors import BrokerError
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand

_CONNECT_S, _ANSWER_S = 3.0, 10.0


class MasterApi:
    """Connection to the master's address of the last request."""

    def __init__(self, config: SecurityConfig) -> None:
        self._security = peer_security(config)
        self._peer: RemotingPeer | None = None

    async def ask(self, address: str, code: RequestCode, ext: dict[str, str]) -> RemotingCommand:
        """Return a successful answer. Raises BrokerError for any other one, OSError, TimeoutError, NeveError."""
        answer = await self._peer_at(address).invoke(code, ext, timeout=_ANSWER_S)
        if answer.code != ResponseCode.SUCCESS:
            raise BrokerError(answer.code, answer.remark or "the master gave no reason")
        return answer

    async def reaches(self, address: str) -> bool:
        """Return whether the address accepts connections; the server may be frozen. Raises NeveError for a bad one."""
        try:
            await self._peer_at(address).connect()
        except (OSError, TimeoutError):
            return False
        return True

    def close(self) -> None:
        """Close the connection; requests in flight fail."""
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.close()

    def _peer_at(self, address: str) -> RemotingPeer:
        if self._peer is None or self._peer.address != address:
            self.close()
            self._peer = RemotingPeer(address, self._security, connect_s=_CONNECT_S)
        return self._peer
