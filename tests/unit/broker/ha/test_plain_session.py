"""A slave's session under a plain Apache master: requests, truncation of a lost tail, refusals and appends."""

from __future__ import annotations

import random
from struct import pack

import pytest
from msgspec.structs import replace

from broker.ha.frames import BODY_MAX, Hello
from broker.ha.greeting import Reason
from broker.ha.plain_session import Action, AskMaster, PlainSession
from broker.ha.slave_session import (
    SILENCE_S,
    STOCK_HEARTBEAT_S,
    Append,
    Attached,
    Confirmed,
    End,
    Local,
    Send,
    SlaveState,
    Truncate,
)
from broker.ha.stock_master import MasterLife, StockMaster, read_stock_master, unlike_stock
from neve.errors import NeveError
from tests.kit.broker.ha_session import hello
from tests.kit.broker.plain_ha import LIFE, SETTINGS


def master(life: MasterLife = LIFE, *, begin: int = 0, end: int = 1000, **settings: str) -> StockMaster:
    return StockMaster(life=life, begin=begin, end=end, ha_address="m:10912", settings=SETTINGS | settings)


LAST = b"the last.."


def asking(begin: int, end: int, own: Hello | None = None) -> PlainSession:
    """Return the session of a log whose last record is LAST, wherever the log is truncated."""
    session = PlainSession(
        Local(begin, end, (), 0, 0), own or hello(), lambda at: (at - len(LAST), LAST) if at > begin else None
    )
    assert session.start(0.0) == [AskMaster()]
    return session


def following(begin: int = 0, end: int = 0, of: StockMaster | None = None) -> PlainSession:
    session = asking(begin, end)
    assert session.master_read(of or master(), LIFE if end else None, 0.0) == [Attached(0)]
    session.attached(end, 0.0)
    if end:
        assert session.receive_data(frame(end - len(LAST), LAST), 0.0) == [Send(pack(">q", end))]
    return session


def frame(offset: int, body: bytes = b"") -> bytes:
    return pack(">qi", offset, len(body)) + body


def copied(actions: list[Action]) -> list[Action]:
    """Return the actions with copied bodies: they are views of the received buffer."""
    return [Append(one.at, bytes(one.data)) if isinstance(one, Append) else one for one in actions]


def ended(actions: list[Action]) -> str | None:
    """Return the reason of the end, if it is permanent."""
    (end,) = actions
    assert isinstance(end, End), end
    return None if end.refusal is None else end.refusal.reason


# -- requests


def test_empty_log_requests_from_1_and_adds_the_first_byte_itself() -> None:
    """A request for 0 would mean the newest file."""
    session = asking(0, 0)
    assert session.master_read(master(), None, 0.0) == [Attached(0)]
    assert session.attached(0, 0.0) == [Send(pack(">q", 1))]
    assert session.receive_data(frame(1), 0.0) == []
    assert copied(session.receive_data(frame(1, b"bc") + frame(3, b"de"), 0.0)) == [Append(0, b"\x00bcde")]
    assert copied(session.receive_data(frame(5, b"f"), 0.0)) == [Append(5, b"f")]
    assert session.received == 5


def test_empty_log_starts_at_the_lowest_file_that_the_master_has() -> None:
    session = asking(0, 0)
    assert session.master_read(master(begin=300), None, 0.0) == [Attached(0)]
    assert session.attached(0, 0.0) == [Send(pack(">q", 300))]
    assert copied(session.receive_data(frame(300, b"ab"), 0.0)) == [Append(300, b"ab")]


def joined(end: int, own: tuple[int, bytes] | None, of: StockMaster | None = None) -> tuple[PlainSession, list[Action]]:
    session = PlainSession(Local(100, end, (), 0, 0), hello(), lambda at: own)
    session.start(0.0)
    assert session.master_read(of or master(), LIFE, 0.0) == [Attached(0)]
    return session, session.attached(end, 0.0)


def test_log_resumes_once_its_last_record_was_received_again() -> None:
    session, asked = joined(700, (680, b"record"))
    assert asked == [Send(pack(">q", 680))]
    assert session.receive_data(frame(680, b"rec") + frame(683), 0.0) == []
    assert session.receive_data(frame(683, b"ord") + frame(686, b"rest"), 0.0) == [], "behind it a file ends"
    actions = copied(session.receive_data(frame(690, b"..........ab"), 0.0))
    assert actions == [Send(pack(">q", 700)), Append(700, b"ab")]
    assert session.received == 2


