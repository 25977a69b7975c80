"""How far to fetch in front of a reader: one row group when it goes on where it stopped, twice as much at each group
that it enters in order, nothing for a reader that jumps. Pure bookkeeping, bounded; the caller locks."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from neve.archive.catalog.catalog import Location

WINDOW_MAX = 32 << 20
_READERS_MAX = 4096
_REFUSED_PULLS = 16  # that pass before it is asked again whether there is room

# Consumer group, topic, queue, and which of the group's clients: in broadcast, all of them read the same queue.
Reader = tuple[str, str, int, Hashable]


@dataclass(slots=True)
class Position:
    """Where one reader is. `ahead`: wire bytes that were asked for behind the row group it reads, up to `reached`."""

    offset: int  # where the last read began
    following: int  # where the reader goes on if it is sequential
    place: tuple[str, int]  # object and row group of the last read
    window: int = 0
    ahead: int = 0
    reached: Location | None = None
    rests: int = 0  # reads to come that ask for no more

    def fetch_ahead(
        self, location: Location, after: Callable[[Location], Location | None], fetch: Callable[[Location], bool]
    ) -> None:
        """Ask for what the window lacks. `fetch` says False where there is no room now."""
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
        """The next row group, in order."""
        self.ahead -= location.group.wire_bytes
        self.rests = 0
        if self.ahead <= 0:
            self.ahead, self.reached = 0, None


class ReadAhead:
    """Who reads on in order, and how many bytes to fetch in front of him."""

    def __init__(self, window_max: int = WINDOW_MAX) -> None:
        self._window_max = window_max
        self._readers: OrderedDict[Reader, Position] = OrderedDict()

    def note(self, reader: Reader, location: Location, offset: int) -> Position:
        """A read begins; its `window` is the wire bytes to have behind this location, 0 for none."""
        place = (location.name.key, location.row_group)
        known = self._readers.get(reader)
        if known is None or offset not in (known.offset, known.following):
            known = self._readers[reader] = Position(offset, -1, place)
            if len(self._readers) > _READERS_MAX:
                self._readers.popitem(last=False)
        elif offset == known.following:
            if not known.window:
                known.window = min(location.group.wire_bytes, self._window_max)
            elif place != known.place:
                known.window = min(known.window * 2, self._window_max)
                known._entered(location)
        # else: the same read again, after a failure or a lost answer: nothing is learned
        self._readers.move_to_end(reader)
        known.offset, known.place = offset, place
        return known

    def answered(self, reader: Reader, offset: int, next_offset: int) -> None:
        """Where the reader, if it is sequential, comes next."""
        known = self._readers.get(reader)
        if known is not None and known.offset == offset:
            known.following = next_offset
