"""A change is written to the log before it takes effect: a crash loses none and applies none twice."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from access.model import User
from access.store import AuthTables
from broker.metadata.metadata_log import ImageNeeded
from broker.pop.pop_log import PopCheckPoint
from broker.store.errors import StoreNotWritable
from broker.store.queue_changes import QueueChanges
from broker.tables.changes import CHANGES, DELAYS, SETTLED, ArchiveSettled, QueuesRaised, UnreadableChange
from broker.tables.state_file import _BEHIND
from broker.tables.subscription_group_manager import SubscriptionGroupConfig
from broker.tables.topic_config_manager import TopicConfig
from infra.clock import ManualClock
from infra.disk.filesystem import DiskFull
from infra.loop.in_steps import at_once
from infra.loop.parts import run_here
from neve.errors import BrokerError
from neve.record.codec import iter_records
from neve.remoting.codes import ResponseCode
from neve.remoting.names import METADATA_LOG, SYSTEM_GROUPS
from tests.kit.clock.turns import CALLS_IN_A_TURN, calls_in_turns
from tests.simulation.process import Killed, drive
from tests.unit.broker.metadata.members import CONFIG, DELAY_MS, TablesMember


@pytest.fixture
def member(tmp_path: Path) -> TablesMember:
    """A member with a topic, a group with a committed offset, and a user, all of them saved."""
    made = TablesMember(tmp_path / "users", ManualClock(1_700_000_000_000))
    made.topics.create_plain("t", 2)
    made.groups.find("g")
    for _ in range(5):
        made.put("t", b"old")
    made.offsets.commit("g", "t", 0, 4)
    made.change_users(lambda tables: tables.users.update(u=User("secret")))
    made.save()
    return made


def bodies(member: TablesMember, topic: str) -> list[bytes]:
    got = member.store.reader.get(topic, 0, member.store.queues.min_offset(topic, 0), 100, 1 << 20)
    return [record.body for buffer in got.buffers for record in iter_records(buffer)]


def deliver_a_delayed_message(member: TablesMember) -> None:
    member.put_delayed("t")
    member.clock.advance(DELAY_MS)
    assert member.schedule.deliver_due() == 1


CHANGES_OF_ALL_KINDS: dict[str, Callable[[TablesMember], object]] = {
    "a topic is made": lambda member: member.topics.create_plain("new", 3),
    "a topic is altered": lambda member: member.topics.update(TopicConfig(topic_name="t", perm=4)),
    "a group is made": lambda member: member.groups.find("new"),
    "a group is altered": lambda member: member.groups.update(
        SubscriptionGroupConfig(group_name="g", consume_enable=False)
    ),
    "a group may not read": lambda member: member.groups.set_forbidden("g", "t", forbidden=True),
    "a group pops": lambda member: member.modes.set("t", "g", "POP", 2),
    "a group is set back": lambda member: member.offsets.reset("g", "t", 0, 1),
    "a group's positions are copied": lambda member: at_once(member.offsets.clone("g", "copy", "t")),
    "delayed messages are delivered": deliver_a_delayed_message,
}


@pytest.mark.parametrize("kind", CHANGES_OF_ALL_KINDS)
def test_logged_change_is_applied_after_a_crash_before_its_table_is_saved(member: TablesMember, kind: str) -> None:
    before = member.tables()
    CHANGES_OF_ALL_KINDS[kind](member)
    changed = member.tables()
    assert changed != before
    for _ in range(2):
        member.kill()
        assert member.tables() == changed


@pytest.mark.parametrize("kind", CHANGES_OF_ALL_KINDS)
def test_change_that_the_log_refuses_has_no_effect(member: TablesMember, kind: str) -> None:
    if kind == "delayed messages are delivered":
        member.put_delayed("t")
    before = member.tables()
    member.store.follow()  # refuses puts like a slave, and so like a full disk
    if kind == "delayed messages are delivered":
        assert member.schedule.deliver_due() == 0
    elif kind == "a group is made":
        found = member.groups.find("new")
        assert found == SubscriptionGroupConfig(group_name="new"), "who reads is served"
    else:
        with pytest.raises(BrokerError) as refusal:
            CHANGES_OF_ALL_KINDS[kind](member)
        assert refusal.value.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert member.tables() == before


def test_deletion_that_the_disk_refuses_has_no_effect(member: TablesMember) -> None:
    before, room = member.tables(), member.disk.capacity
    member.disk.capacity = 0
    with pytest.raises(DiskFull):
        member.delete_topic("t")
    member.disk.capacity = room
    assert member.tables() == before
    assert bodies(member, "t") == [b"old"] * 5
    member.kill()
    assert member.tables() == before


def test_deletion_that_the_log_refuses_has_no_effect(member: TablesMember) -> None:
    before = member.tables()
    member.store.follow()
    for delete in (member.delete_topic, functools.partial(member.delete_group, with_offsets=True)):
        with pytest.raises(BrokerError):
            delete("t" if delete == member.delete_topic else "g")
    assert member.tables() == before
    assert bodies(member, "t") == [b"old"] * 5


def test_logged_change_of_a_user_survives_a_crash_before_its_file_write(
    member: TablesMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(tables: AuthTables) -> None:
        del tables.users["u"]
        tables.users["w"] = User("other")

    with monkeypatch.context() as patch:
        patch.setattr(type(member.users), "_write", lambda self, tables: _die())
        with pytest.raises(Killed):
            member.change_users(edit)
    assert member.users.tables.users == {"u": User("secret")}
    member.kill()
    assert member.users.tables.users == {"w": User("other")}


def _die() -> None:
    raise Killed


@pytest.mark.parametrize("dies_in", ["delete_topic", "remember", "nowhere"])
def test_deletion_interrupted_by_a_crash_is_completed_at_the_next_start(
    member: TablesMember, monkeypatch: pytest.MonkeyPatch, dies_in: str
) -> None:
    member.pops.open("g", "t", 0, 0)
    member.pops.record(PopCheckPoint("g", "t", 0, 5, 1, 60_000, False, [3, 4]))
    with monkeypatch.context() as patch:
        if dies_in == "delete_topic":
            patch.setattr(QueueChanges, "delete_topic", lambda self, topic, restart_at_zero: _die())
        elif dies_in == "remember":
            patch.setattr(type(member.topics.file), "save", lambda self: _die())
        if dies_in == "nowhere":
            member.delete_topic("t")
        else:
            with pytest.raises(Killed):
                member.delete_topic("t")
    member.kill()
    assert member.topics.select("t") is None
    assert member.store.queues.names_of("t") == []
    assert member.offsets.groups_of("t") == []
    assert member.pops.find("g", "t", 0) is None
    member.topics.create_plain("t", 1)
    begins_at = 5 if dies_in == "delete_topic" else 0
    assert member.put("t", b"new") == begins_at, "a start that finishes it can't know what was archived"
    assert bodies(member, "t") == [b"new"]


def test_deletion_that_cannot_drop_its_queues_fails_the_store(
    member: TablesMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No table is saved before the restart.

    No offset is assigned twice either, because the archive may still hold the messages.
    """
    write, writes = member.disk.write_atomic, list[Path]()

    def refuse_the_second(path: Path, data: bytes) -> None:
        writes.append(path)
        if len(writes) == 2:
            raise DiskFull(28, "no space left on device")
        write(path, data)

    member.sync()
    with monkeypatch.context() as patch:
        patch.setattr(member.disk, "write_atomic", refuse_the_second)
        with pytest.raises(StoreNotWritable):
            member.delete_topic("t")
    assert {path.name for path in writes} == {"queue_state"}
    assert isinstance(member.store.end.failure, DiskFull)
    with pytest.raises(StoreNotWritable):
        member.put("t", b"on top of what is gone")
    for part in (member.topics, member.offsets):
        with pytest.raises(StoreNotWritable):
            drive(part.file.save())
    for _ in range(2):
        member.kill()
        assert (member.topics.select("t"), member.store.queues.names_of("t")) == (None, [])
        assert member.store.queues.records.ended() == {"t": {0: 5}}, (
            "where the archive hides it, should it have any of it"
        )
    member.topics.create_plain("t", 1)
    assert member.put("t", b"new") == 5
    member.kill()
    assert bodies(member, "t") == [b"new"]


