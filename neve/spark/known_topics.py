"""Which topics an archive knows: those its journals speak of, and those its brokers have and never archived from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from neve.archive.format.broker_state import StateSource, read_state

if TYPE_CHECKING:
    from neve.archive.catalog.catalog import Catalog


def check_known(source: StateSource, known: Mapping[str, Catalog], topic: str) -> None:
    """Returns where a broker has, or had, the topic, archived or not. Raises FileNotFoundError."""
    if any(catalog.has_topic(topic) for catalog in known.values()):
        return
    if any(topic in _of_broker(source, broker) for broker in known):
        return  # nothing of it has been archived yet
    raise FileNotFoundError(f"topic {topic} is not in this archive")


def _of_broker(source: StateSource, broker: str) -> set[str]:
    state = read_state(source, broker)
    return set() if state is None else {str(told.get("topicName")) for told in state.topics}
