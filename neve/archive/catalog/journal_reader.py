"""Read journals and build catalogs from a store, with GET, HEAD and listings only; without pyarrow.

One listing finds the checkpoints; the newest is loaded, and the entries behind it are applied. If it is missing or
damaged, the one before it serves, and in the end entry 0, unless the journal has been shortened.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.lazy_topics import LazyTopics
from neve.archive.catalog.topic_catalog import TopicCatalog
from neve.archive.catalog.topic_parts import topics_in
from neve.archive.format.checkpoint import CheckpointHead, PackName, decode_checkpoint
from neve.archive.format.envelope import Damaged
from neve.archive.format.journal import AnyEntry, EntriesDeleted, anchor, decode_entry
from neve.archive.format.keys import (
    broker_of,
    brokers_prefix,
    checkpoint_key,
    checkpoints_prefix,
    journal_key,
    journals_prefix,
    pack_key,
    parse_checkpoint_key,
    parse_journal_key,
)

log = logging.getLogger(__name__)

CHUNK = 64  # entries read between two checks that none of them was deleted meanwhile
TRIES = 3  # of a read during which entries were deleted


class IncompleteAnswer(ConnectionError):
    """A response had fewer bytes than the object."""


class ListedObject(Protocol):
    """An object in a listing."""

    @property
    def key(self) -> str: ...


class JournalSource(Protocol):
    """The store of a journal; the first three methods raise FileNotFoundError if there is no such object."""

    def get(self, key: str) -> bytes: ...

    def get_range(self, key: str, start: int, length: int) -> bytes: ...

    def head(self, key: str) -> object: ...

    def list_prefixes(self, prefix: str) -> Sequence[str]: ...

    def list(self, prefix: str) -> Iterable[ListedObject]: ...


def brokers(source: JournalSource, prefix: str = "") -> list[str]:
    """Return the brokers with an archive in this store; directories that begin with a dot belong to the store."""
    listed = source.list_prefixes(brokers_prefix(prefix))
    names = [broker_of(prefix, one) for one in listed]
    return sorted(name for name in names if name and not name.startswith("."))


def entries(source: JournalSource, broker: str, prefix: str = "", first: int = 0) -> Iterator[tuple[int, AnyEntry]]:
    """Yield (number, entry) from `first`, or from the first remaining entry above it, to the journal's end."""
    begin = first
    try:
        for seq, entry, _ in following(source, broker, prefix, first):
            begin = seq + 1
            yield seq, entry
        if begin > first or not first:
            return
    except EntriesDeleted:
        pass
    begin = max(begin, first_remaining(source, broker, prefix))
    for seq, entry, _ in following(source, broker, prefix, begin):
        yield seq, entry


def first_remaining(source: JournalSource, broker: str, prefix: str = "") -> int:
    """Return, by a listing, the entry from which on none is deleted; entries below a hole must not be read."""
    numbers = sorted(_numbers(source, journals_prefix(prefix, broker), parse_journal_key), reverse=True)
    for number, below in itertools.pairwise(numbers):
        if below != number - 1:
            return number
    return numbers[-1] if numbers else 0


def following(
    source: JournalSource, broker: str, prefix: str = "", first: int = 0, before: bytes = b""
) -> Iterator[tuple[int, AnyEntry, bytes]]:
    """Yield (number, entry, its bytes) from `first` to the journal's end.

    Entries are dense, so a missing one is the end, as long as the entry before `first` still exists: the lowest are
    deleted first, and a deleted one cannot come back unchanged.

    Args:
        source: the store.
        broker: the owner of the journal.
        prefix: the prefix of the archive.
        first: the first entry to read.
        before: the anchor of the entry before it; empty if `first` is 0 or known to exist.

    Raises:
        EntriesDeleted: that entry is deleted.
        CutShort: the store's answer does not show whether it is.
    """
    seq, is_end = first, False
    while not is_end:
        found: list[bytes] = []
        while len(found) < CHUNK and not is_end:
            try:
                found.append(source.get(journal_key(prefix, broker, seq + len(found))))
            except FileNotFoundError:
                is_end = True
        if before:
            check_exists(source, journal_key(prefix, broker, seq - 1), before)
        elif found:
            check_exists(source, journal_key(prefix, broker, seq), anchor(found[0]))
        for data in found:
            yield seq, decode_entry(data), data
            seq, before = seq + 1, anchor(data)