def test_deletion_is_complete_or_absent_after_a_power_cut_in_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = set()
    for seed in range(20):
        member = TablesMember(tmp_path / str(seed), ManualClock(1_700_000_000_000), seed)
        member.topics.create_plain("t", 1)
        for _ in range(5):
            member.put("t", b"old")
        member.offsets.commit("g", "t", 0, 4)
        member.save()
        member.sync()
        before = member.store.max_physical_offset
        with monkeypatch.context() as patch:
            patch.setattr(QueueChanges, "delete_topic", lambda self, topic, restart_at_zero: _die())
            with pytest.raises(Killed):
                member.delete_topic("t")
        member.power_cut()
        is_deleted = member.store.max_physical_offset > before
        outcomes.add(is_deleted)
        assert bodies(member, "t") == ([] if is_deleted else [b"old"] * 5)
        assert (member.topics.select("t") is None) == is_deleted
        assert member.offsets.groups_of("t") == ([] if is_deleted else ["g"])
        member.topics.create_plain("t", 1)
        assert member.put("t", b"new") == 5
    assert outcomes == {True, False}


def test_recreated_topic_keeps_its_messages_when_its_deletion_is_replayed(member: TablesMember) -> None:
    """All files are older than both changes. The store does not record the deletion of a topic without messages."""
    member.topics.create_plain("empty", 1)
    saved = {path.name: member.disk.read(path) for path in map(CONFIG.joinpath, member.disk.list_dir(CONFIG))}
    for topic in ("t", "empty"):
        member.delete_topic(topic)
        member.topics.create_plain(topic, 1)
        member.put(topic, b"new")
    for name, data in saved.items():
        member.disk.write_atomic(CONFIG / name, data)
    member.kill()
    assert {topic: bodies(member, topic) for topic in ("t", "empty")} == {"t": [b"new"], "empty": [b"new"]}
    assert member.topics.require("t").write_queue_nums == 1


