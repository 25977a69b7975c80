"""A slave's tables, as its master has them. RocketMQ's SlaveSynchronize.

    topics, groups, modes, users, delay positions    an image at each connect; from then on the log says what changes
    group offsets                                    polled, all of them, each answer with the end of the log it is of

An Apache master keeps none of this in its log: of it everything is polled, as stock slaves do (`stock_tables`).

An answer is of one master in one epoch, and what a former one said is nothing to the next: an answer that was asked for
before the change is thrown away when it comes. It is installed once the own log is confirmed as far as the answer's,
and whole: a position above the log's end would pass over messages, and a group that was set back would not go back.

What the log says that this neve can't follow ends it: a slave whose tables stand still must not become master.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from broker.ha.asked import Asked
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

POLL_S = 3.0  # as RocketMQ's slaves wake; what is lost of a group's progress at a failover is no more than that
STOCK_POLL_S = 9.0  # all tables each time: no more often than a stock slave asks, each 10 s
#: Of the request: the epoch of the master who is to answer. Of its answer: it is an image.
MASTER_EPOCH, IS_IMAGE = "masterEpoch", "image"


class Master(msgspec.Struct, frozen=True):
    """Whom to ask."""

    address: str
    epoch: int
    is_stock: bool = False  # Apache's


class Api(Asked, Protocol):
    """How a master is asked, while there is one."""

    def close(self) -> None:
        """Nobody is asked any more."""


class Followed(Protocol):
    """The tables that follow the log."""

    def catch_up(self) -> int:
        """Apply what the log shows. Raises UnreadableChange and ImageNeeded."""

    def install(self, image: MetadataImage) -> None:
        """Take all of it in place of what is here. Raises as `catch_up`."""

    def install_offsets(self, image: OffsetsImage) -> None:
        """Take where groups stand in place of what is here."""

    def install_stock(self, image: StockImage) -> None:
        """Take what an Apache master said in place of what is here."""


class SlaveSynchronize:
    """See the module. On the loop; one task, `run`, asks."""

    def __init__(
        self,
        tables: Followed,
        master: Api,
        *,
        confirmed: Callable[[], int],
        on_unreadable: Callable[[str], None],
        on_frontier: Callable[[int], None] = lambda _: None,
        on_stock: Callable[[str, StockImage], None] = lambda _, __: None,
    ) -> None:
        """`confirmed`: the own log is confirmed, and shown, so far.

        `on_frontier` is told what nothing needs any more below, as the master's image says it.

        `on_stock` is told an Apache master's address and its image, once that is installed.

        `on_unreadable` is told why the log can't be followed: this slave has to stop following its master.
        """
        self._tables, self._api, self._confirmed, self._on_unreadable = tables, master, confirmed, on_unreadable
        self._on_frontier, self._on_stock = on_frontier, on_stock
        self._master: Master | None = None
        self._images, self._offsets = Polled[MetadataImage](), Polled[OffsetsImage]()
        self._stock = Polled[StockImage]()
        # An image is to be asked for; one is to be installed before anything else may be.
        self._is_image_due = self._is_image_needed = False
        self._wake = asyncio.Event()
        self.failures = 0
        self.installed = 0  # answers
        self.images = 0  # of them, those that are all tables of a master
        self.has_image = False  # of the master that is followed: all of its tables are here
        self.trouble: str | None = None  # why the last poll failed

    # ---- whom

    def follow(self, master: Master) -> None:
        """The master is this one from now on, or is connected to again: its tables are asked for anew."""
        if master != self._master:
            self.forget()
            self._master = master
        self._is_image_due = True
        self._wake.set()

    def forget(self) -> None:
        """There is no master, or this broker becomes it: what was polled and waits is nothing any more."""
        self._master = None
        self.has_image = False
        self._images.forget()
        self._offsets.forget()
        self._stock.forget()
        self._is_image_due = self._is_image_needed = False
        self._api.close()

    # ---- asking

    async def run(self) -> None:
        """Never ends: asks each `POLL_S`, and sooner where there is a new master."""
        while True:
            master = self._master
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOCK_POLL_S if master is not None and master.is_stock else POLL_S):
                    await self._wake.wait()
            self._wake.clear()
            await self.poll()

    async def poll(self) -> None:
        """Ask the master once, and install what may be installed by then."""
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
        if self._master is master:  # else it is nobody's
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
            raise NeveError(None, f"{master.address} does not say its tables as neve does")
        return await asyncio.to_thread(lambda: decode(inflated(bytes(answer.body))))

    def _failed(self, master: Master, reason: str, before: str | None) -> None:
        """Told once for each reason that is new."""
        self.failures += 1
        if reason not in {before, self.trouble}:
            log.warning("the tables of the master at %s: %s", master.address, reason)
        self.trouble = reason

    # ---- installing

    def advance(self) -> None:
        """The own log may be confirmed further: follow it, and install what had to wait for that."""
        master = self._master
        if master is None:
            return
        try:
            self._follow_stock(master) if master.is_stock else self._follow_log()
        except UnreadableChange as error:
            log.error("the master's changes can't be followed: %s", error)
            self.forget()
            self._on_unreadable(str(error))
        except OSError as error:  # of the disk: what was not installed is asked for again
            self._is_image_due = True
            self._failed(master, f"can't be kept here: {error}", self.trouble)

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
            if image is not None or not self._is_image_needed:  # not again before the one that is asked for has come
                self._is_image_due = True
            if not self._is_image_needed:
                log.info("waits for its master's tables: %s", error)
                self._is_image_needed = True
                self._wake.set()
            return
        self._is_image_needed = False
        offsets = self._offsets.install_when(confirmed)
        if offsets is not None:
            self._tables.install_offsets(offsets)
            self._on_frontier(offsets.frontier)
            self.installed += 1

    def _follow_stock(self, master: Master) -> None:
        """Its log has changes only of a time when a neve broker was master: what it says of tables is newer."""
        stock = self._stock.install_when(self._confirmed())
        with contextlib.suppress(ImageNeeded):
            self._tables.catch_up()
        if stock is not None:
            self._tables.install_stock(stock)
            self._on_stock(master.address, stock)
            self.installed += 1
            self.images += 1
            self.has_image = True
