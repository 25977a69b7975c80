"""Catalogs from the journals of a store, with nothing but GET and one listing; no pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from neve.archive.catalog import Catalog
from neve.archive.journal import AnyEntry, decode_entry
from neve.archive.keys import broker_of, brokers_prefix, journal_key


class JournalSource(Protocol):
    """What following a journal asks of a store; `get` raises FileNotFoundError where there is no object."""

    def get(self, key: str) -> bytes: ...

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
    found: dict[str, Catalog] = {}
    for name in known if broker is None else [broker]:
        catalog = Catalog()
        for seq, entry in entries(source, name, prefix):
            catalog.apply(seq, entry)
        found[name] = catalog
    return found