def test_master_whose_log_differs_below_this_ones_end_is_not_followed() -> None:
    """The master lost its tail, wrote on and restarted once more, so that its log then ended above this one's."""
    session, _ = joined(700, (680, b"record" + b"x" * 14))
    session.receive_data(frame(680, b"record"), 0.0)
    assert ended(session.receive_data(frame(686, b"y" * 20), 0.0)) == Reason.MISMATCH.value
    assert session.is_ended
    assert session.receive_data(frame(706, b"more"), 0.0) == []


@pytest.mark.parametrize("own", [None, (290, b"x" * 10)], ids=["no record is left", "the master has dropped it"])
def test_log_without_a_common_record_is_not_continued(own: tuple[int, bytes] | None) -> None:
    session, asked = joined(700, own, master(begin=300))
    assert ended(asked) == Reason.GONE.value
    assert session.is_ended


# -- a master that lost its tail


def test_tail_that_a_restarted_master_lost_is_truncated_before_a_request() -> None:
    session = asking(0, 800)
    assert session.master_read(master(replace(LIFE, boot_ms=LIFE.boot_ms + 1)), LIFE, 0.0) == [Truncate(500)]
    assert session.parted(480) == [Attached(0)]
    assert session.attached(480, 0.0) == [Send(pack(">q", 470))]
    assert copied(session.receive_data(frame(470, LAST + b"ab"), 0.0)) == [Send(pack(">q", 480)), Append(480, b"ab")]


def test_incarnation_that_ends_like_the_former_one_is_a_new_one() -> None:
    """It wrote above that offset, was killed, and lost all of it."""
    again = replace(LIFE, boot_ms=LIFE.boot_ms + 1)
    assert again.end_at_start == LIFE.end_at_start
    assert asking(0, 800).master_read(master(again), LIFE, 0.0) == [Truncate(500)]


def test_bytes_written_since_the_masters_start_are_not_truncated() -> None:
    assert asking(0, 800).master_read(master(), LIFE, 0.0) == [Attached(0)]
    assert asking(0, 500).master_read(master(replace(LIFE, boot_ms=1)), LIFE, 0.0) == [Attached(0)]


# -- refusals


@pytest.mark.parametrize(
    ("begin", "end", "followed", "of", "reason"),
    [
        (0, 800, None, master(), Reason.NO_EPOCHS),
        (0, 200, LIFE, master(begin=300), Reason.GONE),
        (0, 1001, LIFE, master(), Reason.AHEAD),
        (600, 800, replace(LIFE, boot_ms=1), master(), Reason.NOTHING_IN_COMMON),
        (0, 800, LIFE, master(replace(LIFE, boot_ms=1, end_at_start=0)), Reason.NOTHING_IN_COMMON),
        (0, 0, None, master(brokerId="1", brokerRole="SLAVE"), Reason.NOT_MASTER),
        (0, 0, None, master(enableControllerMode="true"), Reason.NOT_MASTER),
        (0, 0, None, master(brokerClusterName="staging"), Reason.CLUSTER),
        (0, 0, None, master(brokerName="other"), Reason.BROKER_SET),
        (0, 0, None, master(mappedFileSizeCommitLog="1073741824"), Reason.FILE_SIZE),
        (0, 0, None, master(messageDelayLevel="1s 10s"), Reason.DELAY_LEVELS),
        (0, 0, None, master(enableDLegerCommitLog="true"), Reason.FORMAT),
        (0, 0, None, master(enableMultiDispatch="true"), Reason.FORMAT),
        (0, 0, None, master(forceVerifyPropCRC="true"), Reason.FORMAT),
    ],
)
def test_master_of_a_foreign_log_is_not_followed(
    begin: int, end: int, followed: MasterLife | None, of: StockMaster, reason: Reason
) -> None:
    session = asking(begin, end)
    assert ended(session.master_read(of, followed, 0.0)) == reason.value
    assert session.is_ended
    assert session.attached(0, 0.0) == session.parted(0) == session.receive_data(frame(0, b"x"), 0.0) == []


def test_stock_master_with_equal_configured_names_is_accepted() -> None:
    assert unlike_stock(hello(), master()) is None


# -- appends


@pytest.mark.parametrize(
    "data", [frame(699, b"x"), frame(701, b"x"), frame(0), pack(">qi", 700, -1), pack(">qi", -1, 1)]
)
def test_bytes_that_do_not_start_at_the_log_end_are_refused(data: bytes) -> None:
    assert ended(following(0, 700).receive_data(data, 0.0)) is None


