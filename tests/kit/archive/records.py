"""Records of one queue, as a broker stores them."""

from dataclasses import dataclass
from typing import Any

from neve.record.codec import encode_record

TOPIC = "orders"
T0 = 1_700_000_000_000


@dataclass
class Run:
    first_offset: int
    physical: Any
    sizes: Any


def record(offset: int, **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "topic": TOPIC.encode(),
        "body": b"hello",
        "properties": b"KEYS\x01k1  k2\x02UNIQ_KEY\x01ABC\x02TAGS\x01t\xc3\xa4g\x02",
        "queue_id": 1,
        "flag": 0,
        "queue_offset": offset,
        "physical_offset": 1000 + offset,
        "sys_flag": 0,
        "born_timestamp": T0,
        "born_host": ("10.0.0.1", 1234),
        "store_timestamp": T0 + 1,
        "store_host": ("10.0.0.2", 10911),
    }
    return encode_record(**{**fields, **changes})
