"""A broker's state in its bucket: what a restore needs and no message tells.

`<prefix>/_neve/<B>/state/<0|1>.msgpack`, in the envelope of `sealed` (kind STATE): `BrokerState` as a msgpack map. The
broker overwrites the slot that is not the newest valid one, so a write that fails or is cut leaves the other. Newest is
by (epoch, number): what a fenced broker writes too late never counts above its successor's.
"""

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from neve.archive.format.envelope import Damaged, seal, unseal
from neve.archive.format.keys import state_key

log = logging.getLogger(__name__)

STATE_VERSION = 1
KIND = "STATE"
SLOTS = (0, 1)
CONTENT_MAX = 64 << 20  # some 500,000 queues and as many group offsets


class StateTooLarge(ValueError):
    """More topics, groups and offsets than a slot may hold; the slots keep what they had."""


class BrokerState(msgspec.Struct, kw_only=True):
    """One moment of a broker."""

    broker: str
    log_uuid: str = ""
    number: int = 0  # counts up over all epochs
    epoch: int = 0
    time_ms: int = 0  # the broker's clock
    clean: bool = False  # by a stop: nothing was given out after it in this epoch
    next_seq: int = 0  # journal entries that the broker knew
    log_end: int = 0  # CommitLog offset
    topics: list[dict[str, Any]] = []  # TopicConfig by RocketMQ's field names
    groups: list[dict[str, Any]] = []  # SubscriptionGroupConfig, likewise
    forbidden: dict[str, list[str]] = {}  # group -> topics that it may not read
    offsets: dict[str, dict[int, int]] = {}  # topic@group -> queue -> next offset to consume
    queues: dict[str, dict[int, int]] = {}  # topic -> queue -> next offset to give, deleted topics' too
    pending: dict[str, int] = {}  # what waits and is in no archive: timers, delayed, half_messages


class StateSource(Protocol):
    """Whatever returns an object by its key; raises FileNotFoundError where there is none."""

    def get(self, key: str) -> bytes: ...


def encode_state(state: BrokerState) -> bytes:
    """A slot's bytes. Raises StateTooLarge."""
    content = msgspec.msgpack.encode(state)
    if len(content) > CONTENT_MAX:
        raise StateTooLarge(f"the state of {state.broker} has {len(content)} bytes, a slot holds {CONTENT_MAX}")
    return seal(KIND, STATE_VERSION, content)


def decode_state(data: bytes, broker: str) -> BrokerState:
    """Raises NewerFormat, or Damaged where it is not the state of this broker."""
    try:
        state = msgspec.msgpack.decode(unseal(KIND, STATE_VERSION, data, CONTENT_MAX), type=BrokerState)
    except msgspec.DecodeError as error:
        raise Damaged(f"not a state: {error}") from error
    if state.broker != broker:
        raise Damaged(f"it is the state of broker {state.broker}")
    return state


def read_slots(source: StateSource, broker: str, prefix: str = "") -> dict[int, BrokerState]:
    """The slots that can be read."""
    found: dict[int, BrokerState] = {}
    for slot in SLOTS:
        key = state_key(prefix, broker, slot)
        try:
            found[slot] = decode_state(source.get(key), broker)
        except FileNotFoundError:
            continue
        except Damaged as error:
            log.warning("%s can't be used: %s", key, error)
    return found


def newest_slot(slots: Mapping[int, BrokerState]) -> int | None:
    """The slot with the highest (epoch, number); None where there is none."""
    return max(slots, key=lambda slot: (slots[slot].epoch, slots[slot].number), default=None)


def read_state(source: StateSource, broker: str, prefix: str = "") -> BrokerState | None:
    """The newest state that can be read; None: there is none."""
    slots = read_slots(source, broker, prefix)
    newest = newest_slot(slots)
    return None if newest is None else slots[newest]
