"""A slave's session: which master it follows, what it truncates, saves before it stores, and acknowledges."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from broker.config import BrokerConfig
from broker.ha.confirm import ConfirmRules, ReplicationMode
from broker.ha.frames import (
    SlaveHandshake,
    StreamRefusal,
    encode_ack,
    encode_hello,
    encode_master_handshake,
    encode_refusal,
    encode_slave_handshake,
    encode_transfer_head,
)
from broker.ha.greeting import Reason
from broker.ha.member_rules import MemberRules
from broker.ha.slave_session import (
    HEARTBEAT_S,
    SILENCE_S,
    Action,
    Append,
    Attached,
    Confirmed,
    End,
    Local,
    Send,
    SlaveSession,
    SlaveState,
    TakeEpochs,
    Truncate,
)
from tests.kit.broker.ha_session import EMPTY, A, B, hello, why


def masters_hello(**other: object) -> bytes:
    return encode_hello(replace(hello(A), **{"answers": "n2", **other}))


def t2(offset: int, body: bytes, *, epoch: int = 3, start: int = 0, confirm: int = 0) -> bytes:
    return encode_transfer_head(len(body), offset, epoch, start, confirm) + body


def plain(actions: list[Action]) -> list[Action]:
    """Return the actions with copied bodies: they are views of the received buffer."""
    return [Append(one.at, bytes(one.data)) if isinstance(one, Append) else one for one in actions]


def session(
    local: Local = EMPTY, *, stock: bool = False, master_epoch: int = 3, frontier: bool = False
) -> SlaveSession:
    made = SlaveSession(
        local,
        member_id=B,
        master_epoch=master_epoch,
        hello=None if stock else hello(master_epoch=master_epoch),
        begins_at_frontier=frontier,
    )
    made.start(0.0)
    return made


def greeted(local: Local = EMPTY, *, frontier: bool = False, **other: object) -> SlaveSession:
    made = session(local, frontier=frontier)
    assert made.receive_data(masters_hello(**other), 0.0) == [Send(encode_slave_handshake(SlaveHandshake(B)))]
    return made


def following(local: Local = EMPTY, epochs: tuple[tuple[int, int], ...] = ((3, 0),), end: int = 0) -> SlaveSession:
    made = greeted(local)
    assert made.receive_data(encode_master_handshake(max(end, local.end), epochs), 0.0) == [Attached(3)]
    assert made.attached(local.end, 0.0) == [Send(encode_ack(local.end, local.end))]
    return made


# -- which master it follows


def test_slave_introduces_itself_first() -> None:
    made = SlaveSession(EMPTY, member_id=B, master_epoch=3, hello=hello())
    assert made.start(0.0) == [Send(encode_hello(hello()))]


def test_stock_master_gets_only_frames_that_it_knows() -> None:
    made = SlaveSession(EMPTY, member_id=B, master_epoch=3, hello=None)
    assert made.start(0.0) == [Send(encode_slave_handshake(SlaveHandshake(B)))]
    assert made.receive_data(encode_master_handshake(50, [(3, 0)]), 0.0) == [Attached(3)]
    assert made.attached(0, 0.0) == [Send(encode_ack(0))]
    assert plain(made.receive_data(t2(0, b"abc"), 0.0)) == [TakeEpochs(((3, 0),)), Append(0, b"abc")]
    assert made.stored(3, 3, 0.0) == [Send(encode_ack(3))]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"cluster": "staging"}, "another-cluster"),
        ({"broker_set": "x"}, "another-broker-set"),
        ({"member_id": B}, "no-member"),
        ({"format": 4}, "another-format"),
        ({"mapped_file_size_commit_log": 1 << 30}, "unequal-file-size"),
        ({"message_delay_level": "1s"}, "unequal-delay-levels"),
    ],
)
def test_unsuitable_master_is_refused_with_a_reason(other: dict[str, object], reason: str) -> None:
    made = session()
    assert why(made.receive_data(masters_hello(**other), 0.0)) == reason
    assert made.is_ended


def test_master_of_the_next_format_is_followed() -> None:
    greeted(format=2)


def test_master_of_another_epoch_is_not_followed() -> None:
    """Such a master is deposed without knowing it, or was elected since. The slave asks the controller again."""
    assert "epoch 2" in why(session().receive_data(masters_hello(master_epoch=2), 0.0))
    assert "epoch 4" in why(session().receive_data(masters_hello(master_epoch=4), 0.0))


def test_hello_that_answers_another_connection_is_refused() -> None:
    assert "broke the protocol" in why(session().receive_data(masters_hello(answers="n9"), 0.0))


def test_refusal_ends_the_session_at_any_time_with_its_reason() -> None:
    refusal = StreamRefusal("another-cluster", "production is not staging")
    for made in (session(), greeted(), following()):
        (end,) = made.receive_data(encode_refusal(refusal), 0.0)
        assert isinstance(end, End)
        assert end.refusal == refusal


@pytest.mark.parametrize(
    "data", [t2(0, b"abc"), encode_master_handshake(0, ()), encode_ack(5, 5), b"HTTP/1.1 400 Bad Request\r\n"]
)
def test_unexpected_frame_ends_the_session(data: bytes) -> None:
    made = session()
    assert "broke the protocol" in why(made.receive_data(data, 0.0))
    assert made.receive_data(masters_hello(), 0.0) == []


def test_master_with_an_older_log_than_the_followed_one_is_refused() -> None:
    made = greeted(Local(0, 10, ((1, 0), (4, 5)), 10, 4))
    assert "can't be the last" in why(made.receive_data(encode_master_handshake(50, [(1, 0)]), 0.0))


def test_log_of_a_later_epoch_than_the_controllers_is_refused() -> None:
    assert "can't be the last" in why(greeted().receive_data(encode_master_handshake(50, [(4, 0)]), 0.0))


# -- where the logs diverge


def test_slave_that_is_behind_requests_from_its_end() -> None:
    made = greeted(Local(0, 30, ((3, 0),), 20, 3))
    assert made.receive_data(encode_master_handshake(90, [(3, 0)]), 0.0) == [Attached(3)]
    assert made.attached(25, 0.0) == [Send(encode_ack(30, 25))]


def test_former_masters_diverged_tail_is_truncated_before_a_request() -> None:
    made = greeted(Local(0, 100, ((1, 0), (2, 50)), 60, 2))
    assert made.receive_data(encode_master_handshake(80, [(1, 0), (2, 50), (3, 70)]), 0.0) == [Truncate(70)]
    assert made.state is SlaveState.PARTING
    assert made.attached(70, 0.0) == [], "not yet"
    assert made.parted(66, ((1, 0), (2, 50))) == [Attached(3)]
    assert made.attached(66, 0.0) == [Send(encode_ack(66, 66))]
    actions = plain(made.receive_data(t2(66, b"xxxx", epoch=2, start=50) + t2(70, b"y", start=70), 0.0))
    assert actions == [Append(66, b"xxxx"), TakeEpochs(((3, 70),)), Append(70, b"y")]


def test_confirm_of_the_new_master_counts_below_a_truncation() -> None:
    """An `async` master had confirmed up to its own end.

    Otherwise no new message would be visible below that offset.
    """
    made = greeted(Local(0, 100, ((1, 0), (2, 50)), 100, 2))
    assert made.receive_data(encode_master_handshake(80, [(1, 0), (2, 50), (3, 70)]), 0.0) == [Truncate(70)]
    assert made.parted(66, ((1, 0), (2, 50))) == [Attached(3)]
    made.attached(66, 0.0)
    made.receive_data(t2(66, b"xxxx", epoch=2, start=50, confirm=68), 0.0)
    assert Confirmed(68) in made.stored(70, 70, 0.0)


def test_epoch_without_bytes_that_the_master_lacks_is_dropped() -> None:
    """It came with a heartbeat of a master that wrote nothing. The next master still uses the epoch before."""
    made = greeted(Local(0, 30, ((1, 0), (2, 30)), 30, 2))
    assert made.receive_data(encode_master_handshake(80, [(1, 0), (3, 60)]), 0.0) == [Truncate(30)]
    assert made.parted(30, ((1, 0),)) == [Attached(3)]
    made.attached(30, 0.0)
    assert plain(made.receive_data(t2(30, b"xx", epoch=1), 0.0)) == [Append(30, b"xx")]


def test_unconfirmed_tail_is_truncated_under_apache_reusing_an_epoch() -> None:
    local = Local(0, 100, ((1, 0), (2, 50)), 60, 2)
    made = session(local, stock=True)
    assert made.receive_data(encode_master_handshake(120, [(1, 0), (2, 50)]), 0.0) == [Truncate(60)]
    again = session(replace(local, followed_epoch=3), stock=True)
    assert again.receive_data(encode_master_handshake(120, [(1, 0), (2, 50)]), 0.0) == [Attached(3)]


def test_logs_without_a_common_epoch_are_not_joined() -> None:
    made = greeted(Local(0, 10, ((1, 0),), 10, 1))
    assert why(made.receive_data(encode_master_handshake(90, [(2, 5)]), 0.0)) == "nothing-in-common"


def test_log_that_diverges_below_its_own_begin_is_not_truncated() -> None:
    made = greeted(Local(80, 100, ((1, 0), (2, 40)), 60, 2))
    assert why(made.receive_data(encode_master_handshake(70, [(1, 0), (3, 50)]), 0.0)) == "nothing-in-common"


def test_log_without_epochs_follows_no_master() -> None:
    made = greeted(Local(0, 10, (), 0, 0))
    assert why(made.receive_data(encode_master_handshake(90, [(3, 0)]), 0.0)) == "log-without-epochs"


# -- a new member


def test_new_member_requests_the_whole_log() -> None:
    made = greeted()
    made.receive_data(encode_master_handshake(90, [(1, 20), (3, 50)]), 0.0)
    assert made.attached(0, 0.0) == [Send(encode_ack(0, 0))]
    assert plain(made.receive_data(t2(20, b"abc", epoch=1, start=20), 0.0)) == [
        TakeEpochs(((1, 20),)),
        Append(20, b"abc"),
    ]


def test_new_member_with_an_archive_begins_at_the_eviction_frontier() -> None:
    made = greeted(frontier=True, eviction_frontier=60)
    made.receive_data(encode_master_handshake(90, [(1, 0), (3, 50)]), 0.0)
    assert made.begins_at == 60, "its log does before it asks: what it reports it has"
    assert made.attached(0, 0.0) == [Send(encode_ack(60, 0))]
    assert plain(made.receive_data(t2(60, b"abc", start=50), 0.0)) == [
        TakeEpochs(((1, 0), (3, 50))),
        Append(60, b"abc"),
    ]


# -- the log


def test_epoch_is_saved_before_its_first_byte_is_stored() -> None:
    made = following(epochs=((1, 0), (3, 3)), end=9)
    data = t2(0, b"abc", epoch=1) + t2(3, b"def", start=3)
    assert plain(made.receive_data(data, 0.0)) == [
        TakeEpochs(((1, 0),)),
        Append(0, b"abc"),
        TakeEpochs(((3, 3),)),
        Append(3, b"def"),
    ]


def test_bytes_received_together_are_stored_and_acknowledged_once() -> None:
    made = following()
    data = b"".join(t2(at, b"abcd") for at in range(0, 40, 4))
    assert plain(made.receive_data(data, 0.0)) == [TakeEpochs(((3, 0),)), Append(0, b"abcd" * 10)]
    assert made.stored(40, 12, 1.0) == [Send(encode_ack(40, 12)), Confirmed(0)][:1]


def test_rocketmqs_early_name_of_the_next_epoch_is_understood() -> None:
    """RocketMQ's master sends (2, 100) with the bytes that end at 100, and may never send (1, 0)."""
    made = session(stock=True)
    made.receive_data(encode_master_handshake(150, [(1, 0), (2, 100)]), 0.0)
    made.attached(0, 0.0)
    data = t2(0, bytes(100), epoch=2, start=100) + t2(100, bytes(50), epoch=2, start=100)
    assert plain(made.receive_data(data, 0.0)) == [TakeEpochs(((1, 0), (2, 100))), Append(0, bytes(150))]


