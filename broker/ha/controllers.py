"""Connections to the controllers of `controllerAddr`: one to each, reconnected when it is lost.

A controller takes the end of a broker's connection for the death of the broker, so heartbeats go to all controllers
over established connections. Any other request goes to one controller after the other: any of neve's controllers
answers, but only the leader of Apache's group does.

Apache's controller can't distinguish two lives of a member. It might elect one that has lost acknowledged messages. A
member for which this is possible therefore refuses Apache's controllers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from broker.ha.controller_calls import ControllerCall
from infra.net.remoting_peer import PeerSecurity, RemotingPeer
from infra.net.remoting_server import Connection
from neve.errors import NeveError
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand

log = logging.getLogger(__name__)

ASK_S = 3.0
CONNECT_S = 2.0
# After this many unanswered requests in a row the connection is closed. Not sooner: the controller takes a closed
# connection for the death of this broker.
SILENT_AFTER = 3
KNOWS_LIVES = "knowsIncarnations"  # in the answer to 1005: the controller distinguishes the lives of a member


class NoControllerAnswered(NeveError):
    """No controller has answered."""

    def __init__(self, remark: str) -> None:
        super().__init__(None, remark)


class _Lost(NeveError):
    """A request was sent and not answered: its outcome is unknown."""


class Controllers:
    """Client of all controllers."""

    def __init__(self, addresses: Sequence[str], security: PeerSecurity, *, stock_is_refused: str = "") -> None:
        """`stock_is_refused` is the reason why Apache's controllers are not accepted; empty: they are."""
        assert addresses
        self._links = [_Link(address, security, stock_is_refused) for address in addresses]

    @property
    def connected(self) -> int:
        """Return the number of established connections."""
        return sum(link.peer.is_connected for link in self._links)

    @property
    def troubles(self) -> dict[str, str]:
        """Map the address of each disconnected controller to its last error."""
        return {link.address: link.trouble for link in self._links if not link.peer.is_connected and link.trouble}

    @property
    def are_stock(self) -> bool:
        """Return whether the controllers are Apache's, as far as they have answered."""
        return any(link.is_stock for link in self._links)

    async def ask(self, call: ControllerCall) -> RemotingCommand:
        """Return the first answer. Raise NoControllerAnswered if there is none.

        A change of the SyncStateSet that was sent and not answered is not sent to the next controller. The first
        controller may still execute it, and the refusal of the second must not count for both.
        """
        failures = list[str]()
        for link in list(self._links):
            is_lost = False
            try:
                answer = await link.ask(call)
                if answer.code != ResponseCode.CONTROLLER_NOT_LEADER:
                    return answer
                why = "it is not the leader"
            except (OSError, TimeoutError, NeveError) as error:
                why, is_lost = str(error) or type(error).__name__, isinstance(error, _Lost)
            failures.append(f"{link.address}: {why}")
            self._links.remove(link)
            self._links.append(link)  # the controller that answered last is asked first
            if is_lost and call.code == RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET:
                break
        raise NoControllerAnswered("; ".join(failures))

    async def send(self, call: ControllerCall) -> list[RemotingCommand]:
        """Send a request to all controllers concurrently, and return the answers.

        A controller that has not answered the previous one is skipped: the next request is newer anyway.
        """
        free = [link for link in self._links if not link.is_request_in_flight]
        results = await asyncio.gather(*(link.send(call) for link in free), return_exceptions=True)
        for one in results:
            if isinstance(one, BaseException) and not isinstance(one, OSError | TimeoutError | NeveError):
                raise one
        return [one for one in results if isinstance(one, RemotingCommand)]

    def hang_up(self) -> None:
        """Drop all connections, until the next request. The controllers then consider this member dead."""
        for link in self._links:
            link.peer.drop()

    def close(self) -> None:
        """Drop all connections for good."""
        for link in self._links:
            link.peer.close()


class _Link:
    """The connection to one controller."""

    def __init__(self, address: str, security: PeerSecurity, stock_is_refused: str) -> None:
        self.address, self._stock_is_refused = address, stock_is_refused
        self.peer = RemotingPeer(
            address, security, connect_s=CONNECT_S, max_timeouts=SILENT_AFTER, on_connect=self._check
        )
        self.is_stock = False
        self.is_request_in_flight = False  # a request of `send` is in flight
        self.trouble = ""

    async def send(self, call: ControllerCall) -> RemotingCommand:
        """As `ask`; the caller sends one request at a time."""
        self.is_request_in_flight = True
        try:
            return await self.ask(call)
        finally:
            self.is_request_in_flight = False

    async def ask(self, call: ControllerCall) -> RemotingCommand:
        """Return the answer. Raise OSError, TimeoutError or NeveError; _Lost if the request was sent."""
        is_sent = False
        try:
            await self.peer.connect()
            is_sent = True
            return await self.peer.invoke(call.code, call.ext, call.body, timeout=ASK_S)
        except (OSError, TimeoutError, NeveError) as error:
            is_late = isinstance(error, TimeoutError)
            why = f"does not answer within {ASK_S:g} s" if is_late else str(error) or type(error).__name__
            if why != self.trouble:
                log.warning("the controller at %s: %s", self.address, why)
            self.trouble = why
            if is_sent:
                raise _Lost(None, why) from error
            raise

    async def _check(self, connection: Connection) -> None:
        request = self.peer.request(RequestCode.CONTROLLER_GET_METADATA_INFO, {})
        answer = await connection.invoke(request, ASK_S)
        if answer.code != ResponseCode.SUCCESS:
            raise NeveError(answer.code, answer.remark or "refused")
        is_stock = answer.ext.get(KNOWS_LIVES) != "true"
        if is_stock and self._stock_is_refused:
            raise NeveError(None, f"it is Apache's controller: {self._stock_is_refused}")
        self.is_stock, self.trouble = is_stock, ""
        log.info("connected to the controller at %s", self.address)
