"""State slots: the state of a broker that a restore needs and that no message contains.

`<prefix>/_neve/<B>/state/<0|1>.msgpack` is an envelope (`envelope`) of kind STATE with a `BrokerState` as msgpack map.
The broker overwrites the slot that is not the newest valid one, so a failed or torn write leaves the other slot intact.
The newest slot is that with the highest (epoch, number): a late write of a fenced broker never counts above its
successor's.
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
CONTENT_MAX = 64 << 20  # about 500,000 queues and as many group offsets


class StateTooLarge(ValueError):
    """The state exceeds the size limit of a slot; the slots are unchanged."""


class BrokerState(msgspec.Struct, kw_only=True):
    """The state of a broker at one moment."""

    broker: str
    log_uuid: str = ""
    number: int = 0  # increases over all epochs
    epoch: int = 0
    time_ms: int = 0  # the broker's clock
    clean: bool = False  # written at a stop: no offset was assigned after it in this epoch
    next_seq: int = 0  # journal entries that the broker knew
    log_end: int = 0  # CommitLog offset
    topics: list[dict[str, Any]] = []  # TopicConfig by RocketMQ's field names
    groups: list[dict[str, Any]] = []  # SubscriptionGroupConfig, likewise
    forbidden: dict[str, list[str]] = {}  # group -> topics whose reading is forbidden
    offsets: dict[str, dict[int, int]] = {}  # topic@group -> queue -> next offset to consume
    queues: dict[str, dict[int, int]] = {}  # topic -> queue -> next offset to assign, including deleted topics
    pending: dict[str, int] = {}  # number of unarchived timers, delayed and half_messages


class StateSource(Protocol):
    """A store; `get` raises FileNotFoundError if there is no such object."""

    def get(self, key: str) -> bytes: ...


def encode_state(state: BrokerState) -> bytes:
    """Return the content of a slot. Raises StateTooLarge."""
    content = msgspec.msgpack.encode(state)
    if len(content) > CONTENT_MAX:
        raise StateTooLarge(f"the state of {state.broker} has {len(content)} bytes, a slot holds {CONTENT_MAX}")
    return seal(KIND, STATE_VERSION, content)


def decode_state(data: bytes, broker: str) -> BrokerState:
    """Decode the content of a slot. Raises NewerFormat, or Damaged if it is not the state of this broker."""
    try:
        state = msgspec.msgpack.decode(unseal(KIND, STATE_VERSION, data, CONTENT_MAX), type=BrokerState)
    except msgspec.DecodeError as error:
        raise Damaged(f"not a state: {error}") from error
    if state.broker != broker:
        raise Damaged(f"it is the state of broker {state.broker}")
    return state


def read_slots(source: StateSource, broker: str, prefix: str = "") -> dict[int, BrokerState]:
    """Return the readable slots."""
    found: dict[int, BrokerState] = {}
    for slot in SLOTS:
        key = state_key(prefix, broker, slot)
        try:
            found[slot] = decode_state(source.get(key), broker)
        except FileNotFoundError:
            continue
        except Damaged as error:
            log.warning("state slot unusable: key=%s error=%s", key, error)
    return found


def newest_slot(slots: Mapping[int, BrokerState]) -> int | None:
    """Return the slot with the highest (epoch, number); None if there is no slot."""
    return max(slots, key=lambda slot: (slots[slot].epoch, slots[slot].number), default=None)


def read_state(source: StateSource, broker: str, prefix: str = "") -> BrokerState | None:
    """Return the newest readable state; None if there is none."""
    slots = read_slots(source, broker, prefix)
    newest = newest_slot(slots)
    return None if newest is None else slots[newest]