def test_heartbeat_of_a_new_epoch_adds_it_before_its_first_byte() -> None:
    made = following(Local(0, 40, ((1, 0),), 0, 3), ((1, 0), (3, 40)))
    assert made.receive_data(t2(40, b"", start=40), 0.0) == [TakeEpochs(((3, 40),))]


def test_gap_in_a_neve_masters_stream_is_skipped_but_not_a_step_back() -> None:
    made = following()
    assert plain(made.receive_data(t2(0, b"ab") + t2(64, b"cd"), 0.0)) == [
        TakeEpochs(((3, 0),)),
        Append(0, b"ab"),
        Append(64, b"cd"),
    ]
    assert "broke the protocol" in why(made.receive_data(t2(64, b"cd"), 0.0))


def test_stock_masters_bytes_must_be_contiguous() -> None:
    made = session(stock=True)
    made.receive_data(encode_master_handshake(150, [(3, 0)]), 0.0)
    made.attached(0, 0.0)
    made.receive_data(t2(0, b"ab"), 0.0)
    assert "broke the protocol" in why(made.receive_data(t2(3, b"cd"), 0.0))


HERE = Local(0, 40, ((3, 0),), 0, 3)
RECORD = bytes(range(30, 40))


def asking_again(record: tuple[int, bytes] | None = (30, RECORD), local: Local = HERE) -> SlaveSession:
    """Return a session under a stock master in whose epoch the whole local log was written."""
    made = SlaveSession(local, member_id=B, master_epoch=3, hello=None, last_record=lambda end: record)
    made.start(0.0)
    assert made.receive_data(encode_master_handshake(90, [(3, 0)]), 0.0) == [Attached(3)]
    return made


