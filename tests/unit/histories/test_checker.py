"""Tests of the history checker: it finds each kind of fault planted in a correct history."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.histories import history
from tests.histories.checker import Promise, Verdict, check, owes, told
from tests.histories.faults import Kind
from tests.histories.history import (
    ALL_IS_ARCHIVED,
    Archived,
    Bounds,
    BrokenOff,
    Decision,
    Event,
    Gap,
    Healed,
    Kept,
    Led,
    LogPart,
    Outcome,
    ReportedStep,
    Rested,
    Seen,
    Sent,
    Serves,
    Stall,
    Stored,
    Switched,
    TopicDeleted,
    TopicMade,
    Topics,
    Unsettled,
    Waited,
)

SYNC = Promise(keeps_acknowledged=True)
ASYNC = Promise(keeps_acknowledged=False)
HEALED = 100_000
CUT = Kept(key="p-5", where="a's diverged/1-0-9.log", cut_from="t")
ROW = Archived(topic="t", queue=0, offset=4, key="p-5")
SERVES = Serves(what="p is acknowledged", at=HEALED + 5_000)
ARCHIVE = Serves(what=ALL_IS_ARCHIVED, at=HEALED + 29_000)
BEGAN, ENDED = Led(at=0, epoch=4), Led(at=HEALED + 32_000, epoch=5)
KILL = ReportedStep(at=60_000, what="a: kill the master", kind=Kind.KILL)


def sent(number: int, **more: object) -> Sent:
    at = 1000 * number
    fields: dict[str, object] = {"producer": "p", "number": number, "key": f"p-{number}", "topic": "t", "began": at}
    fields |= {"ended": at + 5, "outcome": Outcome.ACKNOWLEDGED, "queue": 0, "offset": number, "physical": at}
    return Sent(**{**fields, **more})  # type: ignore[arg-type]


def seen(key: str, offset: int, **more: object) -> Seen:
    fields: dict[str, object] = {"who": "r", "topic": "t", "queue": 0, "offset": offset, "key": key, "at": 50_000}
    return Seen(**{**fields, **more})  # type: ignore[arg-type]


def stored(key: str, offset: int, topic: str = "t", at: int = 0) -> Stored:
    return Stored(topic=topic, queue=0, offset=offset, key=key, stored=at)


def whole() -> list[Event]:
    """Return a correct history with all kinds of events."""
    later = {"producer": "later", "topic": "late", "queue": -1, "offset": -1}
    halves = {"producer": "halves", "topic": "halves"}
    return [
        BEGAN,
        TopicMade(topic="t", queues=1),
        TopicMade(topic="old", queues=2),
        TopicDeleted(topic="old"),
        *(sent(number) for number in range(3)),
        sent(3, outcome=Outcome.UNKNOWN, queue=-1, offset=-1),
        sent(4, outcome=Outcome.REFUSED, queue=-1, offset=-1),
        sent(5, offset=4),
        sent(0, **later, key="late-0", due=6_000),
        sent(0, **halves, key="halves-0", decision=Decision.COMMIT),
        sent(1, **halves, key="halves-1", decision=Decision.ROLLBACK),
        *(seen(f"p-{number}", number) for number in range(4)),
        *(seen(f"p-{number}", number, who="g1", group="g", in_order=True) for number in (0, 1, 0, 2, 3)),
        seen("p-5", 4, who="g2", group="g", in_order=True),
        seen("p-5", 0, who="g2", group="g", again=True),
        seen("late-0", 0, who="l1", group="l", topic="late", at=6_001),
        seen("halves-0", 0, who="h1", group="h", topic="halves"),
        KILL,
        ReportedStep(at=63_500, what="a: over: kill the master"),
        Switched(at=61_000, by="a", to="b", why="", epoch=4, then=5),
        Switched(at=62_000, by="", to="", why="not in sync", epoch=5, then=5),
        Switched(at=63_000, by="b", to="a", why="", epoch=5, then=-1),
        Healed(at=HEALED),
        SERVES,
        *(Rested(group=group, at=HEALED + 30_000) for group in "glh"),
        *(stored(f"p-{number}", number) for number in range(4)),
        stored("p-5", 4),
        stored("late-0", 0, "late", 6_000),
        stored("halves-0", 0, "halves"),
        *(Archived(topic="t", queue=0, offset=number, key=f"p-{number}") for number in range(4)),
        ROW,
        Archived(topic="late", queue=0, offset=0, key="late-0"),
        Archived(topic="halves", queue=0, offset=0, key="halves-0"),
        Bounds(topic="t", queue=0, first=0, end=5),
        Bounds(topic="late", queue=0, first=0, end=1),
        Bounds(topic="halves", queue=0, first=0, end=1),
        Topics(queues={"t": 1, "late": 1, "halves": 1, "%RETRY%g": 1}),
        *(LogPart(member=member, start=0, end=9_000, digest="d") for member in "abc"),
        ARCHIVE,
        ENDED,
    ]


def kinds(events: list[Event], promise: Promise = SYNC) -> set[str]:
    return {violation.kind for violation in check(events, promise).violations}


def without(events: list[Event], *gone: Event) -> list[Event]:
    assert all(one in events for one in gone)
    return [event for event in events if event not in gone]


def without_all(events: list[Event], *kinds: type) -> list[Event]:
    return [event for event in events if not isinstance(event, kinds)]


def changed(events: list[Event], old: Event, **fields: object) -> list[Event]:
    assert events.count(old) == 1
    return [replace(event, **fields) if event == old else event for event in events]


def test_history_without_faults_passes() -> None:
    for promise in (SYNC, ASYNC):
        report = check(whole(), promise)
        assert report.violations == [], told(report.violations)
        assert report.counts["sent, acknowledged"] == 7


Plant = Callable[[list[Event]], list[Event]]
LAST = sent(5, offset=4)
SHORTER = (Bounds(topic="t", queue=0, first=0, end=5), Bounds(topic="t", queue=0, first=0, end=4))


def cut_last(events: list[Event]) -> list[Event]:
    """Remove the last message of a queue and all other traces of it."""
    events = without(events, ROW, stored("p-5", 4), seen("p-5", 4, who="g2", group="g", in_order=True))
    return [SHORTER[1] if event == SHORTER[0] else event for event in events]


PLANTED: list[tuple[str, str, Plant]] = [
    ("an acknowledged message is gone", "lost", cut_last),
    ("another one has its place", "lost", lambda h: changed(h, stored("p-5", 4), key="p-4")),
    ("it is there, at another offset", "lost", lambda h: [*without(h, LAST), replace(LAST, offset=9)]),
    ("a delayed message never comes", "lost", lambda h: without(h, stored("late-0", 0, "late", 6_000))),
    ("a committed message never comes", "lost", lambda h: without(h, stored("halves-0", 0, "halves"))),
    ("two producers were told one place", "two at one", lambda h: [*h, sent(6, producer="q", key="q-6", offset=1)]),
    ("a reader saw another message there", "two at one", lambda h: [*h, seen("p-4", 1, who="x")]),
    ("a later message lies before", "order", lambda h: changed(h, sent(1), number=9)),
    ("a group in order is given a later one first", "order",
     lambda h: [*h, *(seen(f"p-{at}", at, who="o", group="o", in_order=True) for at in (0, 2, 1, 3, 5))]),
    ("what was seen is not there", "vanished", lambda h: [*h, seen("p-4", 5, who="x")]),
    ("it is there twice", "doubled", lambda h: [*h, stored("p-5", 5)]),
    ("nobody has sent it", "doubled", lambda h: [*h, stored("p-77", 5)]),
    ("a queue has a hole", "hole", lambda h: without(h, stored("p-3", 3), seen("p-3", 3))),
    ("a reader passes over one", "hole", lambda h: without(h, seen("p-1", 1))),
    ("a delayed message is given too soon", "early",
     lambda h: changed(h, seen("late-0", 0, who="l1", group="l", topic="late", at=6_001), at=5_999)),
    ("a delayed message is stored too soon", "early",
     lambda h: changed(h, stored("late-0", 0, "late", 6_000), stored=5_999)),
    ("what was rolled back is given", "both ways", lambda h: [*h, seen("halves-1", 1, topic="halves", who="x")]),
    ("what was rolled back is stored", "both ways", lambda h: [*h, stored("halves-1", 1, "halves")]),
    ("a topic is gone", "topics", lambda h: changed(h, h_topics(h), queues={"late": 1, "halves": 1})),
    ("a topic has other queues", "topics", lambda h: changed(h, h_topics(h), queues={"t": 4})),
    ("a deleted topic is back", "topics", lambda h: changed(h, h_topics(h), queues={"t": 1, "old": 2})),
    ("a group was not given one", "missed",
     lambda h: without(h, seen("p-3", 3, who="g1", group="g", in_order=True))),
    ("a group comes to rest late", "restless",
     lambda h: changed(h, Rested(group="g", at=HEALED + 30_000), at=HEALED + 30_001)),
    ("a group never rests", "restless", lambda h: changed(h, Rested(group="g", at=HEALED + 30_000), at=0)),
    ("nobody is acknowledged again", "restless", lambda h: changed(h, SERVES, at=0)),
    ("it takes long until somebody is", "restless", lambda h: changed(h, SERVES, at=HEALED + 30_001)),
    ("a hand-over was answered and is not done", "switched",
     lambda h: [*h, Switched(at=61_000, by="b", to="c", why="", epoch=5, then=5)]),
    ("the archive has another message there", "archive", lambda h: changed(h, ROW, key="p-4")),
    ("the archive has one twice", "archive", lambda h: [*h, ROW]),
    ("the archive lacks one", "archive", lambda h: without(h, ROW)),
    ("the archive has what the set has not", "archive", lambda h: [*h, replace(ROW, offset=5, key="p-4")]),
    ("a member cut off what the set has", "kept", lambda h: [*h, replace(CUT, key="p-2")]),
    ("a member's log differs", "logs",
     lambda h: changed(h, LogPart(member="c", start=0, end=9_000, digest="d"), digest="e")),
    ("nobody reads a queue", "blind", lambda h: without(h, SHORTER[0])),
    ("nobody reads the delayed messages", "blind", lambda h: without(h, Bounds(topic="late", queue=0, first=0, end=1))),
    ("a group was given nothing", "blind", lambda h: [*h, Rested(group="z", at=HEALED + 1)]),
    ("all is archived, and nobody reads it", "blind", lambda h: without_all(h, Archived)),
    ("nobody knows who led", "blind", lambda h: without_all(h, Led)),
    ("the healing is not told", "blind", lambda h: without(h, Healed(at=HEALED))),
    ("the round broke off", "blind", lambda h: [*h, BrokenOff(why="no answer")]),
    ("nobody asked whether it serves", "blind", lambda h: without_all(h, Serves)),
    ("nobody waited for groups", "blind", lambda h: without_all(h, Rested)),
    ("nobody saw anything", "blind", lambda h: without_all(h, Seen, Rested)),
    ("nobody looked at the logs", "blind", lambda h: without_all(h, LogPart)),
    ("topics are not told", "blind", lambda h: without(h, h_topics(h))),
    ("two sends have one key", "blind", lambda h: [*h, sent(9, key="p-0", offset=0)]),
    ("one log is all that there is", "blind",
     lambda h: without(h, *(LogPart(member=member, start=0, end=9_000, digest="d") for member in "ab"))),
]  # fmt: skip


#: Plants that rely on reads after the queues, or on the completeness of the round.
UNSEEN_THEN = {
    "a delayed message never comes",
    "a committed message never comes",
}
LATE_ONE = (
    stored("late-0", 0, "late", 6_000),
    seen("late-0", 0, who="l1", group="l", topic="late", at=6_001),
    Archived(topic="late", queue=0, offset=0, key="late-0"),
)
GIVEN_LAST = (
    seen("p-5", 4, who="g2", group="g", in_order=True),
    seen("p-5", 0, who="g2", group="g", again=True),
)
LAST_BOUNDS = (Bounds(topic="late", queue=0, first=0, end=1), Bounds(topic="halves", queue=0, first=0, end=1))


def h_topics(events: list[Event]) -> Topics:
    return next(event for event in events if isinstance(event, Topics))


@pytest.mark.parametrize(("kind", "plant"), [(kind, plant) for _, kind, plant in PLANTED], ids=[p[0] for p in PLANTED])
def test_planted_fault_is_found(kind: str, plant: Plant) -> None:
    assert kind in kinds(plant(whole()))


@pytest.mark.parametrize("promise", [SYNC, ASYNC])
def test_lost_harness_records_are_found_in_every_mode(promise: Promise) -> None:
    for description, kind, plant in PLANTED:
        if kind == "blind":
            assert kind in kinds(plant(whole()), promise), description


def test_every_kind_of_fault_is_planted() -> None:
    doc = check.__globals__["__doc__"].partition("In `async`")[0]
    named = {line[2:15].strip() for line in doc.splitlines()[2:] if line.startswith("  ") and line[2] != " "} - {"kind"}
    assert {kind for _, kind, _ in PLANTED} == named


def test_unacknowledged_message_may_exist_or_not() -> None:
    events = without(without_all(whole(), Archived), ARCHIVE)
    assert kinds([*without(events, SHORTER[0]), stored("p-4", 5), Bounds(topic="t", queue=0, first=0, end=6)]) == {
        "missed"
    }
    fewer = without(events, sent(4, outcome=Outcome.REFUSED, queue=-1, offset=-1))
    assert kinds(fewer) == set()


def test_possibly_repeated_message_may_exist_twice() -> None:
    twice = [*whole(), stored("p-5", 5), seen("p-5", 5, who="g2", group="g", in_order=True)]
    assert kinds(twice) == {"doubled"}
    assert kinds(changed(twice, LAST, may_repeat=True)) == set()


def test_time_of_a_stall_extends_the_deadlines() -> None:
    late = changed(whole(), SERVES, at=HEALED + 50_000)
    assert kinds(late) == {"restless"}
    assert kinds([*late, Stall(at=HEALED, lasted=20_000)]) == set()
    assert kinds([*late, Stall(at=HEALED, lasted=19_999)]) == {"restless"}
    for elsewhen in (HEALED - 1, HEALED + 50_000):
        assert kinds([*late, Stall(at=elsewhen, lasted=20_000)]) == {"restless"}


def test_late_round_on_a_starved_machine_is_void() -> None:
    never = changed(whole(), SERVES, at=0)
    assert check(whole(), SYNC).verdict is Verdict.HELD
    assert check(never, SYNC).verdict is Verdict.BROKEN
    for starved in ([Stall(at=HEALED + 1, lasted=1_000)], [Stall(at=HEALED + 1 + n, lasted=300) for n in range(11)]):
        assert check([*never, *starved], SYNC).verdict is Verdict.VOID
        assert check([*whole(), *starved], SYNC).verdict is Verdict.HELD
    late = changed(whole(), SERVES, at=HEALED + 40_000)
    assert check([*late, Stall(at=HEALED + 39_999, lasted=1_000)], SYNC).verdict is Verdict.VOID
    assert check([*late, Stall(at=HEALED + 40_000, lasted=9_000)], SYNC).verdict is Verdict.BROKEN, "it was late before"
    waits = [Waited(at=HEALED + 1_000 * n, who="c", lasted=1_000) for n in range(2, 12)]
    assert check([*late, *waits], SYNC).verdict is Verdict.VOID
    assert check([*late, *waits[1:]], SYNC).verdict is Verdict.BROKEN
    assert check([*late, *waits[1:], replace(waits[0], who="a")], SYNC).verdict is Verdict.BROKEN, "they share it"
    for busy in ([Stall(at=HEALED + 1, lasted=999)], [Stall(at=HEALED - 5_000, lasted=4_000)]):
        assert check([*never, *busy], SYNC).verdict is Verdict.BROKEN


@pytest.mark.parametrize("plant", [plant for _, kind, plant in PLANTED if kind not in ("restless", "blind")])
def test_stall_does_not_excuse_a_wrong_result(plant: Plant) -> None:
    assert check([*plant(whole()), Stall(at=HEALED + 1, lasted=60_000)], SYNC).verdict is Verdict.BROKEN


def test_late_result_on_a_starved_machine_is_void() -> None:
    starved = Stall(at=HEALED + 1, lasted=60_000)
    late = (
        stored("late-0", 0, "late", 6_000),
        seen("late-0", 0, who="l1", group="l", topic="late", at=6_001),
        Archived(topic="late", queue=0, offset=0, key="late-0"),
    )
    not_yet = changed(without(whole(), *late), Bounds(topic="late", queue=0, first=0, end=1), end=0)
    g_never = changed(whole(), Rested(group="g", at=HEALED + 30_000), at=0)
    last = seen("p-5", 4, who="g2", group="g", in_order=True)
    missed = without(g_never, last, seen("p-5", 0, who="g2", group="g", again=True))
    unarchived = changed(without(whole(), ROW), ARCHIVE, at=0)
    for events in (
        missed,
        unarchived,
        [*not_yet, Unsettled(what="delayed messages")],
        [*whole(), BrokenOff(why="no answer", late=True)],
    ):
        assert check([*events, starved], SYNC).verdict is Verdict.VOID
        assert check(events, SYNC).verdict is Verdict.BROKEN
    assert check([*whole(), BrokenOff(why="a broken file"), starved], SYNC).verdict is Verdict.BROKEN


def test_skipped_message_is_broken_even_on_a_starved_machine() -> None:
    """Later messages were received, so the skipped one will never arrive."""
    starved = Stall(at=HEALED + 1, lasted=60_000)
    rested = Rested(group="g", at=HEALED + 30_000)
    third, last = (seen(key, at, who="g1", group="g", in_order=True) for key, at in (("p-3", 3), ("p-0", 0)))
    never = changed(whole(), rested, at=0)
    by_a_group = without(never, third)
    by_its_offsets = changed(without(whole(), *GIVEN_LAST), rested, at=0, is_past=True)
    unarchived = changed(without(whole(), replace(ROW, offset=3, key="p-3")), ARCHIVE, at=0)
    behind = {"producer": "later", "topic": "late", "queue": -1, "offset": -1}
    delayed = [
        *changed(without(whole(), *LATE_ONE), Bounds(topic="late", queue=0, first=0, end=1), end=0),
        sent(1, **behind, due=7_000, key="late-1"),
        stored("late-1", 0, "late", 7_000),
        Unsettled(what="delayed messages"),
    ]
    for events in (by_a_group, by_its_offsets, unarchived, delayed):
        assert check([*events, starved], SYNC).verdict is Verdict.BROKEN
    assert last in whole()


@pytest.mark.parametrize(
    ("kind", "plant"),
    [(kind, plant) for what, kind, plant in PLANTED if kind not in ("blind", "topics") and what not in UNSEEN_THEN],
)
def test_aborted_round_is_judged_by_its_proven_facts(kind: str, plant: Plant) -> None:
    """Everything was read before the requests timed out."""
    starved, late = Stall(at=HEALED + 1, lasted=60_000), BrokenOff(why="no answer", late=True)
    read = Bounds(topic="halves", queue=1, first=0, end=0)  # the next queue to read
    assert check([*whole(), read, starved, late], SYNC).verdict is Verdict.VOID
    events = [*plant(whole()), read, late]
    assert kind in kinds(events)
    if kind != "restless":
        assert check([*events, starved], SYNC).verdict is Verdict.BROKEN


def test_aborted_round_reports_no_unchecked_fault() -> None:
    """Unread queues and groups without a wait cause no findings."""
    late = BrokenOff(why="no answer", late=True)
    for unread in ((Bounds, Stored, Archived, LogPart, Topics, Rested), (Archived, LogPart, Topics)):
        events = without_all(whole(), *unread)
        if Bounds not in unread:
            events = without(events, stored("p-5", 4), *(one for one in events if one in LAST_BOUNDS))
        for promise in (SYNC, ASYNC):
            assert kinds([*without(events, ARCHIVE), late], promise) == {"blind"}


def test_async_round_needs_a_known_leader() -> None:
    """Otherwise, losses in a round of switchovers would be excused."""
    events = changed(whole(), BEGAN, epoch=-1)
    assert kinds(events, ASYNC) == {"blind"}
    assert kinds(events, SYNC) == set()


def test_archive_deadline_starts_at_its_request() -> None:
    """The archive is requested after the groups have settled, which have their own deadline."""
    late = changed(whole(), ARCHIVE, at=HEALED + 31_000)
    assert kinds(late) == {"restless"}
    asked = changed(whole(), ARCHIVE, at=HEALED + 31_000, asked=HEALED + 30_000)
    assert kinds(asked) == set()
    assert kinds(changed(asked, replace(ARCHIVE, at=HEALED + 31_000, asked=HEALED + 30_000), at=HEALED + 60_001)) == {
        "restless"
    }


def test_async_round_of_switchovers_without_elections_loses_nothing() -> None:
    handed_over = changed(whole(), KILL, kind=Kind.HAND_OVER)
    unasked = changed(handed_over, ENDED, epoch=7)  # two switchovers were acknowledged
    assert "lost" in kinds([*cut_last(handed_over), CUT], ASYNC)
    assert kinds([*cut_last(unasked), CUT], ASYNC) == set()
    assert kinds([*cut_last(whole()), CUT], ASYNC) == set()
    assert "lost" in kinds([*cut_last(unasked), CUT], SYNC)
    assert owes(handed_over, ASYNC)
    for unknown in (without_all(handed_over, Led), changed(handed_over, BEGAN, epoch=-1)):
        assert not owes(unknown, ASYNC)


def test_report_has_faults_and_the_longest_time_without_ack() -> None:
    report = check(whole(), SYNC)
    assert (report.elections, dict(report.faults)) == (1, {"kill": 1})
    assert report.silent_ms == 3_000  # from the end of the third call to the end of the call after the two failed ones
    assert check([*whole(), sent(9, outcome=Outcome.UNKNOWN)], SYNC).silent_ms == 4_000


def test_message_of_a_lost_disk_or_repeated_send_may_exist() -> None:
    repeated = changed(whole(), LAST, may_repeat=True)
    assert kinds([*whole(), Kept(key="p-2", where="a's disk")]) == set()
    assert kinds([*whole(), replace(CUT, key="p-2", cut_from="%RETRY%g")]) == set()
    assert kinds([*repeated, CUT]) == set()


def test_async_loss_must_be_kept_elsewhere_or_recorded() -> None:
    lost = cut_last(whole())
    assert kinds(lost, ASYNC) == {"lost"}
    assert kinds([*lost, Kept(key="p-5", where="a's diverged/1-0-9.log")], ASYNC) == set()
    gap = Gap(topic="t", queue=0, first=4, last=4)
    assert kinds([*lost, gap], ASYNC) == set()
    for other in (replace(gap, first=5, last=9), replace(gap, topic="late"), replace(gap, queue=1)):
        assert kinds([*lost, other], ASYNC) == {"lost"}
    assert kinds([*lost, ROW], ASYNC) == set()
    assert "archive" in kinds([*lost, ROW], SYNC)
    assert "lost" in kinds([*lost, Kept(key="p-5", where="a's diverged/1-0-9.log"), gap], SYNC)


def test_async_hole_in_a_queue_must_be_a_recorded_gap() -> None:
    events = without(without_all(changed(whole(), SHORTER[0], end=6), Archived), ARCHIVE)
    events.append(stored("p-4", 5))
    events = without(events, stored("p-5", 4), seen("p-5", 4, who="g2", group="g", in_order=True))
    gap = Gap(topic="t", queue=0, first=4, last=4)
    assert kinds(events, ASYNC) == {"lost", "hole"}
    assert kinds([*events, gap], ASYNC) == set()
    assert "hole" in kinds([*events, gap], SYNC)


def test_history_file_round_trips(tmp_path: Path) -> None:
    events = whole()
    history.write(tmp_path / "history.jsonl", events)
    assert history.read(tmp_path / "history.jsonl") == events
