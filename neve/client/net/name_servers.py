"""Asks the name servers of a cluster, of which any may be unreachable."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

from neve.client.net.connection import ConnectionPool
from neve.errors import BrokerError, ClientError, ConnectionFailed, NeveError, UnknownOutcome
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand

log = logging.getLogger(__name__)

_SEPARATORS = re.compile(r"[;,\s]+")


class NameServers:
    """The name servers of one cluster. `namesrv` lists their addresses, separated by semicolons.

    The first server of the list is asked; one that fails moves to its end.
    """

    def __init__(self, pool: ConnectionPool, namesrv: str, timeout: float) -> None:
        self._pool = pool
        self._timeout = timeout
        self._addresses = [address for address in _SEPARATORS.split(namesrv) if address]
        if not self._addresses:
            raise ClientError("no name server is given")

    @property
    def addresses(self) -> str:
        """The addresses, joined by semicolons."""
        return ";".join(self._addresses)

    async def connect(self) -> str:
        """Connect to the first reachable name server; return the local IP address of the connection.

        Raises:
            ConnectionFailed: none is reachable.
        """
        problems: list[str] = []
        for address in list(self._addresses):
            try:
                return (await self._pool.get(address)).local_ip
            except ConnectionFailed as error:
                log.info("name server unreachable: %s", error)
                problems.append(str(error))
                self._move_to_end(address)
        raise ConnectionFailed(f"no name server is reachable: {'; '.join(problems)}")

    async def ask(self, code: int, ext: Mapping[str, str]) -> RemotingCommand:
        """Return the answer of the first name server that answers, whatever its code.

        Raises:
            BrokerError: REQUEST_CODE_NOT_SUPPORTED if the server is not a name server.
            NeveError: none answers; the error of the last one.
        """
        problem: NeveError | None = None
        for _ in range(len(self._addresses)):
            address = self._addresses[0]
            try:
                answer = await self._pool.invoke(address, code, ext, timeout=self._timeout)
                if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                    why = f"{address} is no name server; is it the address of a broker?"
                    raise BrokerError(answer.code, f"{why} It answered: {answer.remark}")
                return answer
            except (ConnectionFailed, UnknownOutcome) as error:
                problem = error
                self._move_to_end(address)
        assert problem is not None
        raise problem

    async def read(self, code: int, ext: Mapping[str, str]) -> RemotingCommand:
        """Return an answer as `ask` does, for a question that precedes another request.

        Raises:
            ConnectionFailed: no name server answers, so the other request was not sent.
        """
        try:
            return await self.ask(code, ext)
        except UnknownOutcome as error:
            raise ConnectionFailed(f"no name server answers: {error}") from error

    def _move_to_end(self, address: str) -> None:
        if self._addresses[0] == address:  # another caller may have moved it already
            self._addresses.append(self._addresses.pop(0))