def test_changes_lost_in_a_power_cut_do_not_hide_their_successors(member: TablesMember) -> None:
    """The topics file is on the disk, but the change that it includes is not in the log."""
    member.sync()
    member.topics.create_plain("lost in the log", 1)
    member.topics.file.save_now()
    member.power_cut()
    assert member.journal.position == 3, "the story needs a log that lost its last change"
    assert member.topics.select("lost in the log") is not None
    member.topics.create_plain("new", 1)
    member.kill()
    assert member.topics.select("new") is not None
    assert member.topics.select("lost in the log") is not None


def test_table_file_of_an_older_version_is_used_unchanged(member: TablesMember) -> None:
    """A topic that the older version dropped without a record is not restored."""
    path = CONFIG / "topics.json"
    table = json.loads(member.disk.read(path))
    assert table.pop("logOffset") == member.journal.position
    del table["topicConfigTable"]["t"]
    member.disk.write_atomic(path, json.dumps(table).encode())
    member.kill()
    assert member.topics.select("t") is None
    member.topics.create_plain("new", 1)
    member.kill()
    assert [member.topics.select(name) is not None for name in ("t", "new")] == [False, True]


@pytest.mark.parametrize("position", ["-1", "1.5", "true", '"3"'])
def test_invalid_log_position_in_a_file_is_damage(member: TablesMember, position: str) -> None:
    path = CONFIG / "topics.json"
    member.disk.write_atomic(
        path, member.disk.read(path).replace(b'"logOffset":3', b'"logOffset":' + position.encode())
    )
    with pytest.raises(ValueError, match="damaged: logOffset"):
        member.kill()


def test_record_of_a_newer_version_stops_a_start_and_a_slave(member: TablesMember) -> None:
    member.topics.create_plain("before", 1)
    kind = b'{"v":1,"kind":"moon","phase":3}'
    member.put_change(kind)
    behind = b'{"v":1,"kind":"user gone","name":"u"}'
    member.put_change(behind)
    at = member.journal.position
    for _ in range(2):
        with pytest.raises(UnreadableChange, match=r"kind 'moon'.*newer neve"):
            member.metadata.catch_up()
        assert member.journal.position == at
    assert "u" in member.users.tables.users
    with pytest.raises(UnreadableChange, match=r"kind 'moon'.*newer neve"):
        member.kill()


FOREIGN = (
    b'{"v":1,"kind":"user","name":"evil","user":{"password":"s","userType":"Super","userStatus":"enable"}}',
    b'{"v":1,"kind":"topic gone","topic":"t","ends":{"0":5},"beginsAgain":true,"version":{"counter":9}}',
    b'{"v":1,"kind":"raised","queues":{"t":{"0":1152921504606846976}}}',
    b'{"v":1,"kind":"offsets","group":"g","topic":"t","offsets":{"0":5}}',
    b"garbage",
)


def put_foreign_records(member: TablesMember) -> None:
    for body in FOREIGN:
        member.put_foreign(body)
    member.put_foreign(b'{"v":1,"kind":"delays","offsets":{"1":99}}', DELAYS)
    member.put_foreign(b'{"v":1,"kind":"settled","epoch":77}', SETTLED)


