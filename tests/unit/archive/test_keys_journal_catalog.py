import msgspec
import pytest

from neve.archive.catalog.catalog import Catalog, GapHit, Location, OutOfOrder
from neve.archive.format import keys
from neve.archive.format.journal import (
    COMPACT,
    Abort,
    AnyEntry,
    Commit,
    Deleted,
    Epoch,
    Expire,
    Gap,
    MalformedEntry,
    NewerFormat,
    OpenRewrite,
    Replace,
    Topic,
    decode_entry,
    encode_entry,
)
from tests.kit.archive.catalog_state import expiring_keys
from tests.kit.archive.journal_entries import DAY, committed, intent, to_compact


def catalog_of(*entries: AnyEntry) -> Catalog:
    catalog = Catalog()
    for seq, entry in enumerate(entries):
        catalog.apply(seq, entry)
    return catalog


@pytest.mark.parametrize("name", ["plain", "%RETRY%g|x", "a=b/c", "..", "ü", "t\x00", "a b"])
def test_escaped_name_round_trips_as_one_path_component(name: str) -> None:
    escaped = keys.escape(name)
    assert keys.unescape(escaped) == name
    assert "/" not in escaped and escaped not in {".", ".."}


def test_retry_topics_escape_as_hive_readers_decode_them() -> None:
    assert keys.escape("%RETRY%g|x") == "%25RETRY%25g%7Cx"


def test_data_key_round_trips() -> None:
    key = keys.data_key("a/b", "%R%/x", DAY, "broker-a", start=7, end=4096, epoch=3)
    assert keys.parse_data_key(key) == ("a/b", "%R%/x", DAY, "broker-a", 7, 4096, 3, 0)
    assert keys.parse_data_key("topic=x/other.parquet") is None


@pytest.mark.parametrize("name", ["a" * 250, "%" * 84, "|" * 84, "%RETRY%" + "%" * 248, "ü" * 60, "~" * 255])
def test_long_topic_is_truncated_at_a_character_and_stays_unique(name: str) -> None:
    component = keys.topic_component(name)
    stem, digest = component.removeprefix("topic=").split("~")
    assert len(component) <= keys.MAX_COMPONENT
    assert len(digest) == 64
    assert keys.escape(name).startswith(stem)
    assert keys.escape(keys.unescape(stem)) == stem, "a %XX was cut"
    assert keys.topic_component(name[:-1] + "x") != component
    assert not keys.fits_key(name)
    key = keys.data_key("p", name, DAY, "b", start=1, end=2, epoch=3)
    assert keys.parse_data_key(key) == ("p", None, DAY, "b", 1, 2, 3, 0)


def test_rewrite_of_a_range_in_one_epoch_has_its_own_key() -> None:
    made = [keys.data_key("", "t", DAY, "b", start=7, end=4096, epoch=3, rewrite=n) for n in (0, 1, 12)]
    assert len(set(made)) == 3
    assert [key.rpartition("/")[2] for key in made] == [
        f"{7:020d}-{4096:020d}-{tail}.parquet" for tail in ("e3", "e3.1", "e3.12")
    ]
    assert [(parts.epoch, parts.rewrite) for parts in map(keys.parse_data_key, made) if parts] == [
        (3, 0),
        (3, 1),
        (3, 12),
    ]
    for wrong in ("e3.0", "e3.01", "e3.", "e3.1.2", "e3.x", ".1"):
        assert keys.parse_data_key(made[0].replace("e3", wrong)) is None, wrong


def test_short_topic_keeps_its_original_key() -> None:
    assert keys.topic_component("a" * 249) == "topic=" + "a" * 249
    assert keys.topic_component("%" * 83) == "topic=" + "%25" * 83
    assert keys.topic_component("~") == "topic=%7E"
    assert keys.fits_key("%" * 83)


def test_broker_name_too_long_for_a_component_is_refused() -> None:
    with pytest.raises(keys.NameTooLong, match="brokerName"):
        keys.journal_key("", "b" * 249, 0)
    assert "b" * 248 in keys.journal_key("", "b" * 248, 0)