def test_stock_masters_last_record_is_compared_before_new_bytes() -> None:
    made = asking_again()
    assert made.attached(40, 0.0) == [Send(encode_ack(30))]
    assert made.stored(40, 40, 0.0) == [], "nothing that is here is acknowledged before"
    assert made.receive_data(t2(30, b"", confirm=40), 0.0) == [], "nor confirmed"
    assert made.receive_data(t2(30, RECORD[:4], confirm=40), 0.0) == []
    actions = made.receive_data(t2(34, RECORD[4:] + b"new", confirm=42), 0.0)
    assert plain(actions) == [Send(encode_ack(40)), Append(40, b"new"), Confirmed(40)]
    assert made.stored(43, 43, 0.0) == [Send(encode_ack(43)), Confirmed(42)]


def test_stock_master_that_overwrote_this_logs_tail_is_not_followed() -> None:
    """A power cut took its tail, and it returned within its epoch before the controller noticed."""
    for first in (RECORD[:4], b""):
        made = asking_again()
        made.attached(40, 0.0)
        if first:
            made.receive_data(t2(30, first), 0.0)
        (end,) = made.receive_data(t2(30 + len(first), bytes(60), confirm=80), 0.0)
        assert isinstance(end, End) and end.refusal is not None
        assert (end.refusal.reason, "below 40" in end.why) == (Reason.MISMATCH.value, True)
        assert made.is_ended