def check_exists(source: JournalSource, key: str, before: bytes) -> None:
    """Check that an entry still exists with this anchor.

    Raises:
        EntriesDeleted: it does not.
        CutShort: the answer is too short to decide.
    """
    try:
        found = source.get_range(key, 0, len(before))
    except FileNotFoundError as error:
        raise EntriesDeleted(f"{key} has been deleted: a checkpoint contains its effects") from error
    if len(found) < len(before) and before.startswith(found):
        raise IncompleteAnswer(f"{key}: received {len(found)} of {len(before)} bytes")
    if found != before:
        raise EntriesDeleted(f"{key} has been deleted: a checkpoint contains its effects")


def is_shortened(source: JournalSource, broker: str, prefix: str = "") -> bool:
    """Return whether entries have been deleted, or are about to be."""
    try:
        decode_entry(source.get(journal_key(prefix, broker, 0)))
    except EntriesDeleted:
        return True
    except FileNotFoundError:
        return False
    return False


def journal_end(exists: Callable[[int], bool], known: int = 0) -> int:
    """Return the number of entries by exponential and binary search; the first `known` exist.

    It takes about 2 log2(n) requests, and one if nothing is new. Entries are dense, so the result is correct as long as
    none from `known` on is deleted. An entry that is appended meanwhile may or may not be counted.
    """
    low, step = known, 1  # all below `low` exist
    while exists(low + step - 1):
        low += step
        step *= 2
    high = low + step - 1  # does not exist
    while low < high:
        middle = (low + high) // 2
        if exists(middle):
            low = middle + 1
        else:
            high = middle
    return low


def entry_exists(source: JournalSource, broker: str, prefix: str = "") -> Callable[[int], bool]:
    """Return a function that sends a HEAD request for an entry."""

    def ask(seq: int) -> bool:
        try:
            source.head(journal_key(prefix, broker, seq))
        except FileNotFoundError:
            return False
        return True

    return ask


Use = Callable[[CheckpointHead, bytes], None]


def checkpoints(source: JournalSource, broker: str, prefix: str = "") -> list[int]:
    """List the checkpoints by their last entries, the newest first."""

    def seq_of(key: str) -> int | None:
        parsed = parse_checkpoint_key(key)
        return parsed[0] if parsed is not None and parsed[1] is None else None

    return sorted(_numbers(source, checkpoints_prefix(prefix, broker), seq_of), reverse=True)


def _numbers(source: JournalSource, folder: str, number_of: Callable[[str], int | None]) -> Iterator[int]:
    found = (number_of(one.key) for one in source.list(folder))
    return (number for number in found if number is not None)


def with_newest_checkpoint(
    source: JournalSource, broker: str, prefix: str, use: Use, *, before: int | None = None
) -> bool:
    """Call `use` with the newest usable checkpoint and its bytes; return False if there is none.

    If `use` raises Damaged or FileNotFoundError, the checkpoint before it is tried. With `before`, only checkpoints
    with a lower last entry are considered.

    Raises:
        NewerFormat: a checkpoint has a higher format version.
    """
    for seq in checkpoints(source, broker, prefix):
        if before is not None and seq >= before:
            continue
        try:
            data = source.get(checkpoint_key(prefix, broker, seq))
            use(decode_checkpoint(data, broker, seq), data)
        except (FileNotFoundError, Damaged) as error:
            log.warning("checkpoint unusable, trying the one before it: broker=%s seq=%d error=%s", broker, seq, error)
        else:
            return True
    return False


def read_catalog(source: JournalSource, broker: str, prefix: str = "", *, whole: bool = False) -> Catalog:
    """Build the current catalog of a broker.

    Unless `whole`, topics of the checkpoint are loaded on demand. A query may then raise the store's errors. If the
    checkpoints of that time are deleted later, a topic is rebuilt from the whole journal; if that is shortened, the
    query raises CheckpointsGone.

    Raises:
        CheckpointsGone: the journal has been shortened, and no checkpoint can be read.
    """
    journal = _Journal(source, broker, prefix, whole)
    tries = 0
    while True:
        catalog = Catalog()
        with_newest_checkpoint(source, broker, prefix, journal.loader(catalog))
        try:
            journal.follow(catalog)
        except EntriesDeleted as error:
            tries += 1
            if tries == TRIES:
                raise _unreadable(broker, error) from error
        else:
            return catalog