def test_bytes_before_a_malformed_frame_are_stored() -> None:
    actions = copied(following(0, 700).receive_data(frame(700, b"ab") + frame(9), 0.0))
    assert actions[0] == Append(700, b"ab")
    assert ended(actions[1:]) is None


def test_oversized_frame_is_refused_at_its_head() -> None:
    assert ended(following(0, 700).receive_data(pack(">qi", 700, BODY_MAX + 1), 0.0)) is None


def test_bytes_before_a_request_end_the_connection() -> None:
    session = asking(0, 700)
    assert ended(session.receive_data(frame(700, b"ab"), 0.0)) is None


@pytest.mark.parametrize("seed", range(20))
def test_bytes_are_appended_equally_from_any_division_of_the_stream(seed: int) -> None:
    dice = random.Random(seed)
    log = dice.randbytes(5000)
    stream, at = b"", 1
    while at < len(log):
        size = dice.randrange(0, 300)
        stream += frame(at, log[at : at + size])
        at += len(log[at : at + size])
    session, stored = following(), bytearray()
    while stream:
        cut = dice.randrange(1, 600)
        for action in session.receive_data(stream[:cut], 0.0):
            assert isinstance(action, Append)
            assert action.at == len(stored)
            stored += action.data
        stream = stream[cut:]
    assert bytes(stored) == b"\x00" + log[1:]


# -- acknowledgements


def test_stored_bytes_are_acknowledged_and_confirmed_once() -> None:
    session = following(0, 700)
    session.receive_data(frame(700, b"abc"), 0.0)
    assert session.stored(703, 703, 1.0) == [Send(pack(">q", 703)), Confirmed(703)]
    assert session.stored(703, 703, 1.0) == []


def test_idle_slave_reports_its_end_and_leaves_a_silent_master() -> None:
    session = following(0, 700)
    assert session.wake_at == STOCK_HEARTBEAT_S
    assert session.tick(STOCK_HEARTBEAT_S - 0.1) == []
    assert session.tick(STOCK_HEARTBEAT_S) == [Send(pack(">q", 700))]
    session.receive_data(frame(700), 10.0)
    assert session.tick(10.0 + SILENCE_S - 0.1) == [Send(pack(">q", 700))]
    assert ended(session.tick(10.0 + SILENCE_S)) is None
    assert session.state is SlaveState.ENDED
    assert session.tick(100.0) == []


# -- a master's description


PROPERTIES = "".join(f"{name}={value}\n" for name, value in SETTINGS.items()) + "namesrvAddr=a:1;b:1=2\n\n"
RUNTIME = b'{"table":{"bootTimestamp":"1700000000000","commitLogMinOffset":"0","commitLogMaxOffset":"1000"}}'
HA_INFO = {"masterFlushOffset": "500", "masterHaAddress": "m:10912", "masterAddress": "m:10911"}


def test_master_with_an_empty_log_begins_at_0() -> None:
    runtime = b'{"table":{"bootTimestamp":"1700000000000","commitLogMinOffset":"-1","commitLogMaxOffset":"0"}}'
    found = read_stock_master(PROPERTIES, runtime, HA_INFO | {"masterFlushOffset": "0"})
    assert (found.begin, found.end) == (0, 0)


def test_master_description_is_read_from_its_three_answers() -> None:
    found = read_stock_master(PROPERTIES, RUNTIME, HA_INFO)
    assert found == replace(master(), settings=SETTINGS | {"namesrvAddr": "a:1;b:1=2"})


@pytest.mark.parametrize(
    ("properties", "runtime", "ha_info"),
    [
        ("", RUNTIME, HA_INFO),
        (PROPERTIES, b"", HA_INFO),
        (PROPERTIES, b'{"table":{}}', HA_INFO),
        (PROPERTIES, RUNTIME.replace(b'"1000"', b'"x"'), HA_INFO),
        (PROPERTIES, RUNTIME.replace(b'"1000"', b'"400"'), HA_INFO),
        (PROPERTIES, RUNTIME.replace(b'Offset":"0"', b'Offset":"2000"'), HA_INFO),
        (PROPERTIES, RUNTIME, {}),
        (PROPERTIES, RUNTIME, HA_INFO | {"masterFlushOffset": ""}),
    ],
)
def test_incomplete_master_description_is_refused(properties: str, runtime: bytes, ha_info: dict[str, str]) -> None:
    with pytest.raises(NeveError):
        read_stock_master(properties, runtime, ha_info)