@pytest.mark.parametrize("record", [None, (30, RECORD[:6])], ids=["none is here", "its file has ended"])
def test_stock_master_without_a_comparable_record_is_asked_for_new_bytes(
    record: tuple[int, bytes] | None,
) -> None:
    made = asking_again(record)
    assert made.attached(40, 0.0) == [Send(encode_ack(40))]
    assert plain(made.receive_data(t2(40, b"new"), 0.0)) == [Append(40, b"new")]


@pytest.mark.parametrize("frame", [t2(40, b"x", epoch=1, start=0), t2(40, b"x", epoch=4, start=20)])
def test_bytes_with_a_decreasing_epoch_are_refused(frame: bytes) -> None:
    made = following(Local(0, 40, ((1, 0), (3, 30)), 0, 3), ((1, 0), (3, 30)))
    actions = made.receive_data(frame, 0.0)
    assert "epochs" in why(actions)


def test_whole_bytes_before_a_malformed_frame_are_stored() -> None:
    made = following()
    actions = plain(made.receive_data(t2(0, b"ab") + b"garbage!", 0.0))
    assert actions[:2] == [TakeEpochs(((3, 0),)), Append(0, b"ab")]
    assert isinstance(actions[2], End)


# -- acknowledged and confirmed offsets


def test_only_stored_bytes_are_acknowledged() -> None:
    made = following()
    made.receive_data(t2(0, b"abcdefgh"), 0.0)
    assert made.stored(6, 6, 0.0) == [Send(encode_ack(6, 6))], "the rest is the begin of a record"
    assert made.stored(6, 6, 0.0) == [], "it is known"
    assert made.stored(6, 6, 0.0) == []


