"""Tables as a master says them to its slaves, each with the place in the log that it belongs to. JSON, on the wire
deflated: names of topics and groups are much alike.

MetadataImage    {"v", "logEnd", "position", "topics", "groups", "modes", "users", "delays", "ended", "ends",
                  "settledIn"}
OffsetsImage     {"v", "logEnd", "position", "offsets", "resets", "frontier"}

logEnd     physical: an image is installed once the slave's own log is confirmed so far, or it would speak of records
           that nobody may ever have
position   of the metadata log: what lies below it is in the image, what follows is applied on top
ended      topic → queue → where it goes on, should the topic come again: none of its offsets is given twice
frontier   physical: what lies below is needed by nothing that waits, is popped or changed, at `logEnd`: a slave that is
           confirmed so far may evict it
ends       topic → queue → the offset that its next message gets: a slave's log may begin behind all that it has had
settledIn  the epoch in which this master has said last that it has settled its archive: or behind that
offsets    topic@group → queue → next offset; resets: the same, of what running consumers were not told yet
"""

from __future__ import annotations

import zlib
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from access.model import Policy, User
from broker.tables.changes import UnreadableChange
from broker.tables.subscription_group_manager import GroupsImage
from broker.tables.topic_config_manager import TopicsImage

VERSION = 1
# What one image may be when it is inflated: some millions of topics.
MAX_IMAGE = 1 << 30
Positions = dict[str, dict[int, int]]
ModesImage = dict[str, dict[str, dict[str, Any]]]


class UsersImage(msgspec.Struct, frozen=True):
    """Users and policies as `auth.json` has them, with their secrets."""

    users: dict[str, User]
    policies: dict[str, list[Policy]]


class MetadataImage(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    """See the module; the parts are what each table's `image` gives."""

    v: int = VERSION
    log_end: int
    position: int
    topics: TopicsImage
    groups: GroupsImage
    modes: ModesImage
    users: UsersImage | None
    delays: dict[int, int]
    ended: Positions
    ends: Positions = {}  # of a neve that says nothing of it: none
    settled_in: int = 0  # the same


class OffsetsImage(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    """See the module."""

    v: int = VERSION
    log_end: int
    position: int
    offsets: Positions
    resets: Positions
    frontier: int = 0


class _Image(Protocol):
    @property
    def log_end(self) -> int: ...


Image = TypeVar("Image", bound=_Image)


def decode_image(data: bytes) -> MetadataImage:
    """Raises UnreadableChange."""
    return _decoded(data, MetadataImage)


def decode_offsets_image(data: bytes) -> OffsetsImage:
    """Raises UnreadableChange."""
    return _decoded(data, OffsetsImage)


def deflated(image: MetadataImage | OffsetsImage) -> bytes:
    """As it goes over the wire; for a thread."""
    return zlib.compress(msgspec.json.encode(image), 1)


def inflated(data: bytes) -> bytes:
    """What was deflated. Raises UnreadableChange."""
    inflater = zlib.decompressobj()
    try:
        whole = inflater.decompress(data, MAX_IMAGE)
    except zlib.error as error:
        raise UnreadableChange(f"a damaged image of tables: {error}") from None
    if not inflater.eof or inflater.unused_data:
        raise UnreadableChange(f"a damaged image of tables: {len(data)} bytes that don't end as they should")
    return whole


class _Version(msgspec.Struct):
    v: int


Decoded = TypeVar("Decoded")


def _decoded(data: bytes, shape: type[Decoded]) -> Decoded:
    try:
        found = msgspec.json.decode(data, type=_Version).v
        if found != VERSION:
            raise UnreadableChange(f"an image of tables of format {found}, this neve reads {VERSION}")
        return msgspec.json.decode(data, type=shape)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnreadableChange(f"a damaged image of tables: {type(error).__name__}") from None


class Polled(Generic[Image]):
    """What a slave was told and may not install yet. Pure.

    Each answer is whole, and the newest that may be installed is; the oldest that waits is never pushed out by those
    that come behind it, or a log that is always a little behind would install none.
    """

    def __init__(self) -> None:
        self._first: Image | None = None
        self._newest: Image | None = None

    def offer(self, image: Image) -> None:
        """An answer has come; answers come in the order in which they were made."""
        if self._first is None:
            self._first = image
        else:
            self._newest = image

    def install_when(self, confirm: int) -> Image | None:
        """What is to be installed now that the own log is confirmed so far; None: nothing."""
        ready: Image | None = None
        if self._first is not None and self._first.log_end <= confirm:
            ready, self._first = self._first, None
        if self._newest is not None and self._newest.log_end <= confirm:
            ready, self._newest = self._newest, None
        if self._first is None:
            self._first, self._newest = self._newest, None
        return ready

    def forget(self) -> None:
        """The master has changed: what the last one said is nothing to the next."""
        self._first = self._newest = None
