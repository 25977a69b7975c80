"""Catalogs from the journals of a store, with nothing but GET, HEAD and listings; no pyarrow.

One listing says which checkpoints there are; the newest is taken, and the entries behind it are read. Where it is
missing or damaged the one before it serves, and in the end entry 0, unless the journal has been shortened.
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

CHUNK = 64  # entries that are read before it is looked whether they stood all the while
TRIES = 3  # of who finds, when all is read, that it was deleted meanwhile


class CutShort(ConnectionError):
    """An answer had fewer bytes than it should."""


class Listed(Protocol):
    """An object as a listing names it."""

    @property
    def key(self) -> str: ...


class JournalSource(Protocol):
    """What following a journal asks of a store; the first three raise FileNotFoundError where there is no object."""

    def get(self, key: str) -> bytes: ...

    def get_range(self, key: str, start: int, length: int) -> bytes: ...

    def head(self, key: str) -> object: ...

    def list_prefixes(self, prefix: str) -> Sequence[str]: ...

    def list(self, prefix: str) -> Iterable[Listed]: ...


def brokers(source: JournalSource, prefix: str = "") -> list[str]:
    """Names of the brokers that have an archive here; directories that belong to the store itself begin with a dot."""
    listed = source.list_prefixes(brokers_prefix(prefix))
    names = [broker_of(prefix, one) for one in listed]
    return sorted(name for name in names if name and not name.startswith("."))


def entries(source: JournalSource, broker: str, prefix: str = "", first: int = 0) -> Iterator[tuple[int, AnyEntry]]:
    """(number, entry) from `first`, or from where the journal begins by now, to its end."""
    begin = first
    try:
        for seq, entry, _ in following(source, broker, prefix, first):
            begin = seq + 1
            yield seq, entry
        if begin > first or not first:
            return
    except EntriesDeleted:
        pass
    begin = max(begin, first_standing(source, broker, prefix))
    for seq, entry, _ in following(source, broker, prefix, begin):
        yield seq, entry


def first_standing(source: JournalSource, broker: str, prefix: str = "") -> int:
    """From it on all entries stand; by a listing. What lies below, behind a hole, nobody may read."""
    numbers = sorted(_numbers(source, journals_prefix(prefix, broker), parse_journal_key), reverse=True)
    for number, below in itertools.pairwise(numbers):
        if below != number - 1:
            return number
    return numbers[-1] if numbers else 0


def following(
    source: JournalSource, broker: str, prefix: str = "", first: int = 0, before: bytes = b""
) -> Iterator[tuple[int, AnyEntry, bytes]]:
    """(number, entry, its bytes) from `first` to the journal's end: entries are dense, a missing one is the end.

    That is so while the entry before stands, whose anchor is `before` (none: `first` is one that stands, or 0): the
    lowest are deleted first, and none that is deleted can come back as it was. Raises EntriesDeleted where it is gone.
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
            check_stands(source, journal_key(prefix, broker, seq - 1), before)
        elif found:
            check_stands(source, journal_key(prefix, broker, seq), anchor(found[0]))
        for data in found:
            yield seq, decode_entry(data), data
            seq, before = seq + 1, anchor(data)


def check_stands(source: JournalSource, key: str, before: bytes) -> None:
    """Whether an entry is there, and the one that it was. Raises EntriesDeleted, or CutShort where that is not told."""
    try:
        found = source.get_range(key, 0, len(before))
    except FileNotFoundError as error:
        raise EntriesDeleted(f"{key} has been deleted: what follows it is in a checkpoint") from error
    if len(found) < len(before) and before.startswith(found):
        raise CutShort(f"{key}: {len(found)} bytes came of {len(before)}")
    if found != before:
        raise EntriesDeleted(f"{key} has been deleted: what follows it is in a checkpoint")


def is_shortened(source: JournalSource, broker: str, prefix: str = "") -> bool:
    """Whether entries have been deleted, or are about to be."""
    try:
        decode_entry(source.get(journal_key(prefix, broker, 0)))
    except EntriesDeleted:
        return True
    except FileNotFoundError:
        return False
    return False


def journal_end(stands: Callable[[int], bool], known: int = 0) -> int:
    """How many entries there are, by asking of single ones whether they stand; the first `known` do.

    Gallops up and then halves: about 2 log2(n) questions, one when nothing is new. Correct because entries are dense,
    as long as none from `known` on is deleted; an entry that comes meanwhile may or may not be counted.
    """
    low, step = known, 1  # all below `low` stand
    while stands(low + step - 1):
        low += step
        step *= 2
    high = low + step - 1  # does not stand
    while low < high:
        middle = (low + high) // 2
        if stands(middle):
            low = middle + 1
        else:
            high = middle
    return low


