"""The whole content of a catalog as one comparable value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import CommittedObject, Gap, Topic


@dataclass(kw_only=True)
class CatalogState:
    """`marks` is the journal's own state; the other fields are those of the topics, ordered by topic."""

    marks: dict[str, Any]
    names: list[CommittedObject]
    expiring: list[tuple[CommittedObject, int]]
    queues: list[tuple[str, int, int]]  # Topic, queue, recorded minimum.
    through: dict[str, int]
    covered: dict[str, list[tuple[int, int]]]
    named: dict[str, dict[int, int]]
    topics: list[Topic]
    gaps: list[Gap]


def state_of(catalog: Catalog, broker: str = "b") -> CatalogState:
    topics = sorted(catalog._each(), key=lambda one: one.topic)
    return CatalogState(
        marks=msgspec.structs.asdict(catalog.marks(broker)),
        names=[name for one in topics for name in one.names()],
        expiring=[(name, after) for one in topics for after, name in one.expiring_names()],
        queues=[(one.topic, queue, held.minimum) for one in topics for queue, held in sorted(one.queues.items())],
        through={one.topic: one.through for one in topics if one.through is not None},
        covered={one.topic: sorted(one.covered) for one in topics if one.covered},
        named={one.topic: one.named_offsets() for one in topics if one.is_named},
        topics=[one.entry for one in topics if one.entry is not None],
        gaps=[gap for one in topics for gap in one.gaps],
    )


def expiring_keys(catalog: Catalog) -> dict[str, int]:
    """Return the keys of objects that are out of view and not deleted, with the earliest time of their deletion."""
    return {
        name.key: after for topic in catalog.expiring_topics() for after, name in catalog.topic(topic).expiring_names()
    }