def test_start_ignores_changes_that_no_neve_broker_wrote(member: TablesMember) -> None:
    deliver_a_delayed_message(member)
    before, ends = member.tables(), member.store.queues.names_of("t")
    put_foreign_records(member)
    member.kill()
    assert member.tables() == before
    assert member.store.queues.names_of("t") == ends
    assert member.store.queues.max_offset("t", 0) == 6
    assert member.writer.internal.ignored[METADATA_LOG] >= len(FOREIGN)
    member.topics.create_plain("new", 1)  # the next own record follows the foreign ones
    member.kill()
    assert "new" in member.topics.topics


def test_slave_ignores_changes_that_no_neve_broker_wrote(member: TablesMember) -> None:
    before = member.tables()
    put_foreign_records(member)
    member.put_change(b'{"v":1,"kind":"user gone","name":"u"}')
    member.put_foreign(b"garbage")
    member.metadata.catch_up()
    assert "u" not in member.users.tables.users
    assert "evil" not in member.users.tables.users
    assert {**member.tables(), "users": None} == {**before, "users": None}
    assert not member.settled
    assert member.metadata.lead() == []


def test_last_delay_positions_are_found_before_many_foreign_records(member: TablesMember) -> None:
    deliver_a_delayed_message(member)
    for _ in range(600):
        member.put_foreign(b"garbage", DELAYS)
    member.schedule.install({})
    member.schedule.follow()
    assert member.schedule.positions() == {1: 1}


def test_change_that_cannot_be_applied_is_not_skipped(member: TablesMember) -> None:
    body = b'{"v":1,"kind":"topic","config":{"perm":"x"},"version":{}}'
    member.put_change(body)
    at = member.journal.position
    with pytest.raises(UnreadableChange, match="damaged"):
        member.metadata.catch_up()
    assert member.journal.position == at


def test_tables_ahead_of_a_truncated_log_follow_it_only_after_a_reload(
    member: TablesMember,
) -> None:
    """Otherwise the changes that replace the truncated ones would be skipped."""
    shared = member.store.max_physical_offset
    member.topics.create_plain("cut", 1)
    member.topics.create_plain("cut too", 1)
    member.store.follow()
    member.store.truncate(shared, epoch=1, floor=shared)
    with pytest.raises(ImageNeeded, match="the tables have changes up to"):
        member.metadata.catch_up()
    run_here(member.metadata.reload_parts())
    assert member.metadata.catch_up() == 0
    assert member.journal.position == member.store.queues.next_offset(METADATA_LOG, CHANGES)
    assert set(member.topics.topics) == {"t"}


@pytest.mark.parametrize("saved", [True, False])
def test_files_ahead_of_a_truncated_log_are_reported_before_they_change(member: TablesMember, saved: bool) -> None:
    """The log does not contain a table's former content. Only an image does."""
    shared, position = member.store.max_physical_offset, member.journal.position
    member.topics.create_plain("cut", 1)
    if saved:
        member.save()
        drive(member.topics.file.save())
    member.store.follow()
    run_here(member.metadata.reload_parts())
    assert member.lost == [], "nothing is cut yet"
    member.store.truncate(shared, epoch=1, floor=shared)
    run_here(member.metadata.reload_parts())
    assert [offsets[0] for offsets in member.lost] == ([position + 1] if saved else [])
    assert ("cut" in member.topics.topics) is saved
    run_here(member.metadata.reload_parts())
    assert len(member.lost) == saved, "it is kept by who was told"


def test_tables_are_reloaded_in_turns_of_bounded_work(member: TablesMember) -> None:
    for number in range(20_000):
        member.offsets.commit("g", f"topic-{number}", 0, number)
    member.offsets.file.save_now()
    for number in range(500):
        member.topics.create_plain(f"topic-{number}", 1)
    topics, offsets = dict(member.topics.topics), member.offsets.table()
    turns = calls_in_turns(member.metadata.reload_parts())
    assert (member.topics.topics, member.offsets.table()) == (topics, offsets)
    assert max(turns) < CALLS_IN_A_TURN, turns
    assert len(turns) > 20


def test_foreign_records_are_skipped_in_turns_of_bounded_work(member: TablesMember) -> None:
    for _ in range(1_000):
        member.put_foreign(b"{}")
    turns = calls_in_turns(member.metadata.reload_parts())
    assert max(turns) < CALLS_IN_A_TURN, turns
    assert len(turns) > 20


