"""Tables that follow the log end equal to their master's, whatever changes and failures happen in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from access.model import Policy, PolicyEntry, User
from access.store import AuthTables
from broker.tables.changes import RowsErased
from broker.tables.subscription_group_manager import SubscriptionGroupConfig
from broker.tables.topic_config_manager import TopicConfig
from infra.clock import ManualClock
from infra.loop.in_steps import at_once
from neve.record.codec import MessageRecord
from neve.remoting.names import SCHEDULE_TOPIC
from tests.unit.broker.metadata.members import DELAY_MS, TablesMember

TOPICS, GROUPS, USERS = ("orders", "payments", "käse"), ("g", "h"), ("u", "w")


class Story:
    """Random changes on the master, from one seeded generator."""

    def __init__(self, seed: int, clock: ManualClock) -> None:
        self.dice, self.clock = random.Random(seed), clock

    def step(self, master: TablesMember) -> None:
        self.clock.advance(self.dice.randrange(400))
        self.dice.choice(self._steps)(self, master)

    @property
    def topic(self) -> str:
        return self.dice.choice(TOPICS)

    @property
    def group(self) -> str:
        return self.dice.choice(GROUPS)

    def put_topic(self, master: TablesMember) -> None:
        queues = self.dice.randrange(1, 4)
        master.topics.update(TopicConfig(topic_name=self.topic, read_queue_nums=queues, write_queue_nums=queues))

    def send(self, master: TablesMember) -> None:
        topic = self.topic
        master.topics.create_plain(topic, 2)
        for _ in range(self.dice.randrange(1, 30)):
            master.put(topic, bytes(self.dice.randrange(600)), self.dice.randrange(2))

    def send_delayed(self, master: TablesMember) -> None:
        topic = self.topic
        master.topics.create_plain(topic, 2)
        master.put_delayed(topic)

    def deliver(self, master: TablesMember) -> None:
        self.clock.advance(DELAY_MS)
        master.schedule.deliver_due()

    def delete_topic(self, master: TablesMember) -> None:
        master.delete_topic(self.topic)

    def raise_queue(self, master: TablesMember) -> None:
        topic = self.topic
        master.topics.create_plain(topic, 2)
        master.raise_queue(topic, self.dice.randrange(2), self.dice.randrange(1, 40))

    def put_group(self, master: TablesMember) -> None:
        tries = self.dice.randrange(20)
        master.groups.update(SubscriptionGroupConfig(group_name=self.group, retry_max_times=tries))

    def find_group(self, master: TablesMember) -> None:
        master.groups.find(self.group)

    def delete_group(self, master: TablesMember) -> None:
        master.delete_group(self.group, with_offsets=self.dice.random() < 0.5)

    def forbid(self, master: TablesMember) -> None:
        master.groups.set_forbidden(self.group, self.topic, forbidden=self.dice.random() < 0.6)

    def set_mode(self, master: TablesMember) -> None:
        master.modes.set(self.topic, self.group, "POP", self.dice.randrange(4))

    def reset(self, master: TablesMember) -> None:
        topic = self.topic
        ends = [
            master.store.queues.max_offset(topic, queue) for queue in (0, 1)
        ]  # committed offsets must not exceed these
        targets = {queue: min(self.dice.randrange(9), end) for queue, end in enumerate(ends)}
        at_once(master.offsets.reset_all(self.group, topic, targets))

    def copy(self, master: TablesMember) -> None:
        at_once(master.offsets.clone(self.group, self.group, self.topic))

    def change_users(self, master: TablesMember) -> None:
        name, secret = self.dice.choice(USERS), str(self.dice.randrange(3))
        keep, rule = self.dice.random() < 0.7, self.dice.random() < 0.5
        policy = Policy("Custom", (PolicyEntry(f"Topic:{self.topic}", ("Pub",)),))

        def edit(tables: AuthTables) -> None:
            if keep:
                tables.users[name] = User(secret)
            else:
                tables.users.pop(name, None)
            if keep and rule:
                tables.policies[f"User:{name}"] = [policy]
            else:
                tables.policies.pop(f"User:{name}", None)

        master.change_users(edit)

    def save(self, master: TablesMember) -> None:
        master.save()

    def kill(self, master: TablesMember) -> None:
        told = master.offsets.resets()  # resets that clients have not fetched: a start may deliver them again or not
        master.kill()
        assert master.offsets.resets().keys() <= told.keys()
        master.offsets.install(master.offsets.table(), told)

    _steps: tuple[Callable[[Story, TablesMember], None], ...] = (
        put_topic, send, send, send, send_delayed, deliver, delete_topic, put_group, find_group, delete_group, forbid,
        set_mode, reset, copy, change_users, save, kill, raise_queue,
    )  # fmt: skip


class RandomSlave:
    """A member and its progress in the master's log. After a crash it gets the lost records again."""

    def __init__(self, member: TablesMember, dice: random.Random) -> None:
        self.member, self.dice = member, dice

    def receive(self, log: list[MessageRecord], most: int = 1 << 30) -> None:
        have = len(self.member.records())
        for record in log[have : have + most]:
            self.member.receive(record)

    def step(self, log: list[MessageRecord]) -> None:
        """Receive records, and follow, save or crash."""
        member, chance = self.member, self.dice.random()
        if chance < 0.6:
            self.receive(log, self.dice.randrange(60))
        elif chance < 0.75:
            member.metadata.catch_up()
        elif chance < 0.85:
            member.save()
        elif chance < 0.9:
            member.sync()
        else:
            resets = member.offsets.resets()
            member.kill() if chance < 0.95 else member.power_cut()
            if member.journal.position:
                member.offsets.install(member.offsets.table(), resets)


