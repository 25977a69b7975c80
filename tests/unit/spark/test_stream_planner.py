"""Tests of the stream planner: each row is in exactly one batch, and batches are repeatable."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neve.archive.format.journal import Commit, Shortened, encode_entry
from neve.archive.format.keys import journal_key
from neve.spark.planning import journals
from neve.spark.planning.journal_positions import IDLE_ENTRIES, Position, decoded, encoded
from neve.spark.planning.journal_stream import JournalStream
from neve.spark.planning.options import Options, options_of_stream
from neve.spark.planning.planner import DataLoss
from tests.kit.archive.checkpoints import put_checkpoint
from tests.kit.store.memory_store import MemoryStore
from tests.unit.spark.journal_on_paper import JournalOnPaper, Row


def options(**told: str) -> Options:
    return options_of_stream({"store": "dir:/x", "subscribePattern": "[st]", "startingOffsets": "earliest", **told})


class Stream:
    """A stream that can be restarted at any time from its checkpoint."""

    def __init__(self, store: MemoryStore, asked: Options, journals: list[JournalOnPaper]) -> None:
        self.store, self.asked, self.journals = store, asked, journals
        self.planner = JournalStream(store, asked)
        self.position = self.kept(self.planner.initial())
        self.before: Position | None = None  # the checkpoint does not contain the start of the first batch
        self.rows: list[list[tuple[str, Row]]] = []

    def kept(self, position: Position) -> Position:
        return decoded(json.loads(json.dumps(encoded(position))))

    def restart(self) -> None:
        self.planner = JournalStream(self.store, self.asked)

    def batch(self, most: int | None = None) -> list[tuple[str, Row]]:
        end = self.kept(self.planner.latest(self.position, most))
        if end == self.position:
            return []
        self.before, self.position = None if self.position.is_initial else self.position, end
        self.rows.append(self.replay())
        assert most is None or len(self.rows[-1]) <= most
        if self.before is not None:
            self.planner.forget(self.before)
        return self.rows[-1]

    def replay(self) -> list[tuple[str, Row]]:
        start = self.kept(self.planner.initial()) if self.before is None else self.before
        tasks = self.planner.tasks(start, self.position)
        return sorted((one.broker, row) for one in self.journals for row in one.rows(tasks.archived))

    def drain(self) -> None:
        for _ in range(1000):
            before = self.position
            self.batch()
            if self.position == before:
                return
        raise AssertionError("a stream of what is there has an end")

    def all_rows(self) -> list[tuple[str, Row]]:
        return [row for rows in self.rows for row in rows]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["commit", "twice", "replace", "erase", "expire", "other", "batch", "restart", "replay"]),
        st.integers(0, 7),
        st.integers(1, 9),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(steps=STEPS, begin=st.integers(0, 10))
def test_each_row_is_in_one_batch_and_repeated_batches_are_equal(steps: list[tuple[str, int, int]], begin: int) -> None:
    """Random steps: replaced objects, erased rows, expiry with grace, a second broker, and driver restarts."""
    store = MemoryStore()
    journals = [JournalOnPaper(store, "a")]
    stream: Stream | None = None
    arrived: set[tuple[str, Row]] = set()
    erased: set[tuple[str, Row]] = set()
    since_last: set[tuple[str, Row]] = set()  # a replay of the last batch lacks rows erased since
    ends: dict[tuple[str, str, int], int] = {}
    for number, (kind, which, size) in enumerate(steps):
        if number == begin or (number > begin and stream is None):
            stream = Stream(store, options(), journals)
        if which == 7 and len(journals) == 1:
            journals.append(JournalOnPaper(store, "b"))
        of = journals[which % len(journals)]
        topic, queue = "st"[which % 2], which // 4
        live = of.catalog.objects(topic)
        if kind in {"commit", "twice"}:
            first = ends.get((of.broker, topic, queue), 0)
            ends[of.broker, topic, queue] = first + size
            of.commit(topic, [(queue, first, first + size - 1)], twice=kind == "twice")
            arrived |= {(of.broker, (topic, queue, offset)) for offset in range(first, first + size)}
        elif kind == "replace" and len(live) > 1:
            of.replace(live[-2:])
        elif kind == "erase" and live:
            name = live[which % len(live)]
            one, first, last = name.row_groups[0].runs[0]
            gone = (of.broker, (topic, one, first + size % (last - first + 1)))
            of.erase(name, one, gone[1][2])
            erased.add(gone)
            since_last.add(gone)
        elif kind == "expire" and live and stream is not None:
            one, _, last = live[0].row_groups[0].runs[0]
            of.expire(live[:1], {topic: {one: last + 1}})
            if of.broker not in stream.position.brokers:  # it joins with the rows visible at that time
                runs = [run for group in live[0].row_groups for run in group.runs]
                erased |= {(of.broker, (topic, run[0], n)) for run in runs for n in range(run[1], run[2] + 1)}
        elif kind == "other":
            of.commit("other", [(0, number * 10, number * 10 + 3)])
        elif stream is not None and kind == "batch":
            batches = len(stream.rows)
            stream.batch(size)
            since_last = set() if len(stream.rows) > batches else since_last
        elif stream is not None and kind == "restart":
            stream.restart()
        elif stream is not None and kind == "replay" and stream.rows:
            assert stream.replay() == [row for row in stream.rows[-1] if row not in since_last]
    if stream is None:
        stream = Stream(store, options(), journals)
    stream.drain()
    rows = stream.all_rows()
    assert len(rows) == len(set(rows))
    assert arrived - erased <= set(rows) <= arrived


def one_topic(**told: str) -> tuple[MemoryStore, JournalOnPaper, Options]:
    store = MemoryStore()
    return store, JournalOnPaper(store), options(**told)


@pytest.mark.parametrize("asked", ["earliest", "latest"])
def test_repeated_first_batch_has_the_same_rows(asked: str) -> None:
    """If the first batch was aborted, Spark requests the start again, when there are more rows."""
    store = MemoryStore()
    journal = JournalOnPaper(store)
    journal.commit("s", [(0, 0, 4)])
    stream = Stream(store, options(startingOffsets=asked), [journal])
    journal.commit("s", [(0, 5, 6)])
    first = stream.batch()
    assert [row[2] for _, row in first] == list(range(0 if asked == "earliest" else 5, 7))
    journal.commit("s", [(0, 7, 9)])
    stream.restart()
    assert stream.replay() == first
    assert [row[2] for _, row in stream.batch()] == [7, 8, 9]


def test_stream_started_on_an_empty_topic_reads_new_rows_once() -> None:
    """The first batch has no rows, so its start and end are equal."""
    store = MemoryStore()
    journal = JournalOnPaper(store)
    journal.tell("s")
    stream = Stream(store, options(), [journal])
    nothing = stream.position
    journal.commit("s", [(0, 0, 4)])
    stream.restart()
    stream.before, stream.position = None, nothing
    assert stream.replay() == []
    assert [row[2] for _, row in stream.batch()] == [0, 1, 2, 3, 4]


def test_rows_that_expired_unread_are_an_error_with_offsets() -> None:
    store, journal, asked = one_topic()
    names = [journal.commit("s", [(0, 10 * n, 10 * n + 9)]) for n in range(3)]
    stream = Stream(store, asked, [journal])
    journal.expire(names[:2], {"s": {0: 20}})
    stream.position = stream.kept(stream.planner.latest(stream.position, 15))
    journal.delete(names[:2])
    with pytest.raises(DataLoss, match=r"topic s, queue 0, offsets 0 to 14: they expired.*failOnDataLoss=false"):
        stream.replay()
    lenient = Stream(store, asked._replace(fails_on_data_loss=False), [journal])
    lenient.before, lenient.position = stream.before, stream.position
    assert lenient.replay() == []
    assert [row[1][2] for row in lenient.batch()] == list(range(20, 30))


def test_position_below_the_journal_start_is_data_loss() -> None:
    """The first entries of the journal were deleted, so the rows that they added are unknown."""
    store, journal, asked = one_topic()
    stream = Stream(store, asked, [journal])
    for n in range(5):
        journal.commit("s", [(0, n, n)])
    stream.restart()
    stream.planner.newest()
    stream.planner._refresh()
    for seq in (1, 2, 3):
        store.delete(journal_key("", "a", seq))
    with pytest.raises(DataLoss, match=r"a: the entries of its journal behind 0 were deleted.*failOnDataLoss=false"):
        stream.batch()
    stream.asked = asked._replace(fails_on_data_loss=False)
    planner = JournalStream(store, stream.asked)
    planner._journals = stream.planner._journals
    stream.planner = planner
    assert stream.batch() == []
    journal.commit("s", [(0, 5, 7)])
    assert [row[1][2] for row in stream.batch()] == [5, 6, 7]


def test_refresh_requests_the_next_entries_without_a_listing() -> None:
    store, journal, asked = one_topic()
    journal.commit("s", [(0, 0, 4)])
    stream = Stream(store, asked, [journal])
    stream.drain()
    listed: list[str] = []
    store.on_call = lambda verb, key: listed.append(key) if verb == "list" else None
    assert stream.batch() == []
    journal.commit("s", [(0, 5, 6)])
    assert [row[1][2] for row in stream.batch()] == [5, 6]
    assert listed == []


def test_late_entry_at_a_deleted_number_is_ignored() -> None:
    store, journal, asked = one_topic()
    stream = Stream(store, asked, [journal])
    position = stream.planner._journals["a"].catalog.next_seq
    names = [journal.commit("s", [(0, n, n)]) for n in range(3)]
    for seq in range(position, journal.catalog.next_seq):
        store.delete(journal_key("", "a", seq))
    store.put(journal_key("", "a", 0), encode_entry(Shortened()))
    store.put(journal_key("", "a", position), encode_entry(Commit(writer="late", round=9, names=names[2:])))
    with pytest.raises(FileNotFoundError, match="its journal is shortened"):
        stream.planner.latest(stream.position, None)
    assert stream.planner._journals["a"].catalog.next_seq == position


def checkpointed(store: MemoryStore, journal: JournalOnPaper) -> None:
    """Write a checkpoint, and delete earlier checkpoints and entries below it."""
    keys = [info.key for info in store.list("") if info.key != journal_key("", "a", 0)]
    put_checkpoint(store, journal.catalog, "a")
    newest = journal_key("", "a", journal.catalog.next_seq - 1)  # identifies the following entries
    for key in set(keys) - {newest}:
        store.delete(key)
    store.put(journal_key("", "a", 0), encode_entry(Shortened()))


def test_stream_survives_the_deletion_of_its_checkpoint() -> None:
    """A topic is loaded from the checkpoint on demand, and again after each entry about it."""
    store, journal, asked = one_topic()
    journal.commit("s", [(0, 0, 4)])
    checkpointed(store, journal)
    stream = Stream(store, asked, [journal])
    assert [row[1][2] for row in stream.batch()] == [0, 1, 2, 3, 4]
    journal.commit("s", [(0, 5, 6)])
    assert [row[1][2] for row in stream.batch()] == [5, 6]
    checkpointed(store, journal)
    journal.commit("s", [(0, 7, 9)])
    assert [row[1][2] for row in stream.batch()] == [7, 8, 9]
    assert [row[1][2] for row in stream.replay()] == [7, 8, 9]


def test_pending_entries_of_a_journal_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "_PENDING_MAX_BYTES", 2_000)
    store, journal, asked = one_topic()
    journal.commit("s", [(0, 0, 0)])
    checkpointed(store, journal)
    stream = Stream(store, asked, [journal])
    stream.drain()
    begun = stream.planner._journals["a"].catalog
    for n in range(1, 20):
        journal.commit("s", [(0, n, n)])
        put_checkpoint(store, journal.catalog, "a")
        assert [row[1][2] for row in stream.batch()] == [n]
    following = stream.planner._journals["a"]
    assert following.catalog is not begun and following._pending_bytes <= 2_000


def test_entries_of_other_topics_make_no_batch() -> None:
    store, journal, asked = one_topic()
    journal.commit("s", [(0, 0, 4)])
    stream = Stream(store, asked, [journal])
    assert len(stream.batch()) == 5
    for n in range(IDLE_ENTRIES - 1):
        journal.commit("other", [(0, n, n)])
    assert stream.batch() == [] and len(stream.rows) == 1
    journal.commit("other", [(0, 999, 999)])
    assert stream.batch() == [] and len(stream.rows) == 2
    assert stream.position.brokers["a"].through == journal.catalog.next_seq - 1


def test_available_now_run_ends_despite_new_rows() -> None:
    store, journal, asked = one_topic()
    journal.commit("s", [(0, 0, 9)])
    stream = Stream(store, asked, [journal])
    journal.commit("s", [(0, 10, 19)])
    stream.planner.stop_at_now()
    journal.commit("s", [(0, 20, 29)])
    while stream.batch(7):
        pass
    assert [row[1][2] for row in stream.all_rows()] == list(range(20))


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({"startingOffsets": "latest"}, [10, 11]),
        ({"startingOffsets": "earliest"}, list(range(12))),
        ({"startingOffsets": '{"s": {"0": 7}}'}, list(range(7, 12))),
        ({"startingOffsets": '{"s": {"a": {"0": -1}}}'}, [10, 11]),
        ({"startingOffsets": '{"s": {"b": {"0": 7}}}'}, list(range(12))),
        ({"startingTimestamp": "2000"}, [5, 6, 7, 8, 9, 10, 11]),
    ],
)
def test_stream_starts_at_its_configured_position(told: dict[str, str], found: list[int]) -> None:
    store, journal, asked = one_topic(**told)
    journal.commit("s", [(0, 0, 4)], at=1999)
    journal.commit("s", [(0, 5, 9)], at=2000)
    stream = Stream(store, asked, [journal])
    journal.commit("s", [(0, 10, 11)], at=3000)
    stream.drain()
    assert [row[1][2] for row in stream.all_rows()] == found


def test_unassigned_queues_are_not_read() -> None:
    store, journal, _ = one_topic()
    journal.commit("s", [(0, 0, 1), (1, 0, 1)])
    asked = options_of_stream({"store": "dir:/x", "assign": '{"s": [1]}', "startingOffsets": "earliest"})
    stream = Stream(store, asked, [journal])
    journal.commit("s", [(0, 2, 3), (1, 2, 3)])
    stream.drain()
    assert [row[1] for row in stream.all_rows()] == [("s", 1, offset) for offset in range(4)]


def test_unknown_topic_is_refused_but_a_pattern_may_match_later() -> None:
    store, journal, _ = one_topic()
    named = options_of_stream({"store": "dir:/x", "subscribe": "s,nope"})
    journal.tell("s")
    with pytest.raises(FileNotFoundError, match="topic nope"):
        JournalStream(store, named).initial()
    stream = Stream(store, options(), [journal])
    assert stream.batch() == []
    journal.commit("t", [(0, 0, 1)])
    assert len(stream.batch()) == 2
