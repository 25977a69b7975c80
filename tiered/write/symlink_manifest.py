"""Symlink manifests: which objects of a topic an engine without neve and without Delta Lake should read.

    <prefix>/topic=<T>/_symlink_format_manifest/dt=<YYYY-MM-DD>/broker=<B>/manifest

A manifest is text: the URI of each current object of one day and broker, one per line, in key order. Hive, Presto,
Trino and Athena read this layout through `SymlinkTextInputFormat`. The job that follows the journal for the Delta
tables replaces a manifest after the journal has changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from infra.objects.store import NotFound, ObjectStore
from neve.archive.delta.table import VisibleFile, table_root
from neve.archive.format.keys import escape
from neve.archive.store.url import parse_store_url

FOLDER = "_symlink_format_manifest"


class SymlinkManifests:
    """The manifests of one broker's objects, topic by topic.

    Changes are collected by `change` and written by `flush`. Manifests that are missing are written from all objects of
    their topic by `add_missing`; `rewrite` compares all manifests of a topic.
    """

    def __init__(self, store: ObjectStore, broker: str, prefix: str = "") -> None:
        self._store, self._prefix, self._broker = store, prefix, broker
        self._base = parse_store_url(store.url).uri
        self._changes: dict[tuple[str, str], dict[str, bool]] = {}  # (topic, day) -> {key: is it current}

    def change(self, topic: str, removed: Iterable[VisibleFile], added: Iterable[VisibleFile]) -> None:
        """Note which objects left the readers' view and which entered it."""
        for files, is_current in ((removed, False), (added, True)):
            for file in files:
                self._changes.setdefault((topic, file.name.day), {})[file.name.key] = is_current

    def flush(self) -> list[str]:
        """Write the collected changes; return the topics that need `add_missing`."""
        incomplete: set[str] = set()
        while self._changes:
            topic, day = next(iter(self._changes))
            changes = self._changes[topic, day]
            key = self._key(topic, day)
            current = self._read(key)
            if current is None:
                incomplete.add(topic)
            else:
                lines = {self._uri(key): is_current for key, is_current in changes.items()}
                kept = current - lines.keys() | {line for line, is_current in lines.items() if is_current}
                self._write(key, current, kept)
            del self._changes[topic, day]
        return sorted(incomplete)

    def rewrite(self, topic: str, files: Iterable[VisibleFile]) -> None:
        """Make the topic's manifests name exactly these objects; those that already do are left as they are."""
        days = self._days(files)
        for day in self._present(topic) | days.keys():
            key = self._key(topic, day)
            self._write(key, self._read(key), days.get(day, set()))

    def add_missing(self, topic: str, files: Iterable[VisibleFile]) -> None:
        """Write the manifests of the topic that do not exist, as that of a new day; the others are not read."""
        days = self._days(files)
        for day in days.keys() - self._present(topic):
            self._write(self._key(topic, day), None, days[day])

    def _days(self, files: Iterable[VisibleFile]) -> dict[str, set[str]]:
        """Return the lines of each day's manifest."""
        days: dict[str, set[str]] = defaultdict(set)
        for file in files:
            days[file.name.day].add(self._uri(file.name.key))
        return days

    def _present(self, topic: str) -> set[str]:
        """Return the days of which the store has a manifest."""
        end = f"/broker={escape(self._broker)}/manifest"
        folder = f"{table_root(self._prefix, topic)}/{FOLDER}/"
        keys = (one.key for one in self._store.list(folder))
        return {key.removeprefix(f"{folder}dt=").removesuffix(end) for key in keys if key.endswith(end)}

    def _write(self, key: str, current: set[str] | None, wanted: set[str]) -> None:
        if wanted == (current or set()):
            return
        if wanted:
            self._store.put(key, "".join(f"{line}\n" for line in sorted(wanted)).encode())
        else:
            self._store.delete(key)

    def _read(self, key: str) -> set[str] | None:
        """Return the lines of a manifest; None where there is no manifest."""
        try:
            return set(self._store.get(key).decode().splitlines())
        except NotFound:
            return None

    def _key(self, topic: str, day: str) -> str:
        return f"{table_root(self._prefix, topic)}/{FOLDER}/dt={day}/broker={escape(self._broker)}/manifest"

    def _uri(self, key: str) -> str:
        return f"{self._base}/{key}"