def alike(member: TablesMember) -> dict[str, object]:
    """Return the comparable state.

    It lacks pending resets, which a crash loses on a master as well, and the ends of empty queues, which a power cut
    may leave behind.
    """
    tables = {name: part for name, part in member.tables().items() if name != "resets"}
    ended = {
        topic: {queue: end for queue, end in queues.items() if end}
        for topic, queues in member.store.queues.records.ended().items()
    }
    return tables | {"ended": {topic: queues for topic, queues in ended.items() if queues}}


@pytest.mark.parametrize("seed", range(12))
def test_slave_that_follows_the_log_ends_equal_to_its_master(seed: int, tmp_path: Path) -> None:
    clock = ManualClock(1_700_000_000_000)
    story = Story(seed, clock)
    master = TablesMember(tmp_path / "a", clock, seed)
    slave = RandomSlave(TablesMember(tmp_path / "b", clock, seed), random.Random(seed))
    for _ in range(150):
        story.step(master)
        slave.step(master.records())
    slave.receive(master.records())
    slave.member.metadata.catch_up()
    assert alike(slave.member) == alike(master)


@pytest.mark.parametrize("seed", range(4))
def test_member_that_begins_with_an_image_ends_equal_to_its_master(seed: int, tmp_path: Path) -> None:
    """Its log begins with the record behind the image."""
    clock = ManualClock(1_700_000_000_000)
    story = Story(seed, clock)
    master, slave = TablesMember(tmp_path / "a", clock, seed), TablesMember(tmp_path / "b", clock, seed)
    for _ in range(60):
        story.step(master)
    image, offsets, log = master.metadata.image(), at_once(master.metadata.offsets_image()), master.records()
    for record in log:
        slave.receive(record)
    slave.metadata.install(image)
    slave.metadata.install_offsets(offsets)
    assert alike(slave) == alike(master)
    for _ in range(60):
        story.step(master)
    for record in master.records()[len(log) :]:
        slave.receive(record)
    slave.metadata.catch_up()
    assert alike(slave) == alike(master)


