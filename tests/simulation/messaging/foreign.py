"""Records in the log from another broker: it was imported from an Apache broker, or followed an Apache master.

Clients of an Apache broker may send to any topic that begins with `rmq_sys_`, and may set any target of a delayed
message. These records are the most harmful of those. None of them may be executed, and no parked message may reach its
target.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from broker.intake.internal_records import WRITTEN_BY_NEVE
from broker.tables.changes import CHANGES, DELAYS, SETTLED
from broker.waiting.half_messages import COMMIT
from broker.waiting.timer_message import OUT_MS
from neve.record.codec import iter_records
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.names import (
    HALF_TOPIC,
    METADATA_LOG,
    OP_HALF_TOPIC,
    REVIVE_LOG_PREFIX,
    SCHEDULE_TOPIC,
    WHEEL_TIMER_TOPIC,
)

if TYPE_CHECKING:
    from broker.broker_controller import BrokerController
    from tests.simulation.messaging.world import MessagingWorld

FOREIGN, HIGH = "foreign", 1 << 40
MOST = 2  # The number of times per history.
HOST = ("10.0.0.9", 10911)
REVIVE_LOG = f"{REVIVE_LOG_PREFIX}DefaultCluster"
EXECUTED = (METADATA_LOG, REVIVE_LOG)
TARGETS = (METADATA_LOG, REVIVE_LOG, WHEEL_TIMER_TOPIC, SCHEDULE_TOPIC, OP_HALF_TOPIC)
VERSION = {"stateVersion": 0, "timestamp": 1, "counter": 1 << 20}
ROW = {"topicName": FOREIGN, "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
ENDS = {"0": HIGH, "1": HIGH}
_CHANGES: tuple[dict[str, object], ...] = (
    {"kind": "topic", "config": ROW, "version": VERSION},
    {"kind": "topic gone", "topic": "orders", "ends": ENDS, "beginsAgain": True, "version": VERSION},
    {"kind": "group", "config": {"groupName": FOREIGN}, "version": VERSION},
    {"kind": "group gone", "group": "readers", "withOffsets": True, "version": VERSION},
    {"kind": "raised", "queues": {"orders": {"0": HIGH}, "jobs": {"1": HIGH}}},
    {"kind": "offsets", "group": "readers", "topic": "orders", "offsets": ENDS},
)
#: Bodies for the queue of changes.
CHANGE_BODIES = (*(json.dumps({"v": 1, **change}).encode() for change in _CHANGES), b"garbage")


def lay_records(world: MessagingWorld) -> None:
    """Store all records, end the process, and start again on the log with them."""
    if world.foreign >= MOST or world.faults.shares or world.slow or world.slow_syncs or world.dies_in >= 0:
        return
    world.foreign += 1
    world.tell("a foreign master wrote into the log")
    world.server.loop.ask(lambda: _lay(world))
    world.die_now("kill")


def _lay(world: MessagingWorld) -> None:
    for body in CHANGE_BODIES:
        _put(world, METADATA_LOG, CHANGES, body)
    _put(world, METADATA_LOG, DELAYS, b'{"v":1,"kind":"delays","offsets":{"1":%d,"2":%d,"3":%d}}' % (HIGH, HIGH, HIGH))
    _put(world, METADATA_LOG, SETTLED, b'{"v":1,"kind":"settled","epoch":%d}' % HIGH)
    for queue in range(2):
        _put(world, REVIVE_LOG, 0, b'["r","workers","jobs",%d,%d]' % (queue, HIGH))
        _put(world, REVIVE_LOG, 0, b'{"bornTime":1}')
    _put(world, WHEEL_TIMER_TOPIC, 1, b"%d,%d,%d" % (1 << 60, HIGH, HIGH))
    _put(world, WHEEL_TIMER_TOPIC, 1, b"garbage")
    when = world.clock.now_ms() + 1000
    for target in TARGETS:
        pairs = f"REAL_TOPIC\x01{target}\x02REAL_QID\x010\x02UNIQ_KEY\x01{target}\x02"
        body = CHANGE_BODIES[0]
        _put(world, SCHEDULE_TOPIC, 0, body, f"DELAY\x011\x02{pairs}")
        _put(world, WHEEL_TIMER_TOPIC, 0, body, f"{OUT_MS}\x01{when}\x02{pairs}", when)
        _put(world, HALF_TOPIC, 0, body, f"TRAN_MSG\x01true\x02PGROUP\x01{FOREIGN}\x02{pairs}")


def _put(world: MessagingWorld, topic: str, queue: int, body: bytes, properties: str = "", code: int = 0) -> None:
    store = world.server.controller.store
    store.put(
        topic, queue, body, properties.encode(), flag=0, sys_flag=0, born_timestamp=1, born_host=HOST, tags_code=code
    )
    if topic in EXECUTED:
        world.laid[topic, queue] = world.laid.get((topic, queue), 0) + 1


def commit_half(world: MessagingWorld) -> None:
    """Commit a half message whose target is an internal topic."""
    for half in world.server.controller.transactions.waiting():
        raw = world.server.controller.store.reader.record_at(half.physical_offset)
        if raw is None or FOREIGN not in raw.decode("latin-1"):
            continue
        world.client.ask(
            Code.END_TRANSACTION, lambda answer: _refused(world, answer.code), producerGroup=FOREIGN,
            tranStateTableOffset=half.queue_offset, commitLogOffset=half.physical_offset, commitOrRollback=COMMIT,
            fromTransactionCheck="true",
        )  # fmt: skip
        return


def _refused(world: MessagingWorld, code: int) -> None:
    if code == ResponseCode.SUCCESS:
        world.broken.append("a half message is committed to an internal topic")


def check_tables(controller: BrokerController) -> None:
    """Raise AssertionError if a foreign change is in a table, or raised a queue."""
    topics, store = controller.topics.topics, controller.store
    assert METADATA_LOG not in topics, "the metadata log has a row"
    assert FOREIGN not in topics, "a foreign record created a topic"
    assert FOREIGN not in controller.groups.groups, "a foreign record created a group"
    for topic in ("orders", "jobs"):
        for queue in store.queues.names_of(topic):
            assert store.queues.next_offset(topic, queue) < HIGH, "a foreign record raised a queue"


def check(world: MessagingWorld) -> None:
    """Raise AssertionError if a foreign record was executed or a message was delivered to an internal topic."""
    check_tables(world.server.controller)
    store = world.server.controller.store
    for topic in EXECUTED:
        for queue in store.queues.names_of(topic):
            found, laid = _foreign_in(world, topic, queue), world.laid.get((topic, queue), 0)
            assert found <= laid, f"{found - laid} messages were delivered into {topic} queue {queue}"


def _foreign_in(world: MessagingWorld, topic: str, queue: int) -> int:
    store, count = world.server.controller.store, 0
    offset, end = store.queues.min_offset(topic, queue), store.queues.max_offset(topic, queue)
    while offset < end:
        got = store.reader.get(topic, queue, offset, 64, 1 << 22)
        for buffer in got.buffers:
            count += sum(record.prepared_transaction_offset != WRITTEN_BY_NEVE for record in iter_records(buffer))
        assert got.next_offset > offset
        offset = got.next_offset
    return count