def test_entries_round_trip() -> None:
    name = committed("k", [(0, 0, 9)])
    entries: list[AnyEntry] = [
        Epoch(epoch=2, owner="o", log_uuid="u"),
        intent(1, name),
        Commit(round=1, names=[name], through={"t": 100}, writer="w", attempt=3),
        Abort(round=1, keys=["k"]),
        Gap(topic="t", queue=1, first=0, last=5, reason="lost"),
        Expire(keys=["k"], delete_after_ms=5, minimums={"t": {0: 4}}),
        Deleted(keys=["k"]),
        Topic(topic="t", deleted=True, minimums={0: 10}),
        Replace(old=["k"], new=[name], delete_after_ms=9),
        to_compact(1, ["k"], name),
        Abort(kind=COMPACT, round=1, reason="given up"),
    ]
    for entry in entries:
        assert decode_entry(encode_entry(entry)) == entry


def test_newer_entry_version_is_refused_and_garbage_reported() -> None:
    with pytest.raises(NewerFormat):
        decode_entry(msgspec.msgpack.encode({"type": "MIRACLE", "version": 2}))
    with pytest.raises(MalformedEntry):
        decode_entry(b"\xff\x00")
    with pytest.raises(MalformedEntry):
        decode_entry(msgspec.msgpack.encode({"type": "MIRACLE", "version": 1}))


def test_unknown_kind_of_rewrite_is_refused() -> None:
    for entry in (to_compact(1, ["k"]), Abort(kind=COMPACT, round=1, reason="")):
        fields = msgspec.msgpack.decode(encode_entry(entry))
        with pytest.raises(MalformedEntry, match="sorting"):
            decode_entry(msgspec.msgpack.encode(fields | {"kind": "sorting"}))
        with pytest.raises(NewerFormat):
            decode_entry(msgspec.msgpack.encode(fields | {"version": 2}))
    fields = msgspec.msgpack.decode(encode_entry(to_compact(1, ["k"])))
    with pytest.raises(MalformedEntry, match="old keys"):
        decode_entry(msgspec.msgpack.encode(fields | {"old": []}))


def test_rewrite_and_round_with_the_same_number_are_independent() -> None:
    first, second = committed("a", [(0, 0, 9)]), committed("b", [(0, 10, 19)], start=100, end=200)
    merged, waiting = committed("m", [(0, 0, 19)], start=0, end=200), committed("w", [(0, 20, 29)], start=200, end=300)
    catalog = catalog_of(
        intent(1, first), Commit(round=1, names=[first]), intent(2, second), Commit(round=2, names=[second]),
        intent(3, waiting), to_compact(3, ["a", "b"], merged),
    )  # fmt: skip
    assert [name.key for name in catalog.rounds.open_intents()[3]] == ["w"]
    open_rewrite = OpenRewrite(COMPACT, ["a", "b"], intent(3, merged).names)
    assert catalog.rounds.open_rewrites() == {3: open_rewrite}
    assert catalog.knows("m"), "a sweep would take it"
    assert catalog.rounds.closed_by(Abort(round=3)) == ["w"]
    assert catalog.rounds.closed_by(Abort(kind=COMPACT, round=3, reason="")) == ["m"]
    catalog.apply(6, Abort(round=3))
    assert (catalog.rounds.open_intents(), catalog.rounds.open_rewrites()) == ({}, {3: open_rewrite})
    catalog.apply(7, Abort(kind=COMPACT, round=3, reason="given up"))
    assert catalog.rounds.open_rewrites() == {} and not catalog.knows("m")
    catalog.apply(8, to_compact(4, ["a", "b"], merged))
    catalog.apply(9, Replace(old=["a", "b"], new=[merged], delete_after_ms=1))
    assert catalog.rounds.open_rewrites() == {} and catalog.knows("m")
    assert (catalog.rounds.last_rewrite, catalog.rounds.last_round) == (4, 3)


