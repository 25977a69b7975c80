"""Client traffic: several topics and queues, all sizes, and properties that no client of ours would write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.store.errors import StoreError
from broker.tables.topic_config_manager import TopicConfig
from infra.failpoint import FailpointError
from neve.errors import BrokerError
from neve.record.codec import decode_record
from tests.simulation.model import Message

#: The keys of messages that are erased occasionally.
ERASED_KEY = "who"

if TYPE_CHECKING:
    from tests.simulation.world import StorageWorld


def put(world: StorageWorld, topic: str, queue: int) -> None:
    """Store an unusual or an ordinary message; create the topic if it does not exist."""
    process, model = world.process, world.model
    if process.broker.topics.select(topic) is None:
        try:
            process.broker.topics.update(TopicConfig(topic_name=topic, read_queue_nums=3, write_queue_nums=3))
        except (BrokerError, StoreError, FailpointError) as error:
            world.tell(f"  no topic {topic}: {error}")
            return
        process.broker.topics.file.save_now()
    number = model.number = model.number + 1
    size = world.random.choice((0, 1, 10, 300, 1000, 5000))
    body = b"%d:" % number + world.random.randbytes(size)
    properties = world.random.choice(
        (
            b"",
            b"TAGS\x01a\x02KEYS\x01k%d k\x02" % number,
            b"KEYS\x01k",
            b"KEYS\x01k %s\x02" % ERASED_KEY.encode(),
            b"a\x01b\x02a\x01c\x02",
            b"\xff\xfe\x01x\x02",
            b"UNIQ_KEY\x01%032X" % number,
        )
    )
    host = world.random.choice((("10.0.0.1", 1), ("2001:db8::1", 65535)))
    world.clock.advance(world.random.randrange(3))
    try:
        stored = process.store.put(
            topic, queue, body, properties, flag=number % 7, sys_flag=world.random.choice((0, 1, 1 << 8)),
            born_timestamp=world.random.choice((0, -1, 1 << 62, world.clock.now_ms())), born_host=host,
            keys=ERASED_KEY if ERASED_KEY.encode() in properties else f"k{number}" if number % 2 else None,
            reconsume_times=number % 3,
        )  # fmt: skip
    except (StoreError, FailpointError) as error:
        world.tell(f"  put {number} refused: {error}")
        return
    file = process.store.log.at(stored.physical_offset)
    assert file is not None
    begin = stored.physical_offset - file.base
    record = bytes(file.map[begin : begin + stored.size])
    read = decode_record(record)
    assert (read.topic, read.queue_id, read.queue_offset, read.body, read.properties_raw) == (
        topic, queue, stored.queue_offset, body, properties,
    )  # fmt: skip
    model.put(
        Message(number, topic, queue, stored.queue_offset, stored.physical_offset, record, stored.store_timestamp)
    )
    world.tell(f"put {number} {topic}/{queue}/{stored.queue_offset} at {stored.physical_offset}")