def test_changes_in_the_log_that_are_not_visible_yet_are_not_lost(member: TablesMember) -> None:
    member.store.visibility.join_set(member.store.max_physical_offset)
    member.topics.create_plain("t2", 1)
    drive(member.topics.file.save())
    assert member.store.queues.max_offset(METADATA_LOG, CHANGES) < member.topics.file.log_offset  # type: ignore[operator]
    run_here(member.metadata.reload_parts())
    assert member.lost == []


def test_log_that_begins_above_the_tables_position_needs_an_image(member: TablesMember, tmp_path: Path) -> None:
    young = TablesMember(tmp_path / "young", ManualClock(1_700_000_000_000))
    young.store.queue_changes.create_queue_at(METADATA_LOG, CHANGES, 3)
    member.topics.create_plain("new", 1)
    for record in member.records():
        if record.topic == METADATA_LOG and record.queue_offset >= 3:
            young.receive(record)
    with pytest.raises(ImageNeeded, match="from 0 to 3"):
        young.metadata.catch_up()
    assert young.topics.topics == {}
    member.put("new")
    young.metadata.install(member.metadata.image())
    assert young.store.queues.next_offset("new", 0) == member.store.queues.next_offset("new", 0) == 1, (
        "its log lacks the message"
    )
    young.metadata.install_offsets(at_once(member.metadata.offsets_image()))
    hers, ours = young.tables(), member.tables()
    assert {name: part for name, part in hers.items() if name != "queues"} == {
        name: part for name, part in ours.items() if name != "queues"
    }


@pytest.mark.parametrize("is_young", [False, True])
def test_deletion_older_than_an_image_drops_the_followers_queues(
    member: TablesMember, tmp_path: Path, is_young: bool
) -> None:
    """Otherwise the slave's old messages would be visible once it is the master and the topic is created again."""
    slave = TablesMember(tmp_path / "slave", ManualClock(1_700_000_000_000))
    begin = 0
    if is_young:  # its log begins behind the first changes
        begin = 2
        slave.store.queue_changes.create_queue_at(METADATA_LOG, CHANGES, begin)
    member.delete_topic("t")
    member.put("other")
    for record in member.records():
        if record.topic != METADATA_LOG or record.queue_offset >= begin:
            slave.receive(record, follows=False)
    assert slave.store.queues.names_of("t"), "confirmed, and not followed yet"
    slave.metadata.install(member.metadata.image())
    assert not slave.store.queues.names_of("t")
    seen = len(member.records())
    member.topics.create_plain("t", 2)
    member.put("t", b"new")
    for record in member.records()[seen:]:
        slave.receive(record)
    slave.metadata.catch_up()
    assert bodies(slave, "t") == bodies(member, "t") == [b"new"]


@pytest.mark.parametrize("by_image", [False, True])
def test_raised_queue_resumes_there_on_a_slave_and_after_a_restart(
    member: TablesMember, tmp_path: Path, by_image: bool
) -> None:
    slave = TablesMember(tmp_path / "slave", ManualClock(1_700_000_000_000))
    member.raise_queue("t", 0, 7)
    member.raise_queue("t", 1, 3)
    member.put("other")
    for record in member.records():
        slave.receive(record, follows=False)
    assert slave.store.queues.next_offset("t", 0) == 5, "confirmed, and not followed yet"
    if by_image:
        slave.metadata.install(member.metadata.image())
    else:
        slave.metadata.catch_up()
    for _ in range(2):
        assert [slave.store.queues.next_offset("t", queue) for queue in (0, 1)] == [12, 3]
        assert [slave.store.queues.min_offset("t", queue) for queue in (0, 1)] == [12, 3], "below is the archive's"
        slave.power_cut()
    assert (member.put("t"), slave.put("t")) == (12, 12)


@pytest.mark.parametrize("by_image", [False, True])
@pytest.mark.parametrize("dies", ["kill", "power_cut"])
def test_raised_queue_resumes_there_after_a_followers_crash(
    member: TablesMember, tmp_path: Path, dies: str, by_image: bool
) -> None:
    """The next master assigns none of the skipped offsets and shows no message below them."""
    slave = TablesMember(tmp_path / "slave", ManualClock(1_700_000_000_000))
    member.raise_queue("t", 0, 7)
    for record in member.records():
        slave.receive(record, follows=False)
    slave.sync()
    slave.metadata.catch_up()
    slave.store.follow()
    if by_image:  # from then on its table files are newer than the record
        slave.metadata.install(member.metadata.image())
    for _ in range(2):
        getattr(slave, dies)()
        assert (slave.store.queues.next_offset("t", 0), slave.store.queues.min_offset("t", 0)) == (12, 12)
        slave.store.follow()
    slave.store.lead()
    assert slave.put("t") == 12


