"""A master's session: which slaves it admits, what it sends, and where it divides transfers."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from broker.ha.epochs import EpochCache
from broker.ha.frames import (
    Hello,
    MasterHandshake,
    SlaveHandshake,
    Transfer,
    encode_ack,
    encode_hello,
    encode_slave_handshake,
)
from broker.ha.master_session import (
    CONFIRM_EVERY_S,
    FAR_BEHIND,
    GREETING_S,
    HEARTBEAT_S,
    SILENCE_S,
    TURN_BYTES,
    End,
    Reported,
    Send,
    SlaveConnected,
)
from tests.kit.broker.byte_log import ByteLog, record
from tests.kit.broker.ha_master import A, B, MasterEnd, frames, refused, transfers
from tests.kit.broker.ha_session import hello

# -- admission


def test_slave_gets_a_hello_a_handshake_and_the_stream() -> None:
    master = MasterEnd()
    master.log.append(record(1))
    (answer,) = frames(master.greet())
    assert isinstance(answer, Hello)
    assert (answer.answers, answer.nonce, answer.eviction_frontier) == ("n2", "n1", 7)
    assert frames(master.shake()) == [MasterHandshake(10, 3, ((3, 0),))]
    assert master.session.receive_data(encode_ack(0, 0), 0.0) == [SlaveConnected(B, False, hello()), Reported(0, 0)]
    assert master.sends() == [Transfer(0, 3, 0, 0, memoryview(record(1)))]
    assert master.session.receive_data(encode_ack(4, 2) + encode_ack(10, 4), 0.0) == [Reported(10, 4)]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"cluster": "staging"}, "another-cluster"),
        ({"broker_set": "x"}, "another-broker-set"),
        ({"member_id": A}, "no-member"),
        ({"member_id": 9}, "no-member"),
        ({"format": 4}, "another-format"),
        ({"mapped_file_size_commit_log": 1 << 30}, "unequal-file-size"),
        ({"message_delay_level": "1s"}, "unequal-delay-levels"),
        ({"master_epoch": 2}, "another-master-epoch"),
        ({"master_epoch": 4}, "another-master-epoch"),
    ],
)
def test_stranger_gets_a_refusal_with_its_reason(other: dict[str, object], reason: str) -> None:
    master = MasterEnd()
    assert refused(master.greet(replace(hello(), **other))) == (reason, True)
    assert master.shake() == []


def test_stock_member_is_admitted_only_if_configured() -> None:
    assert refused(MasterEnd().shake()) == ("stock-members-not-admitted", False)
    master = MasterEnd(admits_stock=True)
    assert frames(master.shake()) == [MasterHandshake(0, 3, ((3, 0),))]
    assert master.session.receive_data(encode_ack(0), 0.0) == [SlaveConnected(B, False, None), Reported(0, -1)]


def test_stock_member_of_another_set_is_refused() -> None:
    master = MasterEnd(admits_stock=True)
    data = encode_slave_handshake(SlaveHandshake(9))
    assert refused(master.session.receive_data(data, 0.0)) == ("no-member", False)


def test_learner_flag_of_the_handshake_is_reported() -> None:
    master = MasterEnd()
    master.greet()
    master.shake(is_learner=True)
    assert master.session.receive_data(encode_ack(0, 0), 0.0)[0] == SlaveConnected(B, True, hello())


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", encode_ack(5), encode_hello(hello()) * 2])
def test_unexpected_frame_ends_the_session(data: bytes) -> None:
    master = MasterEnd()
    (*_, end) = master.session.receive_data(data, 0.0)
    assert isinstance(end, End)
    assert master.session.receive_data(encode_hello(hello()), 0.0) == []


def test_handshake_with_another_members_id_ends_the_session() -> None:
    master = MasterEnd()
    master.greet()
    (end,) = master.session.receive_data(encode_slave_handshake(SlaveHandshake(3)), 0.0)
    assert isinstance(end, End)


def test_silent_connection_ends_after_the_greeting_timeout() -> None:
    master = MasterEnd()
    assert master.session.wake_at == GREETING_S
    master.greet()
    assert master.session.tick(GREETING_S - 0.1) == []
    (end,) = master.session.tick(GREETING_S)
    assert isinstance(end, End)


# -- start offset


@pytest.mark.parametrize(
    ("at", "reason"), [(90, "begins-below-the-log"), (131, "ends-above-the-log"), (100, "log-without-epochs")]
)
def test_request_for_an_unavailable_offset_is_refused_with_its_reason(at: int, reason: str) -> None:
    master = MasterEnd(ByteLog(begin=100), EpochCache([(3, 110)]))
    for _ in range(3):
        master.log.append(record(1))
    master.greet()
    master.shake()
    assert refused(master.session.receive_data(encode_ack(at, 0), 0.0)) == (reason, True)


def test_slave_below_the_log_begin_gets_the_reason_and_the_remedy() -> None:
    master = MasterEnd(ByteLog(begin=100))
    master.greet()
    master.shake()
    told, *_ = master.session.receive_data(encode_ack(90, 0), 0.0)
    assert isinstance(told, Send)
    assert b"begins at 100: it was away for too long: let it rejoin as a new member, with an empty data directory" in (
        b"".join(told.data)
    )


def test_request_for_offset_zero_starts_at_the_log_begin() -> None:
    master = MasterEnd(ByteLog(begin=100))
    master.log.append(record(1))
    master.begin(0)
    assert [frame.offset for frame in master.sends()] == [100]


def test_slave_that_asks_for_the_newest_file_starts_there() -> None:
    master = MasterEnd(ByteLog(file_size=32))
    for _ in range(5):
        master.log.append(record(1))
    master.greet()
    master.shake(from_last_file=True)
    master.session.receive_data(encode_ack(0, 0), 0.0)
    assert [frame.offset for frame in master.sends()] == [32]


# -- transfers


def filled(count: int, **log: int) -> ByteLog:
    made = ByteLog(**log)
    for number in range(count):
        made.append(record(number % 250 + 1))
    return made


def test_transfer_is_at_most_as_long_as_the_batch() -> None:
    master = MasterEnd(filled(10), batch=32)
    master.begin()
    got = master.sends()
    assert [len(frame.body) for frame in got] == [32, 32, 32, 4]
    assert b"".join(bytes(frame.body) for frame in got) == master.log.content()


def test_transfer_ends_at_an_epochs_end_and_names_its_epoch() -> None:
    master = MasterEnd(filled(4), EpochCache([(1, 0), (2, 25), (3, 30)]))
    master.begin()
    assert [(frame.offset, len(frame.body), frame.epoch, frame.epoch_start) for frame in master.sends()] == [
        (0, 25, 1, 0),
        (25, 5, 2, 25),
        (30, 10, 3, 30),
    ]


def test_padding_is_not_sent_to_a_neve_member() -> None:
    master = MasterEnd(filled(5, file_size=64, begin=0))
    master.log.append(record(9, 40))
    assert master.log.used == {0: 51}
    master.begin()
    assert [(frame.offset, len(frame.body)) for frame in master.sends()] == [(0, 51), (64, 40)]
    assert not master.session.has_more


def test_stock_member_gets_padding_and_no_transfer_across_files() -> None:
    master = MasterEnd(filled(5, file_size=64), admits_stock=True)
    master.log.append(record(9, 40))
    master.begin(stock=True)
    got = master.sends()
    assert [(frame.offset, len(frame.body)) for frame in got] == [(0, 64), (64, 40)]
    assert b"".join(bytes(frame.body) for frame in got) == master.log.content()


def test_epoch_that_begins_behind_padding_is_sent() -> None:
    master = MasterEnd(filled(5, file_size=64), EpochCache([(1, 0), (3, 64)]))
    master.log.append(record(9, 40))
    master.begin()
    assert [(frame.offset, frame.epoch) for frame in master.sends()] == [(0, 1), (64, 3)]


def test_one_turn_sends_at_most_its_share() -> None:
    log = ByteLog(file_size=1 << 30)
    for _ in range(2 * TURN_BYTES // 60000 + 1):
        log.append(record(1, 60000))
    master = MasterEnd(log)
    master.begin()
    assert sum(len(frame.body) for frame in master.sends()) == TURN_BYTES
    assert master.session.has_more


def test_slave_that_is_far_behind_gets_the_catch_up_rate() -> None:
    log = ByteLog(file_size=1 << 30)
    log.data += b"\x01" * (FAR_BEHIND + 4 * TURN_BYTES)
    master = MasterEnd(log, rate=TURN_BYTES)
    master.begin()
    session = master.session
    assert sum(len(frame.body) for frame in master.sends(0.0)) == TURN_BYTES
    assert master.sends(0.0) == []
    assert session.may_send_at(0.0) == 1.0
    assert sum(len(frame.body) for frame in master.sends(0.5)) == TURN_BYTES // 2
    for second in range(1, 10):
        master.sends(float(second))
    assert not session.is_far_behind
    assert session.may_send_at(10.0) == 10.0, "who is near the end is not held back"


def test_nothing_is_sent_before_a_start_offset_is_requested() -> None:
    master = MasterEnd(filled(3))
    master.greet()
    master.shake()
    assert (master.session.has_more, master.sends()) == (False, [])


# -- heartbeats and the confirmed offset


def test_each_transfer_carries_the_confirmed_offset() -> None:
    master = MasterEnd(filled(2))
    master.confirm = 10
    master.begin()
    assert [frame.confirm for frame in master.sends()] == [10]


def test_idle_stream_sends_a_heartbeat_every_five_seconds() -> None:
    master = MasterEnd(filled(2))
    master.begin(20)
    beat = [Transfer(20, 3, 0, 0, memoryview(b""))]
    assert transfers(master.session.tick(1.0)) == beat, "it does not know yet what is confirmed"
    assert master.session.wake_at == 1.0 + HEARTBEAT_S
    assert master.session.tick(0.9 + HEARTBEAT_S) == []
    assert transfers(master.session.tick(1.0 + HEARTBEAT_S)) == beat
    assert master.session.wake_at == 1.0 + 2 * HEARTBEAT_S


def test_confirm_without_new_bytes_is_sent_soon_and_in_batches() -> None:
    master = MasterEnd(filled(2))
    master.begin()
    assert len(master.sends(1.0)) == 1
    master.confirm = 20
    assert master.session.wake_at == 1.0 + CONFIRM_EVERY_S
    assert master.session.tick(1.05) == []
    assert [frame.confirm for frame in transfers(master.session.tick(1.1))] == [20]
    assert master.session.tick(1.2) == []


def test_heartbeat_names_the_next_epoch() -> None:
    """A slave learns of a master that has not written yet."""
    master = MasterEnd(filled(2), EpochCache([(1, 0), (3, 20)]))
    master.begin(20)
    assert [(frame.epoch, frame.epoch_start) for frame in transfers(master.session.tick(5.0))] == [(3, 20)]


def test_silent_slave_is_disconnected_after_twenty_seconds() -> None:
    master = MasterEnd()
    master.begin()
    assert not [one for one in master.session.tick(SILENCE_S - 0.1) if isinstance(one, End)]
    master.session.receive_data(encode_ack(0, 0), SILENCE_S - 0.1)
    assert not [one for one in master.session.tick(SILENCE_S) if isinstance(one, End)]
    (end,) = master.session.tick(2 * SILENCE_S)
    assert isinstance(end, End)


def test_deposed_master_sends_a_refusal_to_its_slaves() -> None:
    master = MasterEnd()
    master.begin()
    assert refused(master.session.dismiss()) == ("not-master", True)
    assert master.session.dismiss() == []


def test_stream_to_a_stock_member_ends_at_a_hole_in_the_log() -> None:
    class Holed(ByteLog):
        def log_bytes(self, start: int, end: int, limit: int, *, padding: bool = False) -> tuple[int, memoryview]:
            if start < 10:
                return super().log_bytes(start, 10, limit, padding=padding)
            return super().log_bytes(max(start, 20), end, limit, padding=padding)

    log = Holed()
    log.data += filled(3).data
    master = MasterEnd(log, admits_stock=True)
    master.begin(stock=True)
    assert [len(frame.body) for frame in master.sends()] == [10]
    assert refused(master.session.advance(0.0)) == ("begins-below-the-log", False)
    neve = MasterEnd(log)
    neve.begin()
    assert [(frame.offset, len(frame.body)) for frame in neve.sends()] == [(0, 10), (20, 10)]