def checkpointed_topics(
    source: JournalSource,
    broker: str,
    prefix: str,
    wanted: Callable[[str], bool],
    *,
    through: int | None = None,
) -> tuple[int, list[TopicCatalog], bytes]:
    """Return the `wanted` topics of the newest checkpoint.

    With `through`, checkpoints with a higher last entry are ignored.

    Returns:
        The number of the next entry, the topics, and the anchor of the checkpoint's last entry; (0, [], b"") if there
        is no checkpoint.
    """
    catalog = Catalog()
    journal = _Journal(source, broker, prefix, whole=False)
    before = None if through is None else through + 1
    with_newest_checkpoint(source, broker, prefix, journal.loader(catalog), before=before)
    copies = [catalog.topic(topic).copy() for topic in catalog.known_topics() if wanted(topic)]
    return catalog.next_seq, copies, catalog.anchor


class CheckpointsDeleted(FileNotFoundError):
    """The journal is shortened, and none of the checkpoints that a reader began with can be read.

    A new reader begins with the current checkpoints. If it raises this error as well, the archive is damaged.
    """


def _unreadable(broker: str, error: EntriesDeleted) -> CheckpointsDeleted:
    return CheckpointsDeleted(f"archive of {broker}: no checkpoint can be read, and its journal is shortened: {error}")


class _Journal(NamedTuple):
    """The journal of one broker."""

    source: JournalSource
    broker: str
    prefix: str
    whole: bool

    def loader(self, catalog: Catalog) -> Use:
        """Return a function that loads a checkpoint into a catalog."""

        def use(head: CheckpointHead, data: bytes) -> None:
            catalog.restore(head, topics_in(head, self._read_pack) if self.whole else self._lazy(head))

        return use

    def follow(self, catalog: Catalog, through_seq: int | None = None) -> None:
        """Apply the entries behind the catalog's last one. Raises EntriesDeleted."""
        for seq, entry, data in following(self.source, self.broker, self.prefix, catalog.next_seq, catalog.anchor):
            if through_seq is not None and seq > through_seq:
                break
            catalog.apply(seq, entry, anchor(data))

    def _lazy(self, head: CheckpointHead) -> LazyTopics:
        @functools.cache
        def before() -> Catalog:
            return self._before(head.through_seq)

        return LazyTopics(head, self._read_range, lambda topic: before().topic(topic).copy())

    def _before(self, through_seq: int) -> Catalog:
        """Build the catalog as of a checkpoint from earlier checkpoints and entries."""
        catalog = Catalog()
        with_newest_checkpoint(self.source, self.broker, self.prefix, self.loader(catalog), before=through_seq)
        try:
            self.follow(catalog, through_seq)
        except EntriesDeleted as error:
            raise _unreadable(self.broker, error) from error
        return catalog

    def _read_pack(self, pack: PackName) -> bytes:
        return self.source.get(pack_key(self.prefix, self.broker, *pack))

    def _read_range(self, pack: PackName, start: int, length: int) -> bytes:
        return self.source.get_range(pack_key(self.prefix, self.broker, *pack), start, length)


def catalogs(
    source: JournalSource, broker: str | None = None, prefix: str = "", *, whole: bool = False
) -> dict[str, Catalog]:
    """Build the current catalogs of all brokers, or of one, as `read_catalog` does.

    Raises:
        FileNotFoundError: the store has no archive, or none of that broker.
    """
    known = brokers(source, prefix)
    if broker is not None and broker not in known:
        raise FileNotFoundError(
            f"no archive of broker {broker}: the store has archives of {', '.join(known) or 'no broker'}"
        )
    if not known:
        raise FileNotFoundError("no archive here: nothing below _neve/")
    return {name: read_catalog(source, name, prefix, whole=whole) for name in (known if broker is None else [broker])}