@pytest.mark.parametrize("who", ["its master", "a slave"])
@pytest.mark.parametrize("above", [True, False])
def test_truncation_lowers_a_raised_queue_only_if_it_removes_the_record(
    member: TablesMember, tmp_path: Path, who: str, above: bool
) -> None:
    before = member.store.max_physical_offset
    member.raise_queue("t", 0, 7)
    behind = member.store.max_physical_offset
    assert member.put("t") == 12
    cut = member if who == "its master" else TablesMember(tmp_path / "slave", ManualClock(1_700_000_000_000))
    if cut is not member:
        for record in member.records():
            cut.receive(record)
    cut.metadata.install(member.metadata.image())
    cut.store.follow()
    cut.store.truncate(behind if above else before, epoch=1, floor=0)
    run_here(cut.metadata.reload_parts())
    expected = (12, 12) if above else (5, 5)
    for _ in range(2):
        assert (cut.store.queues.next_offset("t", 0), cut.store.queues.min_offset("t", 0)) == expected
        cut.power_cut()
        cut.store.follow()


@pytest.mark.parametrize("who", ["its master", "a slave"])
@pytest.mark.parametrize("came_behind", [0, 2])
@pytest.mark.parametrize("above", [True, False])
def test_truncation_lowers_a_raised_empty_queue_only_with_its_record(
    member: TablesMember, tmp_path: Path, who: str, came_behind: int, above: bool
) -> None:
    """Otherwise the next master's first message of the queue, at offset 0, would always be refused."""
    before = member.store.max_physical_offset
    member.raise_queue("t", 3, 7)
    behind = member.store.max_physical_offset
    for number in range(came_behind):
        assert member.put("t", queue=3) == 7 + number
    cut = member if who == "its master" else TablesMember(tmp_path / "slave", ManualClock(1_700_000_000_000))
    if cut is not member:
        for record in member.records():
            cut.receive(record)
        cut.metadata.catch_up()
    cut.store.after_flush(cut.store.visibility.flush())
    cut.store.follow()
    cut.store.truncate(behind if above else before, epoch=1, floor=0)
    run_here(cut.metadata.reload_parts())
    expected = 7 if above else 0
    for _ in range(2):
        assert (cut.store.queues.next_offset("t", 3), cut.store.queues.max_offset("t", 3)) == (expected, expected)
        assert cut.store.queues.min_offset("t", 3) == expected
        cut.power_cut()
        cut.store.follow()
    cut.store.lead()
    assert cut.put("t", queue=3) == expected
    assert [entry for entry in (cut.store.reader.entry("t", 3, at) for at in range(expected + 1)) if entry] != []


def test_truncation_keeps_a_begin_offset_of_an_image(tmp_path: Path) -> None:
    """Messages below it are archived or expired, so its offsets must not be assigned again."""
    member = TablesMember(tmp_path, ManualClock(1_700_000_000_000))
    before = member.store.max_physical_offset
    member.topics.create_plain("t", 1)
    member.store.follow()
    member.store.queue_changes.begin_queues({"t": {3: 70}}, member.store.max_physical_offset)
    member.store.truncate(before, epoch=1, floor=0)
    for _ in range(2):
        assert member.store.queues.next_offset("t", 3) == 70
        member.power_cut()
        member.store.follow()


def test_truncation_of_the_later_of_two_raises_keeps_the_earlier(member: TablesMember) -> None:
    member.raise_queue("t", 0, 7)
    behind = member.store.max_physical_offset
    member.store.visibility.join_set(behind)
    member.raise_queue("t", 0, 4)
    assert member.store.queues.next_offset("t", 0) == 16
    member.save()
    member.store.follow()
    member.store.truncate(behind, epoch=1, floor=0)
    assert member.store.queues.next_offset("t", 0) == 12


def test_truncation_of_a_repeated_raise_keeps_the_first_record(member: TablesMember) -> None:
    member.raise_queue("t", 0, 7)
    behind = member.store.max_physical_offset
    said = member.store.queue_changes.image().data
    member.raise_queue("t", 0, 0)
    assert member.store.queue_changes.image().data == said, "nothing new"
    member.save()
    member.store.follow()
    member.store.truncate(behind, epoch=1, floor=0)
    assert member.store.queues.next_offset("t", 0) == 12


