"""Snapshots of a master's tables for its slaves, each with its place in the log. JSON, deflated on the wire.

Deflating pays off because names of topics and groups are similar.

MetadataImage    {"v", "logEnd", "position", "topics", "groups", "modes", "users", "delays", "ended", "ends",
                  "settledIn"}
OffsetsImage     {"v", "logEnd", "position", "offsets", "resets", "frontier"}

logEnd     physical offset: a slave installs an image once its own log is confirmed up to there; before, the image may
           refer to records that are lost
position   offset of the metadata log: changes below it are in the image, later ones are applied on top
ended      topic → queue → base offset if the topic is created again: no offset is assigned twice
frontier   physical offset: at `logEnd`, nothing below it is needed by waiting or popped messages or by changes; a slave
           that is confirmed up to `logEnd` may evict it
ends       topic → queue → offset of its next message: a slave's log may begin above all messages of a queue
settledIn  the last epoch in which this master has settled its archive, or a later one
offsets    topic@group → queue → next offset; resets: the same, for resets that running consumers have not received
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
# Limit for an inflated image: some millions of topics.
MAX_IMAGE = 1 << 30
Positions = dict[str, dict[int, int]]
ModesImage = dict[str, dict[str, dict[str, Any]]]


class UsersImage(msgspec.Struct, frozen=True):
    """Users and policies, with their secrets, as in `auth.json`."""

    users: dict[str, User]
    policies: dict[str, list[Policy]]


class MetadataImage(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    """Snapshot of all tables except committed offsets. The module's docstring has the fields."""

    v: int = VERSION
    log_end: int
    position: int
    topics: TopicsImage
    groups: GroupsImage
    modes: ModesImage
    users: UsersImage | None
    delays: dict[int, int]
    ended: Positions
    ends: Positions = {}  # empty: the master's version of neve does not send it
    settled_in: int = 0  # 0: the master's version of neve does not send it


class OffsetsImage(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    """Snapshot of committed offsets. The module's docstring has the fields."""

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
    """Return an image. Raise UnreadableChange."""
    return _decoded(data, MetadataImage)


def decode_offsets_image(data: bytes) -> OffsetsImage:
    """Return an image. Raise UnreadableChange."""
    return _decoded(data, OffsetsImage)


def deflated(image: MetadataImage | OffsetsImage) -> bytes:
    """Return the image as it is sent. Slow: call it in a thread."""
    return zlib.compress(msgspec.json.encode(image), 1)


def inflated(data: bytes) -> bytes:
    """Return inflated data. Raise UnreadableChange."""
    inflater = zlib.decompressobj()
    try:
        whole = inflater.decompress(data, MAX_IMAGE)
    except zlib.error as error:
        raise UnreadableChange(f"a damaged image of tables: {error}") from None
    if not inflater.eof or inflater.unused_data:
        raise UnreadableChange(f"a damaged image of tables: {len(data)} bytes with an invalid end")
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
    """Images that a slave has received and may not install yet. Pure.

    Each image is complete. The newest that may be installed is. The oldest that waits is never replaced by later ones:
    otherwise a log that is always slightly behind would never install one.
    """

    def __init__(self) -> None:
        self._first: Image | None = None
        self._newest: Image | None = None

    def offer(self, image: Image) -> None:
        """Take an image. The caller passes images in the order in which the master made them."""
        if self._first is None:
            self._first = image
        else:
            self._newest = image

    def install_when(self, confirm: int) -> Image | None:
        """Return the image to install now that the own log is confirmed up to `confirm`; None: there is none."""
        ready: Image | None = None
        if self._first is not None and self._first.log_end <= confirm:
            ready, self._first = self._first, None
        if self._newest is not None and self._newest.log_end <= confirm:
            ready, self._newest = self._newest, None
        if self._first is None:
            self._first, self._newest = self._newest, None
        return ready

    def forget(self) -> None:
        """Drop all images, because the master has changed."""
        self._first = self._newest = None
