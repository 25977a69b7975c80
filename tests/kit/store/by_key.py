"""Query a local store by key in tests."""

from broker.store.message_store import MessageStore
from infra.loop.in_steps import at_once


def by_key(store: MessageStore, topic: str, key: str, max_num: int, begin: int, end: int) -> list[bytes]:
    """Return the records with this hash in the order of the index."""
    return at_once(store.reader.query(topic, key, max_num, begin, end, is_hit=lambda _: True)).records
