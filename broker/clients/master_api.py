"""What a slave asks its master by Remoting (a part of RocketMQ's BrokerOuterAPI)."""

from __future__ import annotations

import asyncio

from access.config import SecurityConfig
from access.guard import inner_credentials
from infra.net.remoting_server import Connection, open_connection
from infra.net.tls import client_context
from neve.errors import BrokerError, NeveError
from neve.remoting.address import parse_address
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.signature import signed

_CONNECT_S, _ANSWER_S = 3.0, 10.0


class MasterApi:
    """One connection, to whoever was asked last; made again when it is gone, or when somebody else is asked."""

    def __init__(self, config: SecurityConfig) -> None:
        self._credentials = inner_credentials(config)
        self._tls = client_context(config.tls_trust_cert_path) if config.tls_enable else None
        self._address = ""
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()

    async def ask(self, address: str, code: RequestCode, ext: dict[str, str]) -> RemotingCommand:
        """The answer, a success. Raises BrokerError for any other, OSError, TimeoutError and other NeveErrors."""
        connection = await self._connect(address)
        if self._credentials is not None:
            ext = signed(*self._credentials, ext, b"")
        try:
            answer = await connection.invoke(RemotingCommand(code, ext=ext), _ANSWER_S)
        except TimeoutError:
            connection.close()  # an answer that comes too late is nobody's
            raise
        if answer.code != ResponseCode.SUCCESS:
            raise BrokerError(answer.code, answer.remark or "no reason told")
        return answer

    async def reaches(self, address: str) -> bool:
        """Whether somebody takes connections there, who may be frozen. Raises NeveError for what is no address."""
        try:
            await self._connect(address)
        except (OSError, TimeoutError):
            return False
        return True

    def close(self) -> None:
        """Nobody is asked any more; what waits for an answer gets none."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    async def _connect(self, address: str) -> Connection:
        async with self._connecting:
            known = self._connection
            if known is not None and not known.is_closed and self._address == address:
                return known
            self.close()
            try:
                host, port = parse_address(address)
            except ValueError as error:
                raise NeveError(None, str(error)) from error
            async with asyncio.timeout(_CONNECT_S):
                self._connection = await open_connection(host, port, tls=self._tls)
            self._address = address
            return self._connection
