"""Synchronization of a slave's tables with its master. RocketMQ's SlaveSynchronize.

    topics, groups, modes, users, delay positions    an image at each connect; later changes are in the log
    group offsets                                    polled, all of them; each answer has the log end of that time

An Apache master has none of this in its log. All its tables are polled, as stock slaves do (`stock_tables`).

An answer belongs to one master in one epoch, and is dropped if the master has changed meanwhile. It is installed as a
whole, once the own log is confirmed up to the answer's log end. Before that, an offset above the log's end would skip
messages. Merged, a group that was reset to a lower offset would not go back.

A change in the log that this version can't read ends the synchronization: a slave with outdated tables must not become
master.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from broker.ha.asked import RequestClient
from broker.metadata.images import (
    Image,
    MetadataImage,
    OffsetsImage,
    Polled,
    decode_image,
    decode_offsets_image,
    inflated,
)
from broker.metadata.metadata_log import ImageNeeded
from broker.metadata.stock_tables import StockImage, ask_stock_master
from broker.tables.changes import UnreadableChange
from neve.errors import NeveError
from neve.remoting.codes import RequestCode

log = logging.getLogger(__name__)

POLL_S = 3.0  # as RocketMQ's slaves; a failover loses at most this much of groups' progress
STOCK_POLL_S = 9.0  # all tables each time: about as often as a stock slave, which polls every 10 s
#: Request header: the epoch of the master that has to answer. Answer header: it is an image.
MASTER_EPOCH, IS_IMAGE = "masterEpoch", "image"


class Master(msgspec.Struct, frozen=True):
    """A master to query."""

    address: str
    epoch: int
    is_stock: bool = False  # Apache's


class SlaveSyncApi(RequestClient, Protocol):
    """Client of a master."""

    def close(self) -> None:
        """Close all connections."""


class FollowedTables(Protocol):
    """The tables that follow the log."""

    def catch_up(self) -> int:
        """Apply visible changes. Raise UnreadableChange or ImageNeeded."""

    def install(self, image: MetadataImage) -> None:
        """Replace all tables. Raise as `catch_up`."""

    def install_offsets(self, image: OffsetsImage) -> None:
        """Replace committed offsets. Raise ImageNeeded if the other tables are older."""

    def install_stock(self, image: StockImage) -> None:
        """Replace tables by an Apache master's."""