def test_rewrite_does_not_change_log_offsets() -> None:
    name = committed("a", [(0, 0, 9)])
    catalog = catalog_of(intent(1, name), Commit(round=1, names=[name]))
    before = (catalog.rounds.last_round, catalog.rounds.intent_end, catalog.named_offsets("t"), catalog.through("t"))
    catalog.apply(2, to_compact(77, ["a"], committed("m", [(0, 0, 99), (5, 0, 9)], start=0, end=9999)))
    assert (
        catalog.rounds.last_round,
        catalog.rounds.intent_end,
        catalog.named_offsets("t"),
        catalog.through("t"),
    ) == before
    assert catalog.queues("t") == [0]
    assert catalog.next_uncovered("t", 0) == (100, None)


def test_find_crosses_groups_objects_and_gaps() -> None:
    catalog = catalog_of(
        Commit(round=1, names=[committed("a", [(0, 0, 9), (1, 0, 4)], [(1, 5, 9)])]),
        Gap(topic="t", queue=1, first=10, last=19, reason="restored"),
        Commit(round=2, names=[committed("b", [(1, 20, 29)], start=100, end=200)]),
    )
    hit = catalog.find("t", 1, 7)
    assert isinstance(hit, Location)
    assert (hit.name.key, hit.row_group, hit.first, hit.last) == ("a", 1, 5, 9)
    assert catalog.find("t", 1, 12) == GapHit(10, 20)
    assert catalog.next_location(hit) is None
    assert catalog.find("t", 1, 30) is None and catalog.find("t", 2, 0) is None
    assert (catalog.min_offset("t", 1), catalog.max_offset("t", 1)) == (0, 30)
    assert catalog.through("t") == 200


def test_open_intent_limits_the_archived_end_of_its_topic() -> None:
    first, second = committed("d1", [(0, 0, 9)], start=0, end=50), committed("d2", [(0, 10, 19)], start=50, end=100)
    catalog = catalog_of(intent(1, first, second), Commit(round=1, names=[second]))
    assert catalog.through("t") == 0
    assert [name.key for name in catalog.rounds.open_intents()[1]] == ["d1"]
    catalog.apply(2, Commit(round=1, names=[first], through={"t": 100}))
    assert catalog.through("t") == 100 and catalog.rounds.open_intents() == {}
    assert catalog.rounds.intent_end == 100 and catalog.named_offsets("t") == {0: 19}


def test_expired_objects_are_hidden_and_minimums_never_decrease() -> None:
    catalog = catalog_of(
        Commit(round=1, names=[committed("a", [(0, 0, 9)])]),
        Commit(round=2, names=[committed("b", [(0, 10, 19)], start=100, end=200)]),
        Expire(keys=["a"], delete_after_ms=77, minimums={"t": {0: 10}}),
    )
    assert catalog.find("t", 0, 3) is None and catalog.min_offset("t", 0) == 10
    assert expiring_keys(catalog) == {"a": 77} and catalog.knows("a")
    catalog.apply(3, Deleted(keys=["a"]))
    assert not catalog.knows("a")
    catalog.apply(4, Expire(keys=["b"], delete_after_ms=78))
    assert catalog.min_offset("t", 0) is None and catalog.recorded_minimum("t", 0) == 20


def test_replace_swaps_in_one_step_and_time_finds_the_first_group() -> None:
    catalog = catalog_of(
        Commit(round=1, names=[committed("a", [(0, 0, 4)], [(0, 5, 9)], newest=100)]),
        Commit(round=2, names=[committed("b", [(0, 10, 19)], start=100, end=200, newest=200)]),
    )
    for time_ms, first in ((0, 0), (100, 0), (101, 5), (102, 10), (200, 10)):
        found = catalog.queue("t", 0).by_time(time_ms)
        assert found is not None and found.first == first
    assert catalog.queue("t", 0).by_time(201) is None
    merged = committed("m", [(0, 0, 19)], start=0, end=200, newest=200)
    catalog.apply(2, Replace(old=["a", "b"], new=[merged], delete_after_ms=1))
    taken = catalog.find("t", 0, 11)
    assert isinstance(taken, Location) and taken.name.key == "m"
    assert catalog.min_offset("t", 0) == 0


def test_entries_are_applied_in_order() -> None:
    with pytest.raises(OutOfOrder):
        Catalog().apply(1, Deleted(keys=[]))
