"""How far to fetch in front of a reader: one row group when it goes on where it stopped, twice as much at each group
that it enters in order, nothing for a reader that jumps. Pure bookkeeping, bounded; the caller locks."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from neve.archive.catalog import Location

WINDOW_MAX = 32 << 20
_READERS_MAX = 4096

# Consumer group, topic, queue, and which of the group's clients: in broadcast, all of them read the same queue.
Reader = tuple[str, str, int, Hashable]


@dataclass(slots=True)
class _Position:
    offset: int  # where the last read began
    following: int  # where the reader goes on if it is sequential
    place: tuple[str, int]  # object and row group of the last read
    window: int = 0


class ReadAhead:
    """Who reads on in order, and how many bytes to fetch in front of him."""

    def __init__(self, window_max: int = WINDOW_MAX) -> None:
        self._window_max = window_max
        self._readers: OrderedDict[Reader, _Position] = OrderedDict()

    def note(self, reader: Reader, location: Location, offset: int) -> int:
        """A read begins; returns the wire bytes to have behind this location, 0 for none."""
        place = (location.name.key, location.row_group)
        known = self._readers.pop(reader, None)
        if known is None or offset not in (known.offset, known.following):
            known = _Position(offset, -1, place)
        elif offset == known.following:
            if not known.window:
                known.window = location.group.wire_bytes
            elif place != known.place:
                known.window *= 2
            known.window = min(known.window, self._window_max)
        # else: the same read again, after a failure or a lost answer: nothing is learned
        known.offset, known.place = offset, place
        self._readers[reader] = known
        if len(self._readers) > _READERS_MAX:
            self._readers.popitem(last=False)
        return known.window

    def answered(self, reader: Reader, offset: int, next_offset: int) -> None:
        """Where the reader, if it is sequential, comes next."""
        known = self._readers.get(reader)
        if known is not None and known.offset == offset:
            known.following = next_offset
