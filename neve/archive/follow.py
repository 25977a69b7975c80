"""Catalogs from the journals of a store, with nothing but GET, HEAD and one listing; no pyarrow.

The end of a journal is searched (entries are dense and permanent), its last entry names the newest checkpoint, and only
what follows that is read. Where a checkpoint is missing or damaged the one before it serves, in the end entry 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from neve.archive.catalog import Catalog
from neve.archive.checkpoint import CatalogState, PackedState, decode_checkpoint
from neve.archive.journal import NO_CHECKPOINT, AnyEntry, Checkpoint, decode_entry
from neve.archive.keys import broker_of, brokers_prefix, checkpoint_key, journal_key
from neve.archive.sealed import Damaged

log = logging.getLogger(__name__)


class JournalSource(Protocol):
    """What following a journal asks of a store; `get` and `head` raise FileNotFoundError where there is no object."""

    def get(self, key: str) -> bytes: ...

    def head(self, key: str) -> object: ...

    def list_prefixes(self, prefix: str) -> Sequence[str]: ...


def brokers(source: JournalSource, prefix: str = "") -> list[str]:
    """Names of the brokers that have an archive here; directories that belong to the store itself begin with a dot."""
    listed = source.list_prefixes(brokers_prefix(prefix))
    names = [broker_of(prefix, one) for one in listed]
    return sorted(name for name in names if name and not name.startswith("."))


def entries(source: JournalSource, broker: str, prefix: str = "", first: int = 0) -> Iterator[tuple[int, AnyEntry]]:
    """(number, entry) from `first` to the journal's end: entries are dense, the first missing one is the end."""
    seq = first
    while True:
        try:
            data = source.get(journal_key(prefix, broker, seq))
        except FileNotFoundError:
            return
        yield seq, decode_entry(data)
        seq += 1


def journal_end(stands: Callable[[int], bool], known: int = 0) -> int:
    """How many entries there are, by asking of single ones whether they stand; the first `known` do.

    Gallops up and then halves: about 2 log2(n) questions, one when nothing is new. Correct because entries are dense
    and never deleted; an entry that comes meanwhile may or may not be counted.
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


def newest_checkpoint(source: JournalSource, broker: str, prefix: str, end: int) -> tuple[CatalogState, bytes] | None:
    """The newest checkpoint that can be read, with its bytes; None: the journal is to be read from its first entry.

    Raises:
        NewerFormat: a newer program wrote it.
    """
    last = decode_entry(source.get(journal_key(prefix, broker, end - 1))) if end else None
    seq = NO_CHECKPOINT
    if last is not None:
        seq = last.through_seq if isinstance(last, Checkpoint) else last.checkpoint
    while seq > NO_CHECKPOINT:
        try:
            data = source.get(checkpoint_key(prefix, broker, seq))
            return decode_checkpoint(data, broker, seq, PackedState), data
        except (FileNotFoundError, Damaged) as error:
            log.warning("checkpoint %d of %s can't be used, the one before it serves: %s", seq, broker, error)
        seq = checkpoint_before(source, broker, prefix, seq)
    return None


def checkpoint_before(source: JournalSource, broker: str, prefix: str, seq: int) -> int:
    """The checkpoint before the one after entry `seq`: that entry names it."""
    return min(decode_entry(source.get(journal_key(prefix, broker, seq))).checkpoint, seq - 1)


def read_catalog(source: JournalSource, broker: str, prefix: str = "") -> Catalog:
    """What a broker's journal adds up to now."""
    catalog = Catalog()
    found = newest_checkpoint(source, broker, prefix, journal_end(stands(source, broker, prefix)))
    if found is not None:
        catalog.restore(found[0])
    for seq, entry in entries(source, broker, prefix, catalog.next_seq):
        catalog.apply(seq, entry)
    return catalog


def catalogs(source: JournalSource, broker: str | None = None, prefix: str = "") -> dict[str, Catalog]:
    """broker -> what its journal adds up to now.

    Raises:
        FileNotFoundError: the store holds no archive, or none of that broker.
    """
    known = brokers(source, prefix)
    if broker is not None and broker not in known:
        raise FileNotFoundError(f"no archive of broker {broker} here; there are: {', '.join(known) or 'none'}")
    if not known:
        raise FileNotFoundError("no archive here: nothing below _neve/")
    return {name: read_catalog(source, name, prefix) for name in (known if broker is None else [broker])}
