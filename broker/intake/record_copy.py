"""A stored message appended once more: to where it was bound when its time has come, or to where it waits on."""

from __future__ import annotations

from collections.abc import Mapping

from broker.store.appender import Send
from broker.store.message_store import MessageStore, PutResult
from neve.record.codec import MessageRecord, parse_host
from neve.record.properties import PROPERTY_KEYS, PROPERTY_TAGS, PROPERTY_UNIQUE_KEY, tags_code

# What waits is carried out of a log file that is to go. What leaves its place by itself so soon is not, and what was
# carried stays at least that long: a crowded disk evicts every few seconds.
CARRY_AGAIN_MS = 30 * 60_000
_NONE: Mapping[str, str] = {}


def put_copy(
    store: MessageStore,
    record: MessageRecord,
    topic: str,
    queue_id: int,
    *,
    properties_raw: bytes | None = None,
    found_by: Mapping[str, str] = _NONE,
    code: int | None = None,
    sys_flag: int | None = None,
    prepared_transaction_offset: int = 0,
    beside: Send | None = None,
) -> PutResult:
    """The record with another place and store time. Raises StoreError, then nothing was stored.

    `found_by` has the tags, keys and id under which the copy is found; without it, it is in no index. `code` stands for
    the tags. What is None is as in the record. `beside` is stored with it, or neither.
    """
    return store.put(
        topic,
        queue_id,
        record.body,
        record.properties_raw if properties_raw is None else properties_raw,
        flag=record.flag,
        sys_flag=record.sys_flag if sys_flag is None else sys_flag,
        born_timestamp=record.born_timestamp,
        born_host=parse_host(record.born_host),
        reconsume_times=record.reconsume_times,
        tags_code=tags_code(found_by.get(PROPERTY_TAGS)) if code is None else code,
        keys=found_by.get(PROPERTY_KEYS),
        unique_key=found_by.get(PROPERTY_UNIQUE_KEY),
        prepared_transaction_offset=prepared_transaction_offset,
        beside=beside,
    )
