"""The controllers of `controllerAddr`: one connection to each, made again when it is gone.

A controller takes the end of a broker's connection for its death, so heartbeats go to all of them, over the connection
that stands. Anything else is asked of one after the other: of neve's controllers any answers, of Apache's the leader of
their group. Apache's does not know one life of a member from the next, and might elect one that has lost what it
acknowledged: it is refused to a member that could.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence

from broker.ha.controller_calls import Call
from infra.net.remoting_server import Connection, open_connection
from neve.errors import NeveError
from neve.remoting.address import parse_address
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand

log = logging.getLogger(__name__)

ASK_S = 3.0
CONNECT_S = 2.0
# So many requests in a row without an answer: nobody is there. Not sooner: a connection's end is this broker's death.
SILENT_AFTER = 3
KNOWS_LIVES = "knowsIncarnations"  # in the answer to 1005: it tells one life of a member from the next

Sign = Callable[[dict[str, str], bytes], dict[str, str]]


class Unheard(NeveError):
    """No controller has answered."""

    def __init__(self, remark: str) -> None:
        super().__init__(None, remark)


class _Lost(NeveError):
    """A request was sent and not answered: nobody knows what became of it."""


class Controllers:
    """See the module."""

    def __init__(
        self, addresses: Sequence[str], *, sign: Sign, stock_is_refused: str = "", tls: ssl.SSLContext | None = None
    ) -> None:
        """`sign` adds to the fields of a request who asks; `stock_is_refused`: why Apache's controller won't do."""
        assert addresses
        self._links = [_Link(address, sign, stock_is_refused, tls) for address in addresses]

    @property
    def connected(self) -> int:
        """How many are."""
        return sum(link.is_connected for link in self._links)

    @property
    def troubles(self) -> dict[str, str]:
        """Address → what is wrong, of those that are not connected."""
        return {link.address: link.trouble for link in self._links if not link.is_connected and link.trouble}

    @property
    def are_stock(self) -> bool:
        """Whether they are Apache's, as far as they have answered."""
        return any(link.is_stock for link in self._links)

    async def ask(self, call: Call) -> RemotingCommand:
        """The answer of the first that gives one. Raises Unheard.

        A change of the SyncStateSet that was sent and not answered is not sent again here: what another one refuses
        may be done yet by the first, and who asked must not take that answer for both.
        """
        heard = list[str]()
        for link in list(self._links):
            is_lost = False
            try:
                answer = await link.ask(call)
                if answer.code != ResponseCode.CONTROLLER_NOT_LEADER:
                    return answer
                why = "it is not the leader"
            except (OSError, TimeoutError, NeveError) as error:
                why, is_lost = str(error) or type(error).__name__, isinstance(error, _Lost)
            heard.append(f"{link.address}: {why}")
            self._links.remove(link)
            self._links.append(link)  # whoever answered last is asked first
            if is_lost and call.code == RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET:
                break
        raise Unheard("; ".join(heard))

    async def tell(self, call: Call) -> list[RemotingCommand]:
        """To all of them, at once; what those that answered said.

        Who has not answered the last one is left out: what is told next is newer.
        """
        free = [link for link in self._links if not link.is_told]
        told = await asyncio.gather(*(link.tell(call) for link in free), return_exceptions=True)
        for one in told:
            if isinstance(one, BaseException) and not isinstance(one, OSError | TimeoutError | NeveError):
                raise one
        return [one for one in told if isinstance(one, RemotingCommand)]

    def hang_up(self) -> None:
        """A member whose connections close is dead for its controllers at once; until it asks something again."""
        for link in self._links:
            link.close()

    def close(self) -> None:
        """As `hang_up`, for good."""
        for link in self._links:
            link.end()


class _Link:
    """To one controller."""

    def __init__(self, address: str, sign: Sign, stock_is_refused: str, tls: ssl.SSLContext | None) -> None:
        self.address, self._sign, self._tls = address, sign, tls
        self._stock_is_refused = stock_is_refused
        self.is_stock = False
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._unanswered = 0
        self._failure: Exception | None = None  # what the last try to connect ended with
        self._is_ended = False
        self.is_told = False  # and has not answered
        self.trouble = ""

    @property
    def is_connected(self) -> bool:
        return self._connection is not None and not self._connection.is_closed

    async def tell(self, call: Call) -> RemotingCommand:
        """As `ask`; one at a time."""
        self.is_told = True
        try:
            return await self.ask(call)
        finally:
            self.is_told = False

    async def ask(self, call: Call) -> RemotingCommand:
        """Raises OSError, TimeoutError, NeveError; _Lost of what was sent."""
        try:
            connection = await self._connect()
        except (OSError, TimeoutError, NeveError) as error:
            self._fail(error)
            raise
        try:
            answer = await self._invoke(connection, call)
        except (OSError, TimeoutError, NeveError) as error:
            self._fail(error)
            raise _Lost(None, self.trouble) from error
        self._unanswered = 0
        return answer

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, TimeoutError):
            self._note(str(error) or type(error).__name__)
            self.close()
            return
        self._unanswered += 1
        self._note(f"does not answer within {ASK_S:g} s")
        if self._unanswered >= SILENT_AFTER:
            self.close()

    async def _connect(self) -> Connection:
        """One tries for all who wait: of a controller that hangs they would be more and more."""
        known = self._failure
        async with self._connecting:
            if self._failure is not None and self._failure is not known:
                raise self._failure
            try:
                return await self._connected()
            except (OSError, TimeoutError, NeveError) as error:
                self._failure = error
                raise

    async def _connected(self) -> Connection:
        connection = self._connection
        if connection is not None and not connection.is_closed:
            return connection
        if self._is_ended:
            raise ConnectionAbortedError("this broker leaves its set")
        async with asyncio.timeout(CONNECT_S):
            connection = await open_connection(*parse_address(self.address), tls=self._tls)
        try:
            await self._check(connection)
            if self._is_ended:
                raise ConnectionAbortedError("this broker leaves its set")
        except BaseException:
            connection.close()
            raise
        log.info("connected to the controller at %s", self.address)
        self._connection, self.trouble = connection, ""
        return connection

    async def _check(self, connection: Connection) -> None:
        answer = await self._invoke(connection, Call(RequestCode.CONTROLLER_GET_METADATA_INFO, {}))
        if answer.code != ResponseCode.SUCCESS:
            raise NeveError(answer.code, answer.remark or "refused")
        is_stock = answer.ext.get(KNOWS_LIVES) != "true"
        if is_stock and self._stock_is_refused:
            raise NeveError(None, f"it is Apache's controller: {self._stock_is_refused}")
        self.is_stock = is_stock

    async def _invoke(self, connection: Connection, call: Call) -> RemotingCommand:
        request = RemotingCommand(call.code, ext=self._sign(call.ext, call.body), body=call.body)
        return await connection.invoke(request, ASK_S)

    def _note(self, why: str) -> None:
        if why != self.trouble:
            log.warning("the controller at %s: %s", self.address, why)
        self.trouble = why

    def end(self) -> None:
        """For good."""
        self._is_ended = True
        self.close()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        self._unanswered = 0
        if connection is not None:
            connection.close()