def test_raise_that_is_replayed_holds_while_its_record_exists(member: TablesMember) -> None:
    """As behind an image, or after a start with unsaved tables."""
    store = member.store
    store.queue_changes.raise_queues({"t": {0: 12}}, record_end=3000)
    for record_end, to in ((1000, 9), (4000, 20), (2000, 12), (5000, 20), (1000, 9)):
        store.queue_changes.raise_queues({"t": {0: to}}, record_end=record_end)
    assert b'"raised":{"t":{"0":[[9,1000],[12,2000],[20,4000]]}}' in store.queue_changes.image().data


def test_raise_lost_in_a_power_cut_is_dropped_with_its_record(tmp_path: Path) -> None:
    """The record in its place does not concern the queue, and a later truncation above it lowers the queue."""
    member = TablesMember(tmp_path, ManualClock(1_700_000_000_000))
    member.topics.create_plain("t", 1)
    for _ in range(5):
        member.put("t")
    member.sync()
    behind = member.store.max_physical_offset
    member.raise_queue("t", 0, 7)
    said = member.store.max_physical_offset
    for seed in range(50):
        taken = member.disk.power_cut(seed)
        if b'"raised"' in taken.read(Path("/store/queue_state")):
            member.disk = taken
            member.start()
            if member.store.max_physical_offset == behind:
                break
    else:
        raise AssertionError("no power cut took the record and left the rest")
    while member.store.max_physical_offset < said:
        member.put("other")
    member.put("other")
    member.sync()
    member.store.follow()
    member.store.truncate(member.store.reader.record_start(member.store.max_physical_offset - 1), epoch=1, floor=0)
    assert member.store.queues.next_offset("t", 0) == 5


def test_topic_deleted_above_stays_deleted_when_its_raise_is_replayed(member: TablesMember) -> None:
    saved = {path.name: member.disk.read(path) for path in map(CONFIG.joinpath, member.disk.list_dir(CONFIG))}
    member.raise_queue("t", 0, 7)
    member.delete_topic("t")
    for name, data in saved.items():
        member.disk.write_atomic(CONFIG / name, data)
    member.kill()
    assert member.store.queues.names_of("t") == []
    member.topics.create_plain("t", 1)
    assert member.put("t") in {0, 12}, "nothing of it was archived, or it goes on above"


def test_topic_deleted_before_its_raise_is_logged_ends_as_high_on_a_slave(member: TablesMember, tmp_path: Path) -> None:
    slave = TablesMember(tmp_path / "slave", ManualClock(1_700_000_000_000))
    member.store.queue_changes.raise_queues({"t": {0: 12, 1: 3}})
    member.journal.defer([QueuesRaised(queues={"t": {0: 12}}), QueuesRaised(queues={"t": {1: 3}})])
    ends = member.store.queues.following_of("t")
    member.journal.record(member.topics.deletion("t", ends, begins_again=False))  # as in a set
    member.journal.record_deferred()
    for record in member.records():
        slave.receive(record, follows=False)
    slave.metadata.catch_up()
    assert slave.store.queues.names_of("t") == []
    assert slave.store.queues.records.ended() == {"t": ends} == {"t": {0: 12, 1: 3}}


def test_slave_reads_that_its_master_settled_behind_the_masters_raises(member: TablesMember, tmp_path: Path) -> None:
    """Once in each of its processes."""
    slave = TablesMember(tmp_path / "slave", ManualClock(1_700_000_000_000))
    member.raise_queue("t", 0, 7)
    for epoch in (3, 4):
        member.journal.record(ArchiveSettled(epoch=epoch))
    records = member.records()
    for record in records[:-2]:
        slave.receive(record, follows=False)
    slave.metadata.catch_up()
    assert (slave.settled, slave.store.queues.next_offset("t", 0)) == ([], 12)
    for record in records[-2:]:
        slave.receive(record, follows=False)
        slave.metadata.catch_up()
        slave.metadata.catch_up()
    assert slave.settled == [3, 4]
    slave.kill()
    slave.metadata.catch_up()
    assert slave.settled == [4]


def test_member_that_begins_with_an_image_reads_that_its_master_settled(member: TablesMember, tmp_path: Path) -> None:
    """The record may be below the begin of its log."""
    member.journal.record(ArchiveSettled(epoch=3))
    young = TablesMember(tmp_path / "young", ManualClock(1_700_000_000_000))
    young.store.queue_changes.create_queues_at({METADATA_LOG: {CHANGES: member.journal.position, SETTLED: 1}})
    young.metadata.install(member.metadata.image())
    assert young.settled == [3]