class SlaveSynchronize:
    """Synchronization with a master. Runs on the event loop; the task `run` sends the queries."""

    def __init__(
        self,
        tables: FollowedTables,
        master: SlaveSyncApi,
        *,
        confirmed: Callable[[], int],
        on_unreadable: Callable[[str], None],
        on_frontier: Callable[[int], None] = lambda _: None,
        on_stock: Callable[[str, StockImage], None] = lambda _, __: None,
    ) -> None:
        """Create the synchronization.

        `confirmed` returns the offset up to which the own log is confirmed and visible. `on_frontier` is called with
        the offset below which nothing is needed any longer, from the master's image. `on_stock` is called with an
        Apache master's address and its image after that is installed. `on_unreadable` is called with the reason why the
        log can't be followed: the slave has to stop following its master.
        """
        self._tables, self._api, self._confirmed, self._on_unreadable = tables, master, confirmed, on_unreadable
        self._on_frontier, self._on_stock = on_frontier, on_stock
        self._master: Master | None = None
        self._images, self._offsets = Polled[MetadataImage](), Polled[OffsetsImage]()
        self._stock = Polled[StockImage]()
        # The next poll has to request an image. Nothing else may be installed before an image is.
        self._is_image_due = self._is_image_needed = False
        self._wake = asyncio.Event()
        self.failures = 0
        self.installed = 0  # number of installed answers
        self.images = 0  # number of them that are all tables of a master
        self.has_image = False  # all tables of the present master are here
        self.trouble: str | None = None  # why the last poll failed

    # -- master

    def follow(self, master: Master) -> None:
        """Synchronize with a master, after it was elected or reconnected: its tables are requested again."""
        if master != self._master:
            self.forget()
            self._master = master
        self._is_image_due = True
        self._wake.set()

    def forget(self) -> None:
        """Drop all pending answers: there is no master, or this broker becomes it."""
        self._master = None
        self.has_image = False
        self._images.forget()
        self._offsets.forget()
        self._stock.forget()
        self._is_image_due = self._is_image_needed = False
        self._api.close()

    # -- queries

    async def run(self) -> None:
        """Poll every `POLL_S`, and at once after a change of the master. Never returns."""
        while True:
            master = self._master
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOCK_POLL_S if master is not None and master.is_stock else POLL_S):
                    await self._wake.wait()
            self._wake.clear()
            await self.poll()

    async def poll(self) -> None:
        """Query the master once, and install the answers that may be installed by then."""
        master = self._master
        if master is None:
            return
        trouble = self.trouble
        self.trouble = None
        await self._ask(master, self._ask_stock if master.is_stock else self._ask_offsets, trouble)
        if not master.is_stock and self._is_image_due and self._master is master:
            self._is_image_due = False
            if not await self._ask(master, self._ask_image, trouble) and self._master is master:
                self._is_image_due = True
        self.advance()

    async def _ask(self, master: Master, what: Callable[[Master], Awaitable[None]], trouble: str | None) -> bool:
        try:
            await what(master)
        except (OSError, TimeoutError, NeveError, UnreadableChange) as error:
            self._failed(master, str(error) or type(error).__name__, trouble)
            return False
        return True

    async def _ask_offsets(self, master: Master) -> None:
        offsets = await self._image(master, RequestCode.GET_ALL_CONSUMER_OFFSET, decode_offsets_image)
        if self._master is master:  # otherwise the master has changed
            self._offsets.offer(offsets)

    async def _ask_image(self, master: Master) -> None:
        image = await self._image(master, RequestCode.GET_ALL_TOPIC_CONFIG, decode_image)
        if self._master is master:
            self._images.offer(image)

    async def _ask_stock(self, master: Master) -> None:
        image = await ask_stock_master(self._api, master.address)
        if self._master is master:
            self._stock.offer(image)

    async def _image(self, master: Master, code: RequestCode, decode: Callable[[bytes], Image]) -> Image:
        answer = await self._api.ask(master.address, code, {MASTER_EPOCH: str(master.epoch)})
        if answer.ext.get(IS_IMAGE) != "1":
            raise NeveError(None, f"{master.address} does not return its tables in neve's format")
        return await asyncio.to_thread(lambda: decode(inflated(bytes(answer.body))))

    def _failed(self, master: Master, reason: str, before: str | None) -> None:
        """Log a reason, unless the poll before or this one had it."""
        self.failures += 1
        if reason not in {before, self.trouble}:
            log.warning("the tables of the master at %s: %s", master.address, reason)
        self.trouble = reason

    # -- installation

    def advance(self) -> None:
        """Follow the log, and install pending answers, as far as the log is confirmed by now."""
        master = self._master
        if master is None:
            return
        try:
            self._follow_stock(master) if master.is_stock else self._follow_log()
        except UnreadableChange as error:
            log.error("the master's changes can't be followed: %s", error)
            self.forget()
            self._on_unreadable(str(error))
        except OSError as error:  # a fault of the disk: the image is requested again
            self._is_image_due = True
            self._failed(master, f"can't be stored: {error}", self.trouble)

    def _follow_log(self) -> None:
        confirmed = self._confirmed()
        image = self._images.install_when(confirmed)
        try:
            if image is not None:
                self._tables.install(image)
                self.installed += 1
                self.images += 1
                self.has_image = True
            else:
                self._tables.catch_up()
        except ImageNeeded as error:
            # not again before the one that was requested has arrived
            if image is not None or not self._is_image_needed:
                self._is_image_due = True
            if not self._is_image_needed:
                log.info("waiting for the master's tables: %s", error)
                self._is_image_needed = True
                self._wake.set()
            return
        self._is_image_needed = False
        offsets = self._offsets.install_when(confirmed)
        if offsets is None:
            return
        try:
            self._tables.install_offsets(offsets)
        except ImageNeeded:
            # A log that begins above all changes: the tables are requested by the poll that brought these offsets. They
            # are dropped, because the next poll brings newer ones.
            self._is_image_due = True
            return
        self._on_frontier(offsets.frontier)
        self.installed += 1

    def _follow_stock(self, master: Master) -> None:
        """Follow an Apache master. Its tables are newer than changes in the log, of a neve master's time."""
        stock = self._stock.install_when(self._confirmed())
        with contextlib.suppress(ImageNeeded):
            self._tables.catch_up()
        if stock is not None:
            self._tables.install_stock(stock)
            self._on_stock(master.address, stock)
            self.installed += 1
            self.images += 1
            self.has_image = True
