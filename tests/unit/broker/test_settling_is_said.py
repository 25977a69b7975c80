"""A new master logs the raised queues and the settled archive, and warns if the log refuses the records."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest

from broker.change_of_role import ChangeOfRole
from broker.intake.message import NewMessage
from broker.metadata.metadata_journal import MetadataJournal
from broker.store.errors import StoreNotWritable
from broker.store.message_store import PutResult
from broker.tables.changes import (
    ArchiveSettled,
    Change,
    QueuesRaised,
    TopicDeleted,
    decode_change,
    encode_change,
    queue_of,
)
from infra.clock import ManualClock
from infra.disk.filesystem import DiskFull
from infra.loop.in_steps import Steps
from neve.errors import BrokerError
from tests.simulation.process import InLine

EPOCH = 7
EVERYTHING = get_args(Change)


class JournaledLog:
    """The log as a journal and a change of role use it, with the queue state beside it."""

    def __init__(self) -> None:
        self.said: list[Change] = []
        self.saved_behind: list[int] = []  # the number of records at each save
        self.refused: tuple[type[Change], ...] = ()
        self.is_full = False
        self.journal = MetadataJournal(self.store(), cast(Any, self), ManualClock())

    def store(self) -> Any:
        def nothing(*_: object) -> None: ...

        return SimpleNamespace(
            max_physical_offset=0, lead=nothing, follow=nothing, prepare_to_lead=nothing,
            queues=SimpleNamespace(records=SimpleNamespace(write=self.save)),
            reader=SimpleNamespace(last_record=nothing),
            queue_changes=SimpleNamespace(image=nothing, remember_raised=nothing),
            visibility=SimpleNamespace(confirmed=0), end=SimpleNamespace(is_following=False),
            config=SimpleNamespace(store_host=("127.0.0.1", 1)),
        )  # fmt: skip

    def put(self, message: NewMessage, *, internal: bool) -> Any:
        assert internal, "records of the metadata log are the broker's own"
        change = decode_change(message.body)
        if isinstance(change, self.refused):
            raise StoreNotWritable("too few members are in sync")
        of_queue = [one for one in self.said if queue_of(one) == message.queue_id]
        self.said.append(change)
        return PutResult(0, len(of_queue), 0, 0)

    def save(self, _: object) -> None:
        if self.is_full:
            raise DiskFull(28, "no space left on device")
        self.saved_behind.append(len(self.said))


async def leading(log: JournaledLog, raised: Mapping[str, Mapping[int, int]]) -> ChangeOfRole:
    def nothing(*_: object) -> None: ...

    def no_steps() -> Steps[list[str]]:
        yield
        return []

    async def resume_log() -> Mapping[str, Mapping[int, int]]:
        return raised

    some: Any = SimpleNamespace(forget=nothing, lead=nothing, load_steps=no_steps)
    pops: Any = SimpleNamespace(lead=nothing, lead_steps=no_steps)
    metadata: Any = SimpleNamespace(lead_steps=no_steps)
    topics: Any = SimpleNamespace(lead=nothing)
    role = ChangeOfRole(
        log.store(), some, journal=log.journal, metadata=metadata, synchronize=some, topics=topics, pops=pops,
        timers=some, transactions=some, pending_deletions=some, register_soon=nothing, files=(), resume_log=resume_log,
        threads=InLine(),
    )  # fmt: skip
    await role.prepare()
    role.lead(EPOCH)
    return role


async def test_raised_queues_are_divided_into_small_and_complete_records() -> None:
    log = JournaledLog()
    raised = {f"{number:03d}{'long' * 60}": dict.fromkeys(range(number % 5), 1 << 60) for number in range(2_000)}
    raised["many"] = dict.fromkeys(range(5_000), 9)
    assert await (await leading(log, raised)).record_settled()
    *records, last = log.said
    assert last == ArchiveSettled(epoch=EPOCH)
    assert max(len(encode_change(change)) for change in records) < 17 << 10
    assert min(len(encode_change(change)) for change in records[:-1]) > 3 << 10, "and there are few of them"
    told: dict[str, dict[int, int]] = {}
    for change in records:
        assert isinstance(change, QueuesRaised)
        for topic, queues in change.queues.items():
            told.setdefault(topic, {}).update(queues)
    assert told == {topic: queues for topic, queues in raised.items() if queues}


async def test_records_refused_for_seconds_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log = JournaledLog()
    role = await leading(log, {"t": {0: 5}})
    log.refused = EVERYTHING

    def warned() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    for _ in range(4):
        assert not await role.record_settled()
    assert warned() == [], "a second is nothing"
    for _ in range(100):
        assert not await role.record_settled()
    (warning,) = warned()
    assert "too few members are in sync" in warning
    log.refused = ()
    assert await role.record_settled()
    assert log.said == [QueuesRaised(queues={"t": {0: 5}}), ArchiveSettled(epoch=EPOCH)]


async def test_raised_queues_are_saved_before_the_archive_is_reported_settled() -> None:
    """Otherwise a truncation above the record would lower them, although followers rely on it."""
    log = JournaledLog()
    role = await leading(log, {"t": {0: 5}})
    log.is_full = True
    for _ in range(3):
        assert not await role.record_settled()
    assert log.said == [QueuesRaised(queues={"t": {0: 5}})], "once"
    log.is_full, log.refused = False, (ArchiveSettled,)
    for _ in range(3):
        assert not await role.record_settled()
    log.refused = ()
    assert await role.record_settled()
    assert (log.said[1:], log.saved_behind) == ([ArchiveSettled(epoch=EPOCH)], [1]), "and once"


async def test_topic_deletion_is_logged_behind_the_raise_of_its_queues() -> None:
    """The queues of a follower then end where its master's do, and no offset is assigned twice."""
    log = JournaledLog()
    await leading(log, {"t": {0: 5}})
    gone = TopicDeleted(topic="t", ends={0: 5}, begins_again=False, version={})
    log.refused = EVERYTHING
    with pytest.raises(BrokerError):
        log.journal.record(gone)
    log.refused = ()
    log.journal.record(gone)
    assert log.said == [QueuesRaised(queues={"t": {0: 5}}), gone]


async def test_deposed_master_logs_no_raised_queues() -> None:
    log = JournaledLog()
    role = await leading(log, {"t": {0: 5}})
    role.follow()
    assert await role.record_settled()
    log.journal.record(ArchiveSettled(epoch=EPOCH + 1))
    assert log.said == [ArchiveSettled(epoch=EPOCH + 1)]
