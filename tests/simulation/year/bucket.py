"""The bucket of a long life: a million objects and more, with requests counted like a store bills them.

Keys are indexed by their first parts, so a listing costs time proportional to its result. Entries of the journal are
kept packed, because only a start reads old ones again.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence

from infra.clock import ManualClock
from infra.objects.store import ObjectInfo, check_prefix
from tests.simulation.faulty_store import FaultyStore

DATA, JOURNAL, CHECKPOINT, STATE = "data", "journal", "checkpoint", "state"
PAGE = 1000  # Keys per answer to a listing.


class _Objects(MutableMapping[str, tuple[bytes, int]]):
    """key -> (content, time of writing), by the first part of the key."""

    def __init__(self) -> None:
        self._folders: dict[str, dict[str, tuple[bytes, int, int]]] = {}  # With the content's size.
        self.counts: Counter[str] = Counter()  # The number of objects by kind.
        self.sizes: Counter[str] = Counter()

    def __getitem__(self, key: str) -> tuple[bytes, int]:
        content, modified, _ = self._folders.get(_folder(key), {})[key]
        return (zlib.decompress(content) if _kind(key) == JOURNAL else content), modified

    def __setitem__(self, key: str, value: tuple[bytes, int]) -> None:
        if key in self:
            del self[key]
        kind, (content, modified) = _kind(key), value
        packed = zlib.compress(content, 1) if kind == JOURNAL else content
        self._folders.setdefault(_folder(key), {})[key] = packed, modified, len(content)
        self.counts[kind] += 1
        self.sizes[kind] += len(content)

    def __delitem__(self, key: str) -> None:
        folder = self._folders[_folder(key)]
        _, _, size = folder.pop(key)
        self.counts[_kind(key)] -= 1
        self.sizes[_kind(key)] -= size
        if not folder:
            del self._folders[_folder(key)]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key in self._folders.get(_folder(key), ())

    def __iter__(self) -> Iterator[str]:
        return (key for folder in self._folders.values() for key in folder)

    def __len__(self) -> int:
        return sum(map(len, self._folders.values()))

    def below(self, prefix: str) -> list[str]:
        """Return the keys with this prefix, in order."""
        inside = _folder(prefix) if "/" in prefix else None
        folders = [inside] if inside in self._folders else [one for one in self._folders if one.startswith(prefix)]
        return sorted(key for one in folders for key in self._folders[one] if key.startswith(prefix))

    def folders(self) -> list[str]:
        return sorted(self._folders)


class BilledBucket(FaultyStore):
    """A bucket; `billed` counts requests by kind, with one listing for each thousand keys."""

    def __init__(self, clock: ManualClock, seed: int) -> None:
        super().__init__(clock, seed)
        self.objects: _Objects = _Objects()  # type: ignore[assignment]
        self.billed: Counter[str] = Counter()

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        self._enter("list", prefix)
        keys = self.objects.below(prefix)
        self.billed["LIST"] += max(1, -(-len(keys) // PAGE)) - 1
        for key in keys:
            content, modified = self.objects[key]
            yield ObjectInfo(key, len(content), hashlib.sha256(content).hexdigest()[:32], modified)

    def list_prefixes(self, prefix: str) -> Sequence[str]:
        if prefix:
            return super().list_prefixes(prefix)
        self._enter("list_prefixes", prefix)
        found = [f"{folder}/" for folder in self.objects.folders()]
        self.billed["LIST"] += max(1, -(-len(found) // PAGE)) - 1
        return found

    def _enter(self, verb: str, key: str) -> None:
        super()._enter(verb, key)
        if verb in _BILLED:
            self.billed[_BILLED[verb]] += 1


_BILLED = {
    "put": "PUT", "get": "GET", "get_range": "GET", "head": "HEAD", "delete": "DELETE", "list": "LIST",
    "list_prefixes": "LIST",
}  # fmt: skip


def _folder(key: str) -> str:
    return key.split("/", 1)[0]


def _kind(key: str) -> str:
    """Return `data`, or the part of a key that names its kind."""
    if key.startswith("topic="):
        return DATA
    return key.rpartition("/")[0].rpartition("/")[2]
