"""Fourth phase: messages that wait or are popped, the metadata log, and the files of this state."""

from __future__ import annotations

from dataclasses import dataclass

from access.guard import SignatureGuard
from broker.long_polling.pop_long_polling import PopLongPolling
from broker.metadata.last_poll import LastPollFile
from broker.metadata.metadata_log import MetadataLog
from broker.metadata.user_changes import FollowedUsers
from broker.pop.pop_book import PopBook, revive_log
from broker.pop.set_elsewhere import SetElsewhere
from broker.promotion.promotion import Promotion
from broker.tables.persistence import Persistence
from broker.waiting.half_messages import HalfMessages
from broker.waiting.schedule_message import ScheduleMessage, parse_levels
from broker.waiting.timer_message import TimerMessages
from broker.wiring.member_events import MemberEvents
from broker.wiring.runtime import Runtime
from broker.wiring.storage import Storage
from broker.wiring.tables import BrokerTables


@dataclass(frozen=True, kw_only=True)
class MessageParts:
    """State of messages outside of their topics, and the parts that follow, save and promote all state."""

    schedule: ScheduleMessage
    timers: TimerMessages
    transactions: HalfMessages
    polling: PopLongPolling
    pops: PopBook
    metadata: MetadataLog
    #: Events of `metadata` and of the synchronization, for the membership.
    events: MemberEvents
    last_poll: LastPollFile
    promotion: Promotion
    persistence: Persistence

    def counts(self) -> dict[str, int]:
        """Return the numbers of waiting messages by kind, as the runtime information names them."""
        return {"timersWaiting": len(self.timers), "transactionsWaiting": len(self.transactions)}


def make_messages(runtime: Runtime, storage: Storage, tables: BrokerTables) -> MessageParts:
    """Create the parts. The start loads them."""
    config, clock, disk, threads = runtime.config, runtime.clock, runtime.disk, runtime.threads
    store, writer, journal = storage.store, storage.writer, storage.journal
    topics, groups, offsets, modes, guard = tables.topics, tables.groups, tables.offsets, tables.modes, tables.guard
    directory, sync_log = config.root / "config", storage.sync.positions
    schedule = ScheduleMessage(
        store,
        writer,
        clock,
        parse_levels(config.message_delay_level),
        disk,
        directory / "delayOffset.json",
        sync_log,
        runtime.faults,
        threads,
        journal,
        read_queues=topics.read_queues,
    )
    timers = TimerMessages(store, writer, clock, config, topics.read_queues, runtime.faults)
    transactions = HalfMessages(store, writer, clock)
    revives = revive_log(config.broker_cluster_name)
    pops = PopBook(store, writer, offsets, clock, disk, directory / "popState.json", revives, sync_log, threads)
    polling = PopLongPolling()
    offsets.subscribe(SetElsewhere(pops, polling).set)
    users = None
    if isinstance(guard, SignatureGuard):
        users = FollowedUsers(guard.store, journal, lambda: store.log_uuid)
    events = MemberEvents()
    metadata = MetadataLog(
        journal,
        store,
        disk,
        directory / "metadataImage.json",
        topics=topics,
        groups=groups,
        offsets=offsets,
        modes=modes,
        users=users,
        delays=schedule,
        pops=pops,
        on_settled=events.master_settled,
        on_lost=events.tables_lost,
    )
    last_poll = LastPollFile(disk, directory / "lastPoll.json", sync_log, threads)
    promotion = Promotion(
        disk,
        config.root,
        last_poll,
        store=store,
        schedule=schedule,
        timer_messages=timers,
        transactions=transactions,
        book=pops,
        offsets=offsets,
        topics=topics,
        revive_log=revives,
    )
    files = (topics.file, groups.file, schedule.file, offsets.file, modes.file, pops, last_poll)
    return MessageParts(
        schedule=schedule,
        timers=timers,
        transactions=transactions,
        polling=polling,
        pops=pops,
        metadata=metadata,
        events=events,
        last_poll=last_poll,
        promotion=promotion,
        persistence=Persistence(files),
    )