def test_later_sync_is_reported_to_a_neve_master_but_not_to_a_stock_one() -> None:
    made = following()
    made.receive_data(t2(0, b"abcdefgh"), 0.0)
    assert made.stored(8, 0, 0.0) == [Send(encode_ack(8, 0))]
    assert made.stored(8, 8, 0.0) == [Send(encode_ack(8, 8))]
    stock = session(stock=True)
    stock.receive_data(encode_master_handshake(0, [(3, 0)]), 0.0)
    stock.attached(0, 0.0)
    stock.receive_data(t2(0, b"abcdefgh"), 0.0)
    assert stock.stored(8, 0, 0.0) == [Send(encode_ack(8))]
    assert stock.stored(8, 8, 0.0) == []


def test_confirmed_offset_is_the_masters_limited_by_the_local_log() -> None:
    made = following()
    assert not [one for one in made.receive_data(t2(0, b"abcd", confirm=100), 0.0) if isinstance(one, Confirmed)]
    assert made.stored(4, 0, 0.0)[-1] == Confirmed(4)
    assert made.receive_data(t2(4, b"", confirm=100), 0.0) == []
    made.receive_data(t2(4, b"efgh", confirm=6), 0.0)
    assert made.stored(8, 0, 0.0)[-1] == Confirmed(8)


def test_confirm_in_a_heartbeat_is_applied_at_once_and_never_decreases() -> None:
    made = following(Local(0, 40, ((3, 0),), 10, 3), end=40)
    assert made.receive_data(t2(40, b"", confirm=30), 0.0) == [Confirmed(30)]
    assert made.receive_data(t2(40, b"", confirm=20), 0.0) == []


# -- time


def test_idle_slave_sends_a_heartbeat_every_second() -> None:
    made = following(Local(0, 40, ((3, 0),), 10, 3), end=40)
    assert made.wake_at == HEARTBEAT_S
    assert made.tick(0.9) == []
    assert made.tick(1.0) == [Send(encode_ack(40, 40))]
    assert made.wake_at == 2 * HEARTBEAT_S


def test_cut_off_timeout_is_three_heartbeats_and_polls_at_least() -> None:
    """Two of either may be late."""
    isolated_after = BrokerConfig().controller_heart_beat_timeout_mills / 1000
    assert isolated_after >= 3 * HEARTBEAT_S
    rules = MemberRules(confirm=ConfirmRules(ReplicationMode.ASYNC, isolated_after=isolated_after))
    assert 3 * rules.poll_every <= isolated_after


def test_later_fsync_of_acknowledged_bytes_is_reported() -> None:
    """The master archives bytes that all members have fsynced.

    Without the report, an idle log would keep an unarchived end.
    """
    made = following()
    made.receive_data(t2(0, b"abcdef"), 0.0)
    assert made.stored(6, 2, 0.0) == [Send(encode_ack(6, 2))]
    assert made.wake_at == HEARTBEAT_S
    assert made.tick(HEARTBEAT_S, 3) == [Send(encode_ack(6, 3))]
    assert made.wake_at == 2 * HEARTBEAT_S
    assert made.tick(2 * HEARTBEAT_S, 9) == [Send(encode_ack(6, 6))], "of what it has acknowledged"
    assert made.tick(3 * HEARTBEAT_S, 9) == [Send(encode_ack(6, 6))]


@pytest.mark.parametrize("make", [session, greeted])
def test_slave_sends_no_heartbeat_before_it_follows(make: Callable[[], SlaveSession]) -> None:
    assert make().wake_at == SILENCE_S


@pytest.mark.parametrize("make", [session, greeted, following])
def test_silent_master_is_left_after_twenty_seconds(make: Callable[[], SlaveSession]) -> None:
    made = make()
    made.tick(5.0)
    assert not [one for one in made.tick(SILENCE_S - 0.1) if isinstance(one, End)]
    assert "silent" in why(made.tick(SILENCE_S))
    assert made.tick(SILENCE_S + 1) == []
