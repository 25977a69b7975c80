"""Sizes of the read-ahead of sequential readers.

It is one row group when a reader continues where it stopped, and doubles with each group that it enters in order.
Readers that jump have none. Bookkeeping only, with bounded memory; the caller locks.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from neve.archive.catalog.catalog import Location

WINDOW_MAX = 32 << 20
_READERS_MAX = 4096
_REFUSED_PULLS = 16  # reads after a refused fetch before the next attempt

# Consumer group, topic, queue and client of the group: broadcasting clients all read the same queue.
Reader = tuple[str, str, int, Hashable]


@dataclass(slots=True)
class ReaderPosition:
    """The position of a reader. `ahead`: wire bytes requested after its row group, up to `reached`."""

    offset: int  # start of the last read
    following: int  # start of the next read if the reader is sequential
    place: tuple[str, int]  # object and row group of the last read
    window: int = 0
    ahead: int = 0
    reached: Location | None = None
    rests: int = 0  # reads until the next attempt to fetch ahead

    def fetch_ahead(
        self, location: Location, after: Callable[[Location], Location | None], fetch: Callable[[Location], bool]
    ) -> None:
        """Request groups up to the window. `fetch` returns False if there is no room now."""
        if self.ahead >= self.window:
            return
        if self.rests:
            self.rests -= 1
            return
        last = self.reached or location
        while self.ahead < self.window:
            following = after(last)
            if following is None or not fetch(following):
                self.rests = _REFUSED_PULLS
                return
            self.ahead += following.group.wire_bytes
            self.reached = last = following

    def _entered(self, location: Location) -> None:
        """Note that the reader has entered the next row group in order."""
        self.ahead -= location.group.wire_bytes
        self.rests = 0
        if self.ahead <= 0:
            self.ahead, self.reached = 0, None


class ReadAhead:
    """The positions of all readers."""

    def __init__(self, window_max: int = WINDOW_MAX) -> None:
        self._window_max = window_max
        self._readers: OrderedDict[Reader, ReaderPosition] = OrderedDict()

    def note(self, reader: Reader, location: Location, offset: int) -> ReaderPosition:
        """Note the start of a read. The result's `window` is the wire bytes to have after it; 0 for no read-ahead."""
        place = (location.name.key, location.row_group)
        known = self._readers.get(reader)
        if known is None or offset not in (known.offset, known.following):
            known = self._readers[reader] = ReaderPosition(offset, -1, place)
            if len(self._readers) > _READERS_MAX:
                self._readers.popitem(last=False)
        elif offset == known.following:
            if not known.window:
                known.window = min(location.group.wire_bytes, self._window_max)
            elif place != known.place:
                known.window = min(known.window * 2, self._window_max)
                known._entered(location)
        # Otherwise it is a repetition after a failure or a lost answer, and shows nothing about the reader.
        self._readers.move_to_end(reader)
        known.offset, known.place = offset, place
        return known

    def answered(self, reader: Reader, offset: int, next_offset: int) -> None:
        """Note where a sequential reader continues."""
        known = self._readers.get(reader)
        if known is not None and known.offset == offset:
            known.following = next_offset