def stands(source: JournalSource, broker: str, prefix: str = "") -> Callable[[int], bool]:
    """Whether an entry is there, by HEAD."""

    def ask(seq: int) -> bool:
        try:
            source.head(journal_key(prefix, broker, seq))
        except FileNotFoundError:
            return False
        return True

    return ask


Use = Callable[[CheckpointHead, bytes], None]


def checkpoints(source: JournalSource, broker: str, prefix: str = "") -> list[int]:
    """After which entries there is one, the newest first; by a listing."""

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
    """`use` the newest checkpoint that can be read, with its bytes; False: there is none.

    One that `use` finds Damaged, or of which it misses an object, gives way to the one before it. `before`: only those
    of entries below.

    Raises:
        NewerFormat: a newer program wrote it.
    """
    for seq in checkpoints(source, broker, prefix):
        if before is not None and seq >= before:
            continue
        try:
            data = source.get(checkpoint_key(prefix, broker, seq))
            use(decode_checkpoint(data, broker, seq), data)
        except (FileNotFoundError, Damaged) as error:
            log.warning("checkpoint %d of %s can't be used, the one before it serves: %s", seq, broker, error)
        else:
            return True
    return False


def read_catalog(source: JournalSource, broker: str, prefix: str = "", *, whole: bool = False) -> Catalog:
    """What a broker's journal adds up to now. Unless `whole`, a topic of its checkpoint is read when somebody asks.

    Who asks such a catalog may meet the store's errors; and when the checkpoints are gone that were kept when it was
    made, a topic is read from the journal's first entry on, while that stands, and after that it is CheckpointsGone.

    Raises:
        CheckpointsGone: the journal has been shortened, and no checkpoint can be read.
    """
    journal = _Journal(source, broker, prefix, whole)
    tries = 0
    while True:
        catalog = Catalog()
        with_newest_checkpoint(source, broker, prefix, journal.stand_on(catalog))
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
    """(the entry that follows it, its topics that are `wanted`, the anchor of its last entry) of a checkpoint.

    The newest, or with `through` the newest that has no entry above; 0 and nothing where there is none.
    """
    catalog = Catalog()
    journal = _Journal(source, broker, prefix, whole=False)
    before = None if through is None else through + 1
    with_newest_checkpoint(source, broker, prefix, journal.stand_on(catalog), before=before)
    copies = (catalog.copy_of(topic) for topic in catalog.known_topics() if wanted(topic))
    return catalog.next_seq, [of for of in copies if of is not None], catalog.anchor


class CheckpointsGone(FileNotFoundError):
    """No checkpoint can be read of those that were kept when somebody began by one, and the journal begins later.

    Who begins again has what is kept now; the same error then says that the archive is damaged.
    """


def _unreadable(broker: str, error: EntriesDeleted) -> CheckpointsGone:
    return CheckpointsGone(f"archive of {broker}: no checkpoint can be read, and its journal begins later: {error}")


class _Journal(NamedTuple):
    """One that is read."""

    source: JournalSource
    broker: str
    prefix: str
    whole: bool

    def stand_on(self, catalog: Catalog) -> Use:
        """To begin with a checkpoint."""

        def use(head: CheckpointHead, data: bytes) -> None:
            catalog.restore(head, topics_in(head, self._read_pack) if self.whole else self._stored(head))

        return use

    def follow(self, catalog: Catalog, through_seq: int | None = None) -> None:
        """Apply the entries behind what it has. Raises EntriesDeleted."""
        for seq, entry, data in following(self.source, self.broker, self.prefix, catalog.next_seq, catalog.anchor):
            if through_seq is not None and seq > through_seq:
                break
            catalog.apply(seq, entry, anchor(data))

    def _stored(self, head: CheckpointHead) -> LazyTopics:
        @functools.cache
        def before() -> Catalog:
            return self._before(head.through_seq)

        return LazyTopics(head, self._read_range, lambda topic: before().copy_of(topic))

    def _before(self, through_seq: int) -> Catalog:
        """What the journal adds up to at a checkpoint, without that."""
        catalog = Catalog()
        with_newest_checkpoint(self.source, self.broker, self.prefix, self.stand_on(catalog), before=through_seq)
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
    """broker -> what its journal adds up to now, as `read_catalog` has it.

    Raises:
        FileNotFoundError: the store holds no archive, or none of that broker.
    """
    known = brokers(source, prefix)
    if broker is not None and broker not in known:
        raise FileNotFoundError(f"no archive of broker {broker} here; there are: {', '.join(known) or 'none'}")
    if not known:
        raise FileNotFoundError("no archive here: nothing below _neve/")
    return {name: read_catalog(source, name, prefix, whole=whole) for name in (known if broker is None else [broker])}
