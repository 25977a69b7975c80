"""Looking messages up in the archive: by key, and by their place in the log.

The archive has no index of keys: row groups are fetched, newest first, and searched as bytes, up to a budget.
What is found as bytes is decoded and compared, so a body that holds the key is no hit.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from struct import Struct

import numpy as np

from neve.archive.catalog import Catalog
from neve.archive.journal import CommittedName
from neve.message import MalformedRecord, MessageRecord, decode_record
from tiered.worker_client import DecodedGroup

Fetch = Callable[[CommittedName, int], DecodedGroup]

# Wire bytes that one question may have decoded; a client waits a few seconds only.
_BUDGET = 128 << 20
_LONG = Struct(">q")


class ColdQuery:
    def __init__(self, catalog: Catalog, fetch: Fetch, budget: int = _BUDGET) -> None:
        self._catalog, self._fetch, self._budget = catalog, fetch, budget

    def by_key(self, topic: str, key: str, max_num: int, begin: int, end: int) -> list[bytes]:
        """The newest records with this word in KEYS or this unique key, stored in [begin, end], newest first."""
        groups = [
            (name, index)
            for name in self._catalog.objects(topic)
            for index, group in enumerate(name.row_groups)
            if group.newest_ms >= begin and group.oldest_ms <= end
        ]
        groups.sort(key=lambda place: place[0].row_groups[place[1]].newest_ms, reverse=True)
        needle = key.encode("utf-8", "surrogatepass")
        found: list[tuple[int, bytes]] = []
        for hits in self._search(groups, needle):
            found += [
                (record.physical_offset, raw)
                for raw, record in hits
                if has_key(record, topic, key) and begin <= record.store_timestamp <= end
            ]
            if len(found) >= max_num:
                break
        found.sort(reverse=True)
        return [raw for _, raw in found[:max_num]]

    def at(self, physical_offset: int) -> bytes | None:
        """The record that was stored at this place of the log."""
        groups = [
            (name, index)
            for name in self._catalog.objects()
            if name.start <= physical_offset < name.end
            for index in range(len(name.row_groups))
        ]
        for hits in self._search(groups, _LONG.pack(physical_offset)):
            for raw, record in hits:
                if record.physical_offset == physical_offset:
                    return raw
        return None

    def _search(
        self, groups: Iterable[tuple[CommittedName, int]], needle: bytes
    ) -> Iterator[list[tuple[bytes, MessageRecord]]]:
        """Group by group, the readable records that hold these bytes somewhere."""
        pattern = re.compile(re.escape(needle))
        spent = 0
        for name, index in groups:
            size = name.row_groups[index].wire_bytes
            if spent and spent + size > self._budget:
                return
            spent += size
            yield self._matches(self._fetch(name, index), pattern)

    def _matches(self, group: DecodedGroup, pattern: "re.Pattern[bytes]") -> list[tuple[bytes, MessageRecord]]:
        found = []
        places = np.fromiter((match.start() for match in pattern.finditer(group.wire)), np.int64)
        for row in np.unique(np.searchsorted(group.positions, places, "right") - 1).tolist():
            raw = bytes(group.wire[int(group.positions[row]) : int(group.positions[row + 1])])
            try:
                record = decode_record(raw)
            except MalformedRecord:
                continue
            if self._is_visible(record):
                found.append((raw, record))
        return found

    def _is_visible(self, record: MessageRecord) -> bool:
        low = self._catalog.min_offset(record.topic, record.queue_id)
        return low is not None and record.queue_offset >= low


def has_key(record: MessageRecord, topic: str, key: str) -> bool:
    """RocketMQ's index: the words of KEYS and the unique key."""
    properties = record.properties
    return record.topic == topic and (properties.get("UNIQ_KEY") == key or key in properties.get("KEYS", "").split(" "))
