"""Read an archive from a program without a broker: `neve.archive.open(url).topic("orders").read(queue=3)`."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from neve.archive.catalog.catalog import Catalog, GapHit, Location
from neve.archive.catalog.journal_reader import ListedObject, catalogs
from neve.archive.format.journal import CommittedObject, Gap
from neve.archive.rows.row_groups import DecodedRows, decode_group
from neve.archive.rows.schema import parse_footer
from neve.record.codec import MessageRecord, decode_record


class ObjectSource(Protocol):
    """A store to read from; all methods except the listings raise FileNotFoundError if there is no such object."""

    def get(self, key: str) -> bytes: ...

    def head(self, key: str) -> object: ...

    def get_range(self, key: str, start: int, length: int) -> bytes: ...

    def list_prefixes(self, prefix: str) -> Sequence[str]: ...

    def list(self, prefix: str) -> Iterable[ListedObject]: ...


class NotCommitted(LookupError):
    """An offset between archived ones is in a round that is not committed yet; retry later."""

    def __init__(self, topic: str, queue: int, offset: int) -> None:
        super().__init__(f"topic {topic}, queue {queue}: offset {offset} is in a round that is not committed yet")
        self.offset = offset


class Archive:
    """The catalogs of all brokers below a prefix, as of the moment of opening.

    A program that runs for hours should open the archive again from time to time, because referenced objects are
    deleted eventually. Once the checkpoints of the opening are deleted, a topic that is queried for the first time is
    rebuilt from the whole journal; if that is shortened, the query raises CheckpointsGone
    (`neve.archive.catalog.journal_reader`).
    """

    def __init__(self, source: ObjectSource, prefix: str = "") -> None:
        self._source = source
        self.catalogs: dict[str, Catalog] = catalogs(source, prefix=prefix)

    def topics(self) -> list[str]:
        """Return the topics of all brokers, sorted."""
        return sorted({topic for catalog in self.catalogs.values() for topic in catalog.topics()})

    def keys(self, topic: str) -> list[str]:
        """Return the keys of a topic's objects of all brokers, for another Parquet reader."""
        return [one.key for catalog in self.catalogs.values() for one in catalog.objects(topic)]

    def topic(self, name: str, broker: str | None = None) -> "TopicReader":
        """Return a reader of one topic. Raises LookupError if no broker, or more than one, has it and none is named."""
        having = [of for of, catalog in self.catalogs.items() if broker in (None, of) and catalog.has_topic(name)]
        if len(having) != 1:
            raise LookupError(f"topic {name}: found at {', '.join(having) or 'no broker'}; name one")
        return TopicReader(self._source, self.catalogs[having[0]], name)


class TopicReader:
    """A reader of one topic of one broker."""

    def __init__(self, source: ObjectSource, catalog: Catalog, topic: str) -> None:
        self._source, self._catalog, self._topic = source, catalog, topic
        self._footer: tuple[str, Any] = ("", None)  # key and footer of the object read last

    def queues(self) -> list[int]:
        """Return the queues of the topic."""
        return self._catalog.queues(self._topic)

    def min_offset(self, queue: int) -> int | None:
        """Return the lowest archived offset; None if there is none."""
        return self._catalog.min_offset(self._topic, queue)

    def max_offset(self, queue: int) -> int | None:
        """Return one above the highest archived offset; None if there is none."""
        return self._catalog.max_offset(self._topic, queue)

    def gaps(self, queue: int) -> list[Gap]:
        """Return the gaps that reading skips, because their offsets do not exist."""
        return [gap for gap in self._catalog.gaps(self._topic) if gap.queue == queue]

    def span(self, queue: int, since: int | None, until: int | None) -> tuple[int, int]:
        """Return (first, end) of offsets that hold every message stored in [since, until), and possibly others.

        Row groups record their oldest and newest store time, so the answer does not depend on the order of times. A
        range that is not committed yet counts as inside: reading it raises NotCommitted.
        """
        position, high = self.min_offset(queue) or 0, self.max_offset(queue) or 0
        first, end = high, position
        while position < high:
            found = self._catalog.find(self._topic, queue, position)
            if found is None:
                return min(first, position), high
            if isinstance(found, GapHit):
                position = found.next_offset
                continue
            oldest, newest = found.group.oldest_ms, found.group.newest_ms
            if newest < 0 or ((since is None or newest >= since) and (until is None or oldest < until)):
                first, end = min(first, position), found.last + 1
            position = found.last + 1
        return first, max(first, end)

    def read(self, queue: int, offset: int | None = None) -> Iterator[MessageRecord]:
        """Yield the records from an offset (default: the lowest) to the archive's end.

        Raises:
            NotCommitted: the next offset is in a round that is not committed yet; all records before it were yielded.
        """
        for record in self.read_raw(queue, offset):
            yield decode_record(record)

    def read_raw(self, queue: int, offset: int | None = None) -> Iterator[memoryview]:
        """Yield the stored bytes of the records, including damaged ones. Raises as `read`."""
        low, high = self.min_offset(queue), self.max_offset(queue)
        position = max(low or 0, offset if offset is not None else 0)
        while (found := self._catalog.find(self._topic, queue, position)) is not None:
            if isinstance(found, GapHit):
                position = found.next_offset
                continue
            yield from self._records(found, position)
            position = found.last + 1
        if low is not None and high is not None and position < high:
            raise NotCommitted(self._topic, queue, position)

    def _records(self, location: Location, offset: int) -> Iterator[memoryview]:
        rows = self._decode(location.name, location.row_group)
        row = 0
        for queue, first, last in location.group.runs:
            if (queue, first) == (location.queue, location.first):
                break
            row += last - first + 1
        for index in range(row + offset - location.first, row + location.last - location.first + 1):
            yield rows.wire[rows.positions[index] : rows.positions[index + 1]]

    def _decode(self, name: CommittedObject, index: int) -> DecodedRows:
        group = name.row_groups[index]
        if self._footer[0] != name.key:
            raw = self._source.get_range(name.key, name.size - name.footer, name.footer)
            self._footer = (name.key, parse_footer(raw))
        data = self._source.get_range(name.key, group.offset, group.length)
        return decode_group(
            self._footer[1], index, group.offset, data, size=name.size, topic=name.topic, wire_bytes=group.wire_bytes
        )
