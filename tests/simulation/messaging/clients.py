"""Client actions over the wire, and what the clients learn from the answers."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import msgspec

from broker.waiting.half_messages import COMMIT, ROLLBACK
from broker.waiting.timer_message import DELIVER_MS
from neve.record.codec import iter_records
from neve.record.ids import parse_offset_msg_id
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.names import RETRY_V1, real_topic
from tests.simulation.messaging.model import (
    DELAY,
    HALF,
    PLAIN,
    TIMER,
    Flight,
    Place,
    PopDeliveries,
    Return,
    SentMessage,
)

if TYPE_CHECKING:
    from tests.simulation.messaging.world import MessagingWorld

BROKER = "b"
PRODUCERS, READERS, WORKERS = "producers", "readers", "workers"
POPPED = "jobs"
LONGEST_TIMER_MS = 12_000
LEVELS = (1000, 2000, 5000)
INVISIBLE = (500, 3000, 20_000)
DRAIN_ROUNDS = 200


def greet(world: MessagingWorld) -> None:
    """Send a heartbeat; from now on the broker can check back transactions with the producer."""
    body = msgspec.json.encode(
        {
            "clientID": "c1",
            "producerDataSet": [{"groupName": PRODUCERS}],
            "consumerDataSet": [
                {
                    "groupName": READERS, "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING",
                    "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET", "subscriptionDataSet": [], "unitMode": False,
                }
            ],
        }
    )  # fmt: skip
    world.client.ask(Code.HEART_BEAT, lambda answer: None, body)


def create_group(world: MessagingWorld) -> None:
    """Create the pop group like an administrator; the answer arrives once the group is on the disk."""
    body = msgspec.json.encode({"groupName": WORKERS, "retryQueueNums": 1})
    world.client.ask(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, lambda answer: world.tell(f"  {answer.code}"), body)


# ---- sends


def send_plain(world: MessagingWorld) -> None:
    for _ in range(world.random.choice((1, 1, 2, 5))):
        _send(world, PLAIN, {})


def send_delayed(world: MessagingWorld) -> None:
    level = world.random.randrange(1, 4)
    _send(world, DELAY, {"DELAY": str(level)}, wait_ms=LEVELS[level - 1], level=level)


def send_timer(world: MessagingWorld) -> None:
    wait = world.random.choice((300, 1500, 4000, LONGEST_TIMER_MS))
    _send(world, TIMER, {DELIVER_MS: str(world.clock.now_ms() + wait)}, wait_ms=wait)


def send_half(world: MessagingWorld) -> None:
    _send(world, HALF, {"TRAN_MSG": "true", "PGROUP": PRODUCERS})


def _send(world: MessagingWorld, kind: str, properties: dict[str, str], *, wait_ms: int = 0, level: int = 0) -> None:
    model, pick = world.model, world.random
    name = f"m{len(model.sent) + 1}"
    topic, queue = pick.choice(("orders", POPPED)), pick.randrange(2)
    body = f"{name}:".encode() + bytes(pick.choice((0, 10, 300, 3000)))
    sent = SentMessage(
        name, kind, topic, queue, body, world.clock.now_ms(), world.clock.monotonic(), wait_ms=wait_ms, level=level
    )
    model.sent[name] = sent
    properties = {"UNIQ_KEY": name.upper().rjust(32, "0"), **properties}
    world.tell(f"send {name} {kind} to {topic}/{queue}")
    world.client.ask(
        Code.SEND_MESSAGE_V2, lambda answer: _stored(world, sent, answer), body,
        a=PRODUCERS, b=topic, c="TBW102", d=2, e=queue, f=4 if kind == HALF else 0, g=sent.sent_ms, h=0,
        i="".join(f"{key}\x01{value}\x02" for key, value in properties.items()), j=0, k="false", m="false",
    )  # fmt: skip


def _stored(world: MessagingWorld, sent: SentMessage, answer: RemotingCommand) -> None:
    world.tell(f"  {sent.name}: {answer.code} {answer.ext.get('queueOffset', answer.remark)}")
    if answer.code == ResponseCode.SUCCESS:
        sent.offset, sent.reached = int(answer.ext["queueOffset"]), _promised_end(world)
        sent.physical = parse_offset_msg_id(answer.ext["msgId"])[2]
        if world.config.sync_flush and sent.physical >= sent.reached:
            world.broken.append(f"{sent.name} is acknowledged, and no sync has covered it")
        sent.answered_at = world.clock.monotonic()
    elif answer.code not in {ResponseCode.FLUSH_DISK_TIMEOUT}:
        sent.refused = True


def _promised_end(world: MessagingWorld) -> int:
    """Return the log position that an answer promises: with SYNC_FLUSH it is on the disk."""
    store = world.server.controller.store
    return store.visibility.flushed if world.config.sync_flush else store.max_physical_offset


def recall(world: MessagingWorld) -> None:
    """Recall a pending timer message; the handle is the one that the broker would have returned."""
    waiting = [
        sent for sent in world.model.of(TIMER)
        if sent.promised and not sent.recall_sent and sent.sent_ms + sent.wait_ms > world.clock.now_ms()
    ]  # fmt: skip
    if not waiting:
        return
    sent = world.random.choice(waiting)
    sent.recall_sent = True
    when = sent.sent_ms + sent.wait_ms
    key = sent.name.upper().rjust(32, "0")
    handle = base64.urlsafe_b64encode(f"v1 {sent.topic} {BROKER} {when + 1} {key}".encode()).decode()
    world.tell(f"recall {sent.name}")
    world.client.ask(
        Code.RECALL_MESSAGE, lambda answer: _recalled(world, sent, answer), topic=sent.topic, recallHandle=handle,
        producerGroup=PRODUCERS,
    )  # fmt: skip


def _recalled(world: MessagingWorld, sent: SentMessage, answer: RemotingCommand) -> None:
    world.tell(f"  recall of {sent.name}: {answer.code} {answer.remark}")
    if answer.code == ResponseCode.SUCCESS and not sent.seen:
        sent.recalled, sent.recall_reached = True, _promised_end(world)


# ---- transactions


def end_half(world: MessagingWorld) -> None:
    waiting = [sent for sent in world.model.of(HALF) if sent.promised and not sent.outcome]
    if waiting:
        _end(world, world.random.choice(waiting), world.random.choice(("commit", "commit", "rollback")))


def asked(world: MessagingWorld, question: RemotingCommand) -> None:
    """Answer a check-back of the broker; some producers do not answer."""
    if question.code != Code.CHECK_TRANSACTION_STATE:
        return
    sent = world.model.sent.get(bytes(question.body).partition(b":")[0].decode("latin-1").rpartition("\0")[2])
    name = next((s for s in world.model.of(HALF) if s.offset == int(question.ext["tranStateTableOffset"])), sent)
    world.counts["asked about a transaction"] += 1
    if name is not None and world.random.random() < 0.5:
        _end(world, name, world.random.choice(("commit", "rollback")))


def _end(world: MessagingWorld, sent: SentMessage, outcome: str) -> None:
    world.tell(f"{outcome} {sent.name}")
    if sent.asked_for and outcome not in sent.asked_for:
        outcome = next(iter(sent.asked_for))  # A producer does not change its decision.
    sent.asked_for.add(outcome)
    world.client.ask(
        Code.END_TRANSACTION, lambda answer: _ended(world, sent, outcome, answer), producerGroup=PRODUCERS,
        tranStateTableOffset=sent.offset, commitLogOffset=sent.physical,
        commitOrRollback=COMMIT if outcome == "commit" else ROLLBACK, fromTransactionCheck="true", msgId=sent.name,
        transactionId=sent.name,
    )  # fmt: skip


def _ended(world: MessagingWorld, sent: SentMessage, outcome: str, answer: RemotingCommand) -> None:
    world.tell(f"  {outcome} of {sent.name}: {answer.code} {answer.remark}")
    if answer.code == ResponseCode.SUCCESS:
        sent.outcome, sent.outcome_reached = outcome, _promised_end(world)


def end_all_halves(world: MessagingWorld) -> None:
    """End all pending half messages, which shows that none was forgotten."""
    for sent in world.model.of(HALF):
        if sent.promised and not sent.outcome:
            outcome = next(iter(sent.asked_for), "commit")
            sent.asked_for.add(outcome)
            _end(world, sent, outcome)


# ---- pop


def pop(world: MessagingWorld, invisible: int | None = None) -> None:
    invisible = invisible or world.random.choice(INVISIBLE)
    if world.server.controller.topics.select(POPPED) is None:
        return
    world.tell(f"pop, invisible for {invisible} ms")
    set_backs = world.model.set_backs
    world.client.ask(
        Code.POP_MESSAGE, lambda answer: _popped(world, answer, set_backs), consumerGroup=WORKERS, topic=POPPED,
        queueId=-1, maxMsgNums=world.random.choice((1, 4, 32)), invisibleTime=invisible, pollTime=0, bornTime=0,
        initMode=0, order="false",
    )  # fmt: skip


def _popped(world: MessagingWorld, answer: RemotingCommand, set_backs: int) -> None:
    """Record popped messages; those requested before the group was reset may no longer be in flight."""
    if answer.code != ResponseCode.SUCCESS:
        world.tell(f"  pop: {answer.code} {answer.remark}")
        return
    pop_time, invisible = int(answer.ext["popTime"]), int(answer.ext["invisibleTime"])
    starts: dict[tuple[str, int], int] = {}
    for part in answer.ext["startOffsetInfo"].split(";"):
        kind, number, start = part.split(" ")
        starts[kind, int(number)] = int(start)
    for record in iter_records(answer.body):
        world.counts["popped"] += 1
        sent = world.model.sent[record.body.partition(b":")[0].decode()]
        handle = record.properties.get("POP_CK")
        if handle is None:
            retry, place = "0", (POPPED, record.queue_id, record.queue_offset)
            begin, queue = starts["0", record.queue_id], record.queue_id
            handle = f"{begin} {pop_time} {invisible} 0 0 {BROKER} {queue} {record.queue_offset}"
        else:
            retry = "1"
            place = (real_topic(POPPED, WORKERS, RETRY_V1), int(handle.split(" ")[6]), int(handle.split(" ")[7]))
        sure = set_backs == world.model.set_backs
        _taken(world, sent, Flight(sent, place, pop_time, invisible, _reached(world), handle, retry, sure))


def _taken(world: MessagingWorld, sent: SentMessage, flight: Flight) -> None:
    world.tell(f"  popped {sent.name} at {flight.place}")
    before = world.model.popped.get(flight.place)
    if before is not None:
        if before.acked:
            world.broken.append(f"{sent.name} at {flight.place} comes again, it was acknowledged in time")
        if before.flight.sure and not _may_be_over(world, before.flight):
            world.broken.append(f"{sent.name} at {flight.place} is handed out twice: {before.flight}")
    world.model.taken(PopDeliveries(flight))


def _reached(world: MessagingWorld) -> int:
    return world.server.controller.store.max_physical_offset


def _may_be_over(world: MessagingWorld, flight: Flight) -> bool:
    """Return whether the broker may answer that the invisible time has passed."""
    return max(world.clock.now_ms(), world.clock.highest_ms) >= flight.pop_time + flight.invisible_ms


def _out(world: MessagingWorld) -> list[Flight]:
    return [popped.flight for popped in world.model.popped.values() if not popped.ack_sent]


def ack(world: MessagingWorld) -> None:
    for flight in _out(world)[: world.random.choice((1, 3, 10))]:
        _ack(world, flight)


def _ack(world: MessagingWorld, flight: Flight) -> None:
    topic, queue, offset = flight.place
    its = world.model.popped.get(flight.place)
    if its is None:
        return
    its.ack_sent = True
    world.tell(f"ack {flight.sent.name}")
    world.client.ask(
        Code.ACK_MESSAGE, lambda answer: _acked(world, flight, answer), consumerGroup=WORKERS, topic=topic,
        queueId=queue, offset=offset, extraInfo=flight.handle,
    )  # fmt: skip


def _acked(world: MessagingWorld, flight: Flight, answer: RemotingCommand) -> None:
    world.tell(f"  ack of {flight.sent.name}: {answer.code} {answer.remark}")
    popped = world.model.popped.get(flight.place)
    if popped is None:
        return  # Reset in the meantime.
    if answer.code != ResponseCode.SUCCESS:
        popped.ack_sent = False
    elif flight.sure and popped.flight is flight and not _may_be_over(world, flight):
        popped.acked, popped.acked_reached = True, _reached(world)


def hide(world: MessagingWorld) -> None:
    """Change the invisible time of a popped message."""
    out = [flight for flight in _out(world) if flight.sure]
    if not out:
        return
    flight, invisible = world.random.choice(out), world.random.choice((200, 5000))
    flight.sure = False
    topic, queue, offset = flight.place
    world.tell(f"hide {flight.sent.name} for {invisible} ms")
    world.client.ask(
        Code.CHANGE_MESSAGE_INVISIBLETIME, lambda answer: _hidden(world, flight, answer), consumerGroup=WORKERS,
        topic=topic, queueId=queue, offset=offset, extraInfo=flight.handle, invisibleTime=invisible,
    )  # fmt: skip


def _hidden(world: MessagingWorld, flight: Flight, answer: RemotingCommand) -> None:
    if answer.code != ResponseCode.SUCCESS:
        world.tell(f"  hide of {flight.sent.name}: {answer.code} {answer.remark}")
        return
    popped, ext = world.model.popped.get(flight.place), answer.ext
    if popped is not None and popped.flight is flight:
        parts = flight.handle.split(" ")
        popped.flight = Flight(
            flight.sent, flight.place, int(ext["popTime"]), int(ext["invisibleTime"]), _reached(world),
            " ".join([parts[0], ext["popTime"], ext["invisibleTime"], *parts[3:]]), flight.retry, sure=False,
        )  # fmt: skip


def set_back(world: MessagingWorld) -> None:
    """Reset the group to the beginning of a queue: all messages are redelivered, those in flight are forgotten."""
    context, queue = world.server.controller, world.random.randrange(2)
    if context.topics.select(POPPED) is None or WORKERS not in context.groups.groups:
        return
    world.tell(f"{WORKERS} is set back in {POPPED}/{queue}")
    for place, popped in world.model.popped.items():
        if place[:2] == (POPPED, queue):  # From now on the reset may have happened.
            popped.flight.sure, popped.acked = False, False
    places = {(POPPED, queue, offset) for offset in range(context.store.queues.max_offset(POPPED, queue))}
    world.model.setting_back.append(places)
    world.model.set_backs += 1
    world.client.ask(
        Code.INVOKE_BROKER_TO_RESET_OFFSET, lambda answer: _was_set_back(world, places, answer), group=WORKERS,
        topic=POPPED, queueId=queue, offset=0, timestamp=0, isForce="true",
    )  # fmt: skip


def _was_set_back(world: MessagingWorld, places: set[Place], answer: RemotingCommand) -> None:
    world.tell(f"  set back: {answer.code} {answer.remark}")
    world.model.setting_back.remove(places)
    if answer.code == ResponseCode.SUCCESS:
        for place in places:  # Except those that were delivered already.
            world.model.popped.pop(place, None)
        world.model.owed |= places


def pull(world: MessagingWorld) -> None:
    """Pull with a short wait; the result must equal the content of the queue from that offset on."""
    topic, queue = "orders", world.random.randrange(2)
    store = world.server.controller.store
    if world.server.controller.topics.select(topic) is None:
        return
    offset = world.random.randrange(store.queues.max_offset(topic, queue) + 1)
    world.tell(f"pull {topic}/{queue}/{offset}")

    def answered(answer: RemotingCommand) -> None:
        if answer.code == ResponseCode.SUCCESS:
            found = [record.queue_offset for record in iter_records(answer.body)]
            if found != list(range(offset, offset + len(found))):
                world.broken.append(f"a pull of {topic}/{queue}/{offset} finds {found}")

    world.client.ask(
        Code.PULL_MESSAGE, answered, consumerGroup=READERS, topic=topic, queueId=queue, queueOffset=offset,
        maxMsgNums=8, sysFlag=6, commitOffset=0, suspendTimeoutMillis=2000, subscription="*", subVersion=0,
        expressionType="TAG",
    )  # fmt: skip


def drain(world: MessagingWorld) -> None:
    """Consume and acknowledge all messages.

    An empty pop ends this only if no message was in flight before it and the log has no unconfirmed ones: a redelivered
    message is appended without a sender, and no sync is made for it alone.
    """
    for _ in range(DRAIN_ROUNDS):
        found, was_settled = world.counts["popped"], _is_settled(world)
        pop(world, invisible=20_000)
        world._rest(0.01)
        for flight in _out(world):
            _ack(world, flight)
        world._rest(0.01)
        if world.counts["popped"] == found:
            if was_settled:
                return
            world._rest(2.0)


def _is_settled(world: MessagingWorld) -> bool:
    """Return whether no message is on its way to a popping client."""
    controller = world.server.controller
    store = controller.store
    is_out = any(queue.flights for queue in controller.pops.queues.values())
    return not is_out and store.visibility.confirmed == store.max_physical_offset


# ---- messages that a consumer sends back


def send_back(world: MessagingWorld) -> None:
    model, pick = world.model, world.random
    there = [sent for sent in model.of(PLAIN) if sent.promised and sent.topic == "orders"]
    there = [sent for sent in there if sent.name not in model.returns]
    if not there:
        return
    sent, level = pick.choice(there), pick.choice((-1, 1, 2, 3))
    wait = 0 if level < 0 else LEVELS[level - 1]
    back = model.returns[sent.name] = Return(sent, level, wait, world.clock.now_ms(), world.clock.monotonic())
    world.tell(f"{READERS} sends {sent.name} back, level {level}")

    def answered(answer: RemotingCommand) -> None:
        world.tell(f"  {sent.name} is sent back: {answer.code} {answer.remark}")
        if answer.code == ResponseCode.SUCCESS:
            back.answered_at = world.clock.monotonic()
            back.promised, back.reached = True, _reached(world)  # Answered before the sync, as in RocketMQ.

    world.client.ask(
        Code.CONSUMER_SEND_MSG_BACK, answered, group=READERS, offset=sent.physical, delayLevel=level,
        originTopic=sent.topic, originMsgId=sent.name, maxReconsumeTimes=16,
    )  # fmt: skip


# ---- offsets


def commit_offset(world: MessagingWorld) -> None:
    topic, queue = "orders", world.random.randrange(2)
    end = world.server.controller.store.queues.max_offset(topic, queue)
    if world.server.controller.topics.select(topic) is None or not end:
        return
    offset = world.random.randrange(end + 1)
    world.tell(f"{READERS} commits {topic}/{queue}/{offset}")

    def answered(answer: RemotingCommand) -> None:
        if answer.code == ResponseCode.SUCCESS:
            world.model.offsets.committed(READERS, topic, queue, offset, world.clock.monotonic())
        else:
            world.tell(f"  refused: {answer.remark}")

    world.client.ask(
        Code.UPDATE_CONSUMER_OFFSET, answered, consumerGroup=READERS, topic=topic, queueId=queue, commitOffset=offset
    )
