"""Promises that always hold, checked when a message appears, after each start and at the end.

1. A promised message is stored once, byte for byte, at its acknowledged offset: after a kill always, after a power cut
   under SYNC_FLUSH, and under ASYNC_FLUSH as far as a flush had completed.
2. A message sent once is stored at most once; a delayed message may be delivered once more for each end of a process.
3. A delayed message or timer is delivered, never before its time, and is not skipped after a start; it is in time
   unless a clock is set or a disk fails.
4. A half message waits until it is ended; it is delivered once if it was committed, and otherwise never. 5. A popped
message is redelivered when its invisible time is over unless it was acknowledged, and not earlier. 6. A group resumes
at its committed offset: exactly after a clean stop, otherwise at the offset of some seconds earlier.
   A pop group that was reset gets all messages again.
7. A message that a consumer sent back is redelivered through the retry topic, not before its delay, at most once more
   for each end of a process; or it becomes a dead letter, once.
8. No start executes records that a foreign master left in internal topics, and no parked message is delivered to an
   internal topic (`foreign.check`).
9. No task of the broker ends while the broker runs, not even for lack of descriptors; after a failed sync nothing is
   acknowledged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.store.visibility import VisibleEntry
from neve.record.codec import MessageRecord, iter_records
from neve.remoting.names import (
    DLQ_PREFIX,
    HALF_TOPIC,
    RETRY_PREFIX,
    RETRY_V1,
    SCHEDULE_TOPIC,
    WHEEL_TIMER_TOPIC,
    real_topic,
)
from tests.simulation.messaging import foreign
from tests.simulation.messaging.clients import POPPED, READERS, WORKERS
from tests.simulation.messaging.model import DELAY, HALF, TIMER, Copy, Return, SentMessage

if TYPE_CHECKING:
    from tests.simulation.messaging.world import MessagingWorld

TARGETS = ("orders", "jobs")
RETRY = real_topic(POPPED, WORKERS, RETRY_V1)
AGAIN, DEAD = RETRY_PREFIX + READERS, DLQ_PREFIX + READERS
HOLDS = {DELAY: SCHEDULE_TOPIC, TIMER: WHEEL_TIMER_TOPIC, HALF: HALF_TOPIC}
#: Timers of a loop may be late, none is early; store times have milliseconds.
ROUNDING_MS = 1
#: A save waits for a sync of the log, and for the other tables.
SAVING_S = 1.5
LATE_S = 3.0
DROPPED = frozenset({"a delayed message", "a timer message"})


def appeared(world: MessagingWorld, shown: list[VisibleEntry]) -> None:
    """Check messages that readers see from now on."""
    store = world.server.controller.store
    for queue, offset, _ in shown:
        if queue.topic not in {*TARGETS, RETRY, AGAIN}:
            continue
        for buffer in store.reader.get(queue.topic, queue.queue_id, offset, 1, 1 << 20).buffers:
            for record in iter_records(buffer):
                sent = world.model.sent[record.body.partition(b":")[0].decode()]
                if queue.topic == AGAIN:
                    back = world.model.returns[sent.name]
                    _check_passed(world, sent.name, back)
                elif queue.topic == RETRY:
                    _check_return(world, sent, record.physical_offset)
                else:
                    sent.seen += 1
                    _check_moment(world, sent)


def _check_moment(world: MessagingWorld, sent: SentMessage) -> None:
    if sent.kind in {DELAY, TIMER} and sent.promised:
        _check_passed(world, sent.name, sent)
    if sent.kind == HALF and "commit" not in sent.asked_for:
        world.broken.append(f"{sent.name} is delivered, nobody committed it")
    if sent.kind == TIMER and sent.recalled:
        world.broken.append(f"{sent.name} is delivered, it was recalled")


def _check_passed(world: MessagingWorld, name: str, what: SentMessage | Return) -> None:
    """Check the delay from the store time; if the clock was set back meanwhile, from an earlier one."""
    passed_ms = (world.clock.monotonic() - what.sent_at) * 1000
    until = what.answered_at or world.clock.monotonic()
    due = min(what.sent_ms, world.lowest_between(what.sent_at, until)) + what.wait_ms
    if passed_ms + ROUNDING_MS < what.wait_ms and world.highest_since(what.sent_at) + ROUNDING_MS < due:
        world.broken.append(f"{name} is delivered {due - world.clock.now_ms()} ms before its time")


def _check_return(world: MessagingWorld, sent: SentMessage, physical: int) -> None:
    """Check a redelivered popped message; its copy may have been appended before it was acknowledged.

    A group that was reset gets it again, also after a pop whose answer was lost and whose invisible time has passed.
    """
    pops = world.model.pops_of(sent)
    place = (sent.topic, sent.queue, sent.offset)
    if any(place in places for places in (world.model.owed, *world.model.setting_back)):
        return
    if sent.seen == 1 and len(pops) == 1 and pops[0].acked and physical >= pops[0].acked_reached:
        world.broken.append(f"{sent.name} comes back though it was acknowledged in time")


def check_tasks(world: MessagingWorld) -> None:
    """Check that ended tasks are reported, and that none ends without a fault of the disk."""
    controller = world.server.controller
    if not controller.life.accepting:
        return
    alive = {task.get_name() for task in controller.runtime.supervisor._tasks if not task.done()}
    troubles = world.server.loop.ask(controller.health.troubles)
    told = {f"broker/{trouble.task}" for trouble in troubles}
    assert world.tasks <= alive | told, f"dead, and the broker says it is well: {sorted(world.tasks - alive - told)}"
    if not world.faults.met:
        failed = {**controller.faults.counts, **controller.runtime.supervisor.failures}
        if world.foreign:  # Undeliverable messages of the foreign master are dropped and counted.
            failed = {name: count for name, count in failed.items() if name not in DROPPED}
        assert not troubles and not failed, f"nothing is wrong, and yet: {troubles}, {failed}"


def check(world: MessagingWorld, *, at_rest: bool = False) -> None:
    foreign.check(world)
    store = world.server.controller.store
    copies: dict[str, list[Copy]] = {}
    for topic, queues in store.queues.names().items():
        if topic in TARGETS or topic in HOLDS.values() or topic in {RETRY, AGAIN, DEAD}:
            for queue in queues:
                for record in _records(world, topic, queue):
                    name = record.body.partition(b":")[0].decode("latin-1")
                    copies.setdefault(name, []).append(Copy(topic, queue, record.queue_offset, bytes(record.body)))
    ends = {(POPPED, queue): store.queues.max_offset(POPPED, queue) for queue in store.queues.names().get(POPPED, [])}
    world.model.owed = {place for place in world.model.owed if place[2] < ends.get(place[:2], 0)}
    for told in copies.values() if at_rest else ():
        # One that was popped in a lost answer was redelivered through the retry topic.
        owed = [copy[:3] for copy in told if copy[:3] in world.model.owed]
        assert not owed or any(copy.topic == RETRY for copy in told), f"set back, and these never came again: {owed}"
    for sent in world.model.sent.values():
        _check_message(world, sent, copies.get(sent.name, []), at_rest=at_rest)
    for name, back in world.model.returns.items():
        _check_back(name, back, [copy.topic for copy in copies.get(name, [])], at_rest=at_rest)


def _check_back(name: str, back: Return, topics: list[str], *, at_rest: bool) -> None:
    again, dead = topics.count(AGAIN), topics.count(DEAD)
    state = f"{name} was sent back, level {back.level}, promised: {back.promised}, {back.ends} ends since: {topics}"
    if back.level < 0:
        assert not again, state
        assert dead == 1 if back.promised else dead <= 1, state
    else:
        assert not dead, state
        assert again <= 1 + back.ends, state
        assert again or not (at_rest and back.promised), state


def _check_message(world: MessagingWorld, sent: SentMessage, copies: list[Copy], *, at_rest: bool) -> None:
    home = HOLDS.get(sent.kind, sent.topic)
    stored = [copy for copy in copies if copy.topic == home]
    delivered = [copy for copy in copies if copy.topic == sent.topic]
    state = f"{_said(sent)}; copies {[copy[:3] for copy in copies]}"
    for copy in copies:
        assert copy.body == sent.body, f"{sent.name} is not what was sent: {state}"
    if sent.kind == TIMER and delivered and not stored:
        return  # Its time had passed when it arrived.
    if sent.promised:
        assert any(copy.offset == sent.offset for copy in stored), f"{sent.name} is lost: {state}"
    if sent.kind != TIMER:
        assert len(stored) <= 1, f"{sent.name} is stored twice: {state}"
    if sent.kind in {DELAY, TIMER}:
        assert len(delivered) <= 1 + sent.ends, f"{sent.name} is delivered too often: {state}"
        _check_waits(world, sent, delivered, state, at_rest=at_rest)
    if sent.kind == HALF:
        _check_transaction(world, sent, delivered, state, at_rest=at_rest)
    if at_rest and delivered and sent.topic == POPPED:
        _check_handed_out(world, [copy for copy in copies if copy.topic in {POPPED, RETRY}], state)


def _check_waits(world: MessagingWorld, sent: SentMessage, delivered: list[Copy], state: str, *, at_rest: bool) -> None:
    if not sent.promised or delivered:
        return
    if at_rest:
        assert sent.recall_sent, f"{sent.name} is never delivered: {state}"
    elif sent.kind == DELAY:
        position, _ = world.server.controller.schedule.position(sent.level)
        assert sent.offset is not None
        assert position <= sent.offset, f"{sent.name} is passed over, the level stands at {position}: {state}"


def _check_transaction(
    world: MessagingWorld, sent: SentMessage, delivered: list[Copy], state: str, *, at_rest: bool
) -> None:
    assert len(delivered) <= 1, f"{sent.name} is delivered twice: {state}"
    if delivered:
        assert "commit" in sent.asked_for, f"{sent.name} is delivered, nobody committed it: {state}"
    if sent.outcome == "commit":
        assert delivered, f"{sent.name} was committed and is nowhere: {state}"
    waits = sent.promised and world.server.controller.transactions.find(sent.offset or 0) is not None
    if sent.promised and not waits:
        assert sent.asked_for, f"{sent.name} is forgotten: {state}"
        assert delivered or "rollback" in sent.asked_for, f"{sent.name} is ended and nowhere: {state}"
    assert not (waits and at_rest), f"{sent.name} can't be ended: {state}"


def _check_handed_out(world: MessagingWorld, copies: list[Copy], state: str) -> None:
    """Check that each copy was popped, or redelivered after a pop with a lost answer, and acknowledged at the end."""
    last = max((copy.offset for copy in copies if copy.topic == RETRY), default=-1)
    for copy in copies:
        its = world.model.popped.get((copy.topic, copy.queue, copy.offset))
        comes_again = last >= 0 and (copy.topic == POPPED or copy.offset < last)
        assert comes_again or (its is not None and its.ack_sent), f"{copy[:3]} does not come (again): {state}"


def check_offsets(world: MessagingWorld, *, clean: bool) -> None:
    """Check the offsets after a start: the committed ones, or those of a few save periods ago."""
    context, now = world.server.controller, world.clock.monotonic()
    periods = 2 * world.config.flush_consumer_offset_interval / 1000 + SAVING_S
    for key, told in world.model.offsets.history.items():
        group, topic, queue = key
        found, end = context.offsets.query(group, topic, queue), context.store.queues.max_offset(topic, queue)
        if clean:
            assert found == told[-1][1], f"{key}: committed {told[-1][1]}, after a clean stop it is {found}"
        allowed = {offset for _, offset in told} | {-1}
        if not world.disturbed:
            allowed = world.model.offsets.since(key, world.ended_at - periods)
            allowed |= {-1} if told[0][0] > world.ended_at - periods else set()
        assert found in {*allowed, end}, f"{key}: {found} was not what the group committed of late: {told}"
        assert found <= end, f"{key}: {found} is above the queue's end"
        world.model.offsets.found(key, found, now)


def check_lateness(world: MessagingWorld) -> None:
    """Check that delays are exact if no fault occurred and no clock was set meanwhile."""
    now = world.clock.monotonic()
    for sent in world.model.of(DELAY, TIMER):
        if sent.promised and not sent.seen and not sent.recall_sent and sent.sent_at > world.calm_since:
            late = now - sent.sent_at - sent.wait_ms / 1000
            assert late < LATE_S, f"{sent.name} is {late:.1f} s late: {_said(sent)}"


def _records(world: MessagingWorld, topic: str, queue: int) -> list[MessageRecord]:
    """Return all records of a queue."""
    store = world.server.controller.store
    found = []
    offset, end = store.queues.min_offset(topic, queue), store.queues.max_offset(topic, queue)
    while offset < end:
        result = store.reader.get(topic, queue, offset, 64, 1 << 22)
        assert result.status == "FOUND", f"{topic}/{queue}/{offset}: {result.status}, the queue ends at {end}"
        for buffer in result.buffers:
            for record in iter_records(buffer):
                assert record.queue_offset == offset, f"{topic}/{queue}: {record.queue_offset} where {offset} belongs"
                found.append(record)
                offset += 1
    return found


def _said(sent: SentMessage) -> str:
    return str({name: getattr(sent, name) for name in SentMessage.__slots__ if name != "body"})
