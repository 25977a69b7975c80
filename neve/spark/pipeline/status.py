"""How a pipeline stands: what each flow did last, and how far behind the archive it is, without a Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from neve.archive.catalog.journal_reader import brokers
from neve.archive.store.source import open_source
from neve.spark.pipeline.record import Record, Run
from neve.spark.planning.journals import Journal, JournalBeginsLater
from neve.spark.planning.positions import VERSION, Place, decoded
from neve.spark.planning.rows import count

Journals = Mapping[str, Journal]


class Flow(NamedTuple):
    """`batches`: done, by the checkpoint; `position`: in the archive, `behind`: rows of the topic that are to come."""

    name: str
    state: str | None
    at_ms: int | None
    batches: int | None
    batch_ms: int | None
    is_amid: bool
    position: str | None
    behind: int | None
    told: str


class Standing(NamedTuple):
    """A pipeline's runs, the newest last, and its flows."""

    runs: list[Run]
    flows: list[Flow]


class _Checkpoint(NamedTuple):
    batches: int
    batch_ms: int | None
    is_amid: bool
    sources: list[Any]


def standing(home: Path, storage: str, archived: tuple[str, str] | None) -> Standing:
    """Of the pipeline whose spec is in `home`; `archived`: the store and the topic that its flows read, if told."""
    runs = [run for run in Record(home).runs() if run.kind == "run"]
    known: dict[str, Any] = {}
    for run in runs:
        known |= run.flows
    checkpoints = dict(_checkpoints(storage))
    journals = None if archived is None or not checkpoints else _journals(*archived)
    names = {name: name.rpartition(".")[2] for name in known}
    flows = [_flow(name, known[name], checkpoints.get(names[name]), journals) for name in sorted(known)]
    of_none = sorted(set(checkpoints) - set(names.values()))  # of runs that the record has forgotten
    return Standing(runs, [*flows, *(_flow(name, None, checkpoints[name], journals) for name in of_none)])


def _flow(name: str, done: Any, checkpoint: _Checkpoint | None, journals: Journals | None) -> Flow:
    position, behind = (None, None) if checkpoint is None else _told(checkpoint.sources, journals)
    state, at_ms, told = (None, None, "") if done is None else (done.state, done.at_ms, done.told)
    if checkpoint is None:
        return Flow(name, state, at_ms, None, None, False, position, behind, told)
    return Flow(name, state, at_ms, checkpoint.batches, checkpoint.batch_ms, checkpoint.is_amid, position, behind, told)


def _told(sources: list[Any], journals: Journals | None) -> tuple[str | None, int | None]:
    """Of neve's sources: an entry of each journal, or offsets of queues (neve.spark.planning and tiers, positions)."""
    told: list[str] = []
    behind: int | None = None
    for source in sources:
        if not isinstance(source, dict) or not isinstance(source.get("brokers"), dict):
            continue
        if source.get("version") != VERSION:
            for broker, topics in source["brokers"].items():
                told += [f"{broker}: {topic} {sum(queues.values())}" for topic, queues in topics.items()]
            continue
        places = decoded(source).brokers
        told += [f"{broker}: entry {place.through}" for broker, place in places.items()]
        if journals is not None and (rows := _behind(places, journals)) is not None:
            behind = (behind or 0) + rows
    return ", ".join(told) or None, behind


def _behind(places: Mapping[str, Place], journals: Journals) -> int | None:
    """None: the journals do not say it any more."""
    rows = 0
    for broker, journal in journals.items():
        place = places.get(broker, Place(-1, {}))
        try:
            brought = journal.brought(place.through, journal.end)
        except JournalBeginsLater:
            return None
        rows += count(place.left) + sum(count(some) for _, some in brought)
    return rows


def _journals(store: str, topic: str) -> Journals:
    source = open_source(store)
    return {broker: Journal(source, broker, lambda name: name == topic) for broker in brokers(source)}


def _checkpoints(storage: str) -> Iterator[tuple[str, _Checkpoint]]:
    """(flow, what its newest checkpoint says), where they lie on this machine: FLOW/NUMBER/offsets and commits."""
    where = urlsplit(storage)
    if where.scheme not in ("", "file"):
        return
    root = Path(unquote(where.path)) / "_checkpoints"
    newest: dict[str, Path] = {}
    for offsets in sorted(root.rglob("offsets"), key=lambda path: int(path.parent.name)):
        newest[offsets.parents[1].name] = offsets.parent
    for flow, folder in newest.items():
        yield flow, _checkpoint(folder)


def _checkpoint(folder: Path) -> _Checkpoint:
    begun, done = (_numbers(folder / what) for what in ("offsets", "commits"))
    last = max(done, default=None)
    if last is None:
        return _Checkpoint(0, None, bool(begun), [])
    try:
        _, about, *sources = (folder / "offsets" / str(last)).read_text("utf-8").splitlines()
    except FileNotFoundError:
        return _Checkpoint(last + 1, None, max(begun, default=last) > last, [])
    batch_ms = json.loads(about).get("batchTimestampMs")
    return _Checkpoint(last + 1, batch_ms, max(begun) > last, [json.loads(one) for one in sources if one != "-"])


def _numbers(folder: Path) -> list[int]:
    try:
        return [int(one.name) for one in folder.iterdir() if one.name.isdigit()]
    except FileNotFoundError:
        return []