@pytest.mark.parametrize("writes", range(7))
def test_image_is_installed_whole_after_a_crash_at_any_write(
    member: TablesMember, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    other = TablesMember(tmp_path / "other", ManualClock(1_700_000_000_000))
    other.topics.create_plain("earlier", 1)
    other.groups.find("earlier")
    other.groups.set_forbidden("earlier", "t", forbidden=True)  # as many changes as the image has
    other.save()
    for record in member.records():
        if record.topic != METADATA_LOG:
            other.receive(record)
    old = ({"earlier"}, {"earlier"})
    image, left = member.metadata.image(), [writes]

    def write(path: Path, data: bytes) -> None:
        if not left[0]:
            raise Killed
        left[0] -= 1
        type(other.disk).write_atomic(other.disk, path, data)

    with monkeypatch.context() as patch:
        patch.setattr(other.disk, "write_atomic", write)
        try:
            other.metadata.install(image)
        except Killed:
            assert writes < 6
    other.kill()
    names = (set(other.topics.topics), other.groups.groups.keys() - set(SYSTEM_GROUPS))
    assert names == (old if writes == 0 else ({"t"}, {"g"}))
    assert not other.disk.exists(CONFIG / "metadataImage.json")


def test_unsaved_changes_keep_their_log_segment_and_nothing_else_does(member: TablesMember) -> None:
    assert member.metadata.oldest_needed_physical() is None
    place = member.store.max_physical_offset
    member.modes.set("t", "g", "POP", 1)
    member.topics.create_plain("new", 1)
    assert member.metadata.oldest_needed_physical() == place
    drive(member.metadata.save())
    assert member.metadata.oldest_needed_physical() is None
    for _ in range(20):
        member.offsets.commit("g", "t", 0, 3)
    assert member.metadata.oldest_needed_physical() is None, "positions that clients commit are in no log"


def test_start_replays_no_more_changes_than_a_file_may_be_behind(member: TablesMember) -> None:
    for number in range(_BEHIND + 10):
        member.groups.set_forbidden("g", str(number % 2), forbidden=number % 3 == 0)
    assert member.topics.file.dirty, "its file is too far behind, though none of the changes is its own"
    member.save()
    offsets = [file.log_offset for file in (member.topics.file, member.groups.file, member.modes.file)]
    assert offsets == [member.journal.position] * 3


def test_delay_positions_of_the_log_override_a_file_ahead_of_it(member: TablesMember) -> None:
    """As after a truncation: the copies are gone, so the positions behind them are void as well."""
    deliver_a_delayed_message(member)
    member.sync()
    said = member.schedule.positions()
    path = CONFIG / "delays.json"
    member.save()
    ahead = json.loads(member.disk.read(path))
    ahead |= {"saidBelow": 9, "offsetTable": {"1": 7}}
    member.put_delayed("t")
    member.disk.write_atomic(path, json.dumps(ahead).encode())
    member.kill()
    assert member.schedule.positions() == said
    member.clock.advance(DELAY_MS)
    assert member.schedule.deliver_due() == 1


@pytest.mark.parametrize("delivered_before", [0, 1])
def test_truncated_delivery_is_repeated_by_the_reelected_master(tmp_path: Path, delivered_before: int) -> None:
    """No other master has delivered a message in between."""
    clock = ManualClock(1_700_000_000_000)
    member = TablesMember(tmp_path, clock)
    member.topics.create_plain("t", 1)
    for _ in range(delivered_before):
        member.put_delayed("t")
    clock.advance(10_000)
    assert member.schedule.deliver_due() == delivered_before
    member.save()
    member.metadata.lead()  # in the term that ends now: the tables include the own log
    member.put_delayed("t")
    clock.advance(10_000)
    confirmed = member.store.max_physical_offset
    member.store.visibility.join_set(confirmed)
    assert member.schedule.deliver_due() == 1
    member.store.follow()
    run_here(member.metadata.reload_parts())
    member.store.truncate(confirmed, epoch=1, floor=confirmed)
    member.store.lead()
    member.metadata.lead()
    assert member.store.queues.max_offset("t", 0) == delivered_before
    assert member.schedule.deliver_due() == 1
    member.store.visibility.confirm(member.store.max_physical_offset)
    assert member.store.queues.max_offset("t", 0) == delivered_before + 1
    assert member.schedule.deliver_due() == 0
