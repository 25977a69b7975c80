"""The topics of an archive: those in its journals, and those that its brokers have with nothing archived."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from neve.archive.format.broker_state import StateSource, read_state

if TYPE_CHECKING:
    from neve.archive.catalog.catalog import Catalog


def check_known(source: StateSource, known: Mapping[str, Catalog], topic: str) -> None:
    """Raise FileNotFoundError if no broker has or had the topic, archived or not."""
    if any(catalog.has_topic(topic) for catalog in known.values()):
        return
    if any(topic in _of_broker(source, broker) for broker in known):
        return  # nothing of it is archived yet
    raise FileNotFoundError(f"topic {topic} is not in this archive")


def _of_broker(source: StateSource, broker: str) -> set[str]:
    state = read_state(source, broker)
    return set() if state is None else {str(settings.get("topicName")) for settings in state.topics}