@pytest.mark.parametrize("seed", range(4))
def test_image_of_equal_tables_is_adopted_without_a_write(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock(1_700_000_000_000)
    story = Story(seed, clock)
    master, slave = TablesMember(tmp_path / "a", clock, seed), TablesMember(tmp_path / "b", clock, seed)
    for _ in range(60):
        story.step(master)
    for record in master.records():
        slave.receive(record)
    slave.metadata.catch_up()
    master.topics.lead(7)
    writes, write_atomic = list[str](), slave.disk.write_atomic

    def noted(path: Path, data: bytes) -> None:
        writes.append(path.name)
        write_atomic(path, data)

    monkeypatch.setattr(slave.disk, "write_atomic", noted)
    slave.metadata.install(master.metadata.image())
    assert writes == []
    assert slave.topics.data_version.to_wire() == master.topics.data_version.to_wire()
    assert slave.topics.file.dirty, "the version is saved with the table's next change, or at its period"
    assert slave.schedule.positions() == master.schedule.positions()
    del slave.topics.topics[next(iter(slave.topics.topics))]
    slave.metadata.install(master.metadata.image())
    assert slave.topics.topics == master.topics.topics
    assert writes[0] == "metadataImage.json"


def test_tables_stay_equal_over_a_hundred_changes_of_the_master(tmp_path: Path) -> None:
    clock, dice = ManualClock(1_700_000_000_000), random.Random(7)
    story = Story(7, clock)
    members = [TablesMember(tmp_path / name, clock, number) for number, name in enumerate("abc")]
    master = members[0]
    for turn in range(100):
        for _ in range(dice.randrange(6)):
            story.step(master)
        log = master.records()
        for member in members:
            if member is not master:
                RandomSlave(member, dice).receive(log)
                if dice.random() < 0.2:
                    member.save()
                    member.kill()
        master = members[(turn + dice.choice((1, 2))) % 3]
        assert master.metadata.lead() == []
        for member in members:
            member.metadata.catch_up()
            assert alike(member) == alike(master), f"after change {turn}"
    assert master.topics.topics and master.journal.position > 100


def test_offsets_image_keeps_the_resets_and_deletions_that_the_log_made(tmp_path: Path) -> None:
    clock = ManualClock(1_700_000_000_000)
    master, slave = TablesMember(tmp_path / "a", clock), TablesMember(tmp_path / "b", clock)
    master.topics.create_plain("t", 2)
    for _ in range(9):
        master.put("t")
    for group in ("stays", "reset later", "goes back", "gone"):
        master.groups.find(group)
        master.offsets.commit(group, "t", 0, 9)
    for record in master.records():
        slave.receive(record)
    slave.metadata.catch_up()
    slave.offsets.commit("left over", "t", 0, 3)
    slave.metadata.install_offsets(at_once(master.metadata.offsets_image()))
    master.offsets.commit("goes back", "t", 0, 2)
    image, sent = at_once(master.metadata.offsets_image()), len(slave.records())
    master.offsets.reset("reset later", "t", 0, 1)
    master.delete_group("gone", with_offsets=True)
    for record in master.records()[sent:]:
        slave.receive(record)
    slave.metadata.catch_up()
    slave.metadata.install_offsets(image)
    expected = {"t@stays": {0: 9}, "t@reset later": {0: 1}, "t@goes back": {0: 2}}
    assert slave.offsets.table() == master.offsets.table() == expected
    assert slave.offsets.take_reset("reset later", "t", 0) == 1, "who is not told yet is told by the next master"


def test_new_master_limits_committed_offsets_to_its_log_end(tmp_path: Path) -> None:
    clock = ManualClock(1_700_000_000_000)
    master, slave = TablesMember(tmp_path / "a", clock), TablesMember(tmp_path / "b", clock)
    master.topics.create_plain("t", 1)
    for _ in range(5):
        master.put("t")
    master.offsets.commit("g", "t", 0, 5)
    for record in master.records()[:-2]:
        slave.receive(record)
    slave.metadata.catch_up()
    slave.metadata.install_offsets(at_once(master.metadata.offsets_image()))
    assert slave.metadata.lead() == ["t@g queue 0: 5 → 3"]
    assert slave.offsets.query("g", "t", 0) == 3


@pytest.mark.parametrize("killed", [False, True])
def test_follower_hides_erased_rows_of_an_internal_topic(tmp_path: Path, killed: bool) -> None:
    clock = ManualClock(1_700_000_000_000)
    master, slave = TablesMember(tmp_path / "master", clock), TablesMember(tmp_path / "slave", clock)
    master.topics.create_plain("orders", 1)
    for _ in range(3):
        master.put_delayed("orders")
    master.journal.record(RowsErased(rows={SCHEDULE_TOPIC: {0: [(0, 1)]}}))
    for record in master.records():
        slave.receive(record)
    slave.metadata.catch_up()
    if killed:
        slave.kill()
    assert slave.store.queues.records.erased_of(SCHEDULE_TOPIC, 0) == ((0, 1),)
    assert slave.store.reader.entry(SCHEDULE_TOPIC, 0, 1) is None
    assert slave.store.reader.entry(SCHEDULE_TOPIC, 0, 2) is not None
