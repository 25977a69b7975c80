"""Promotion of a copy of an Apache master's log to a master's: the start of a slave's directory as ASYNC_MASTER.

    ha/promotion.json    {"end":…}: a promotion has begun, and the master's log ended there. Bytes above are of a try
                         that a crash ended; no client has seen them, and the next try truncates them
    ha/followed.json     identifies the copied master; deleted at the end, which makes the directory a master's

ask        no process may listen at the master's address, and no name server may know another master of this name: both
           would assign the same offsets
read       find waiting messages by the master's last poll and the log (`delays`, `timers`, `halves`, `pops`)
write      marks in neve's form, with which every later start finds the same; topics younger than the last poll; sync
archive    refuse if the archive was superseded, or if a topic began again (`archiving.attach`)
finish     delete the files above

No client is served meanwhile. If anything is undecidable, the promotion is refused, and the directory remains a
slave's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from broker.ha.asked import RequestClient
from broker.ha.plain_slave import FollowedFile
from broker.ha.stock_master import MasterLife
from broker.metadata.last_poll import LastPoll, LastPollFile
from broker.pop.pop_book import PopBook
from broker.promotion import delays, halves, pops, timers
from broker.promotion.stored import Delivered
from broker.store.errors import StoreError
from broker.store.message_store import MessageStore
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from broker.tables.topic_config_manager import TopicConfigManager
from broker.waiting.half_messages import HalfMessages
from broker.waiting.schedule_message import ScheduleMessage
from broker.waiting.timer_message import TimerMessages
from infra.disk.filesystem import Disk
from infra.disk.versioned_file import VersionedFile
from infra.process.startup import EXIT_CONFIG, EXIT_FAILED, StartupError
from neve.errors import BrokerError, NeveError
from neve.record.codec import decode_record
from neve.remoting.body import loads_as
from neve.remoting.codes import RequestCode
from neve.remoting.headers import Int64
from neve.remoting.names import SYSTEM_PREFIX, SYSTEM_TOPICS

log = logging.getLogger(__name__)

_NAME = "promotion.json"
# A message that is due this many ms after the master's last record may have been delivered by a fast clock.
_AHEAD_MS = 3000


class PromotionApi(RequestClient, Protocol):
    """Client that queries servers, and checks whether they are reachable."""

    async def reaches(self, address: str) -> bool:
        """Return whether a process accepts connections at the address."""

    def close(self) -> None:
        """Close all connections."""


class _StartedPromotion(msgspec.Struct):
    end: int


class _Broker(msgspec.Struct, rename="camel"):
    broker_addrs: dict[Int64, str] = {}


class _Cluster(msgspec.Struct, rename="camel"):
    broker_addr_table: dict[str, _Broker] = {}


class Promotion:
    """Promotion of a slave's directory. The module's docstring has the steps."""

    def __init__(
        self,
        disk: Disk,
        root: Path,
        last_poll: LastPollFile,
        *,
        store: MessageStore,
        schedule: ScheduleMessage,
        timer_messages: TimerMessages,
        transactions: HalfMessages,
        book: PopBook,
        offsets: ConsumerOffsetManager,
        topics: TopicConfigManager,
        revive_log: str,
    ) -> None:
        self._file = VersionedFile(
            disk, root / "ha" / _NAME, _StartedPromotion, partial(StartupError, exit_code=EXIT_FAILED)
        )
        self._followed, self._last_poll, self._store = FollowedFile(disk, root), last_poll, store
        self._schedule, self._timers, self._transactions = schedule, timer_messages, transactions
        self._book, self._offsets, self._topics, self._revive_log = book, offsets, topics, revive_log
        self._life: MasterLife | None = None

    @property
    def is_due(self) -> bool:
        """Return whether the directory is a slave's that is configured as a master."""
        return self._followed.is_there

    # -- ask

    async def check(self, api: PromotionApi, own: tuple[str, str, str], name_servers: Sequence[str]) -> None:
        """Raise StartupError if the promotion must be refused. `own`: cluster, name and address of this broker."""
        cluster, broker, address = own
        self._life = life = self._followed.load()
        try:
            self._last_poll.load()
        except ValueError as error:
            raise StartupError(str(error), EXIT_FAILED) from error
        if life is None or (life.cluster, life.broker) != (cluster, broker):
            raise refused(f"{self._followed.path} is of another broker than {broker} of {cluster}: {life}")
        poll = self._last_poll.current
        if poll is None:
            raise refused("it never got the tables of its master, so the delivered messages of its log are unknown")
        if poll.elsewhere:
            raise refused(
                f"{', '.join(poll.elsewhere)} at the master: it keeps the state of pops in a store that "
                f"no slave receives. Set it to false there, and wait until no popped message is in flight"
            )
        await refuse_present(api, poll.master, (broker, address), name_servers)

    # -- read and write

    def begin(self) -> None:
        """Truncate the remains of a failed try. Called after recovery of the log. Raise StartupError."""
        store, end = self._store, self._store.max_physical_offset
        try:
            saved = self._file.read()
            if saved is None:
                self._file.write(_StartedPromotion(end))
            elif saved.end < end:
                store.truncate(saved.end, epoch=0, floor=saved.end)
        except (StoreError, OSError) as error:
            raise StartupError(f"{self._file.path}: {error}", EXIT_FAILED) from error

    def take_back(self) -> None:
        """Undo a failed try, for a slave that remains one. Raise StartupError.

        If the directory is no slave's any longer, a crash followed the promotion: the log is this broker's own, and is
        not truncated.
        """
        if self._file.exists:
            if self._followed.is_there:
                self.begin()
            self._file.remove()

    def run(self) -> None:
        """Do the steps "read" and "write". Called after `load` of the tables, and before waiting messages are loaded.

        Raise StartupError; another start does them again.
        """
        assert self._last_poll.current is not None, "checked"
        try:
            self._run(self._last_poll.current)
        except (StoreError, BrokerError, OSError) as error:
            raise StartupError(f"the pending messages of its master can't be read: {error}", EXIT_FAILED) from error

    def _run(self, poll: LastPoll) -> None:
        store, offsets = self._store, self._offsets
        newest = store.reader.newest_record()
        horizon = _AHEAD_MS + (0 if newest is None else decode_record(newest).store_timestamp)
        # messages that may have been delivered since the last poll
        delayed = delays.perhaps_delivered(store, self._schedule, poll, horizon)
        waiting = timers.not_delivered(store, poll)
        if isinstance(waiting, timers.UnreadableTimers):
            raise refused(f"its master does not report which of {waiting.count} timers in its log are delivered")
        popped = pops.not_acknowledged(store, poll, self._revive_log, self._broker, waiting)
        prepared = halves.prepared(store, poll)
        delivered = Delivered(
            store,
            [
                *(one.bound for one in delayed),
                *timers.perhaps_delivered(waiting, horizon),
                *pops.perhaps_back(popped, horizon),
            ],
            above=poll.log_begin,
            ended_above=min((one.physical_offset for one in prepared.unmarked), default=store.max_physical_offset),
        )
        positions = delays.positions(poll, delayed, delivered)
        left = None if poll.timers is None else timers.sort_out(store, waiting, poll.timers, delivered, horizon)
        transactions = halves.sort_out(prepared, delivered)
        committed = {key: offsets.query(*key) for key in {*popped.handed_out, *(one.key for one in popped.out)}}
        out = pops.sort_out(popped, committed, delivered, horizon)

        store.lead()
        self._transactions.begin_with(transactions.waiting, transactions.ended)
        if left is not None:
            self._timers.begin_after(left)
        self._schedule.install(positions)
        for topic in new_topics(store, poll.asked_at, self._topics.topics):
            queues = max(store.queues.names_of(topic)) + 1
            log.warning("topic created after the last tables of the master: topic=%s queues=%d", topic, queues)
            self._topics.create_now(topic, queues)
        store.after_flush(store.visibility.flush())
        self._schedule.file.save_now()
        self._book.begin_with(out)
        log.info(
            "pending messages found at %d in the log of the Apache master at %s: %d half messages, %d popped messages, "
            "delayed messages and timers",
            store.max_physical_offset,
            poll.master,
            len(transactions.waiting),
            sum(len(flights) for _, _, flights in out),
        )

    # -- finish

    def finish(self) -> None:
        """Make the promotion final, after the archive is attached. Raise StartupError."""
        poll = self._last_poll.current
        assert poll is not None, "checked"
        try:
            self._finish()
        except OSError as error:
            raise StartupError(f"{self._file.path}: {error}", EXIT_FAILED) from error
        end = self._store.max_physical_offset
        log.info("the log of the Apache master at %s is this broker's own from %d on", poll.master, end)

    @property
    def _broker(self) -> str:
        assert self._life is not None, "checked"
        return self._life.broker

    def _finish(self) -> None:
        self._followed.remove()
        self._file.remove()
        self._last_poll.forget()


def new_topics(store: MessageStore, asked_at: int, known: Collection[str]) -> list[str]:
    """Return the topics that no table has, and that began above `asked_at`. One that began before is deleted."""
    found = list[str]()
    for topic, queues in store.queues.names().items():
        if topic in known or topic in SYSTEM_TOPICS or topic.startswith(SYSTEM_PREFIX):
            continue
        first = [store.reader.entry(topic, queue, store.queues.min_offset(topic, queue)) for queue in queues]
        if all(entry is None or entry[0] >= asked_at for entry in first) and any(first):
            found.append(topic)
    return found


async def refuse_present(api: PromotionApi, master: str, own: tuple[str, str], name_servers: Sequence[str]) -> None:
    """Raise StartupError if the former master is present, or if no name server confirms that it is gone.

    `own`: name and address of this broker. The api is closed.
    """
    try:
        if await api.reaches(master):
            raise refused(f"the master at {master} answers: stop it first, both would assign the same offsets")
        if not name_servers:
            raise refused("namesrvAddr is empty: no name server confirms that its master is gone")
        await _ask_name_servers(api, *own, name_servers)
    finally:
        api.close()


async def _ask_name_servers(api: PromotionApi, broker: str, own: str, name_servers: Sequence[str]) -> None:
    """Raise StartupError unless at least one name server answers, and none knows another master."""
    reasons = list[str]()
    for server in name_servers:
        try:
            answer = await api.ask(server, RequestCode.GET_BROKER_CLUSTER_INFO, {})
            brokers = await asyncio.to_thread(loads_as, bytes(answer.body), _Cluster)
        except (OSError, TimeoutError, NeveError) as error:
            reasons.append(f"{server}: {str(error) or type(error).__name__}")
            continue
        master = brokers.broker_addr_table.get(broker, _Broker()).broker_addrs.get(0, own)
        if master != own:
            raise refused(f"the name server {server} knows {master} as the master of {broker}: stop that one first")
    if len(reasons) == len(name_servers):
        raise refused(f"no name server confirms that its master is gone: {'; '.join(reasons)}")


def refused(reason: str, exit_code: int = EXIT_CONFIG) -> StartupError:
    """Return the error of a refused promotion."""
    return StartupError(
        f"this is the copy of an Apache master's log, and can't become master: {reason}. It can "
        "continue with brokerRole=SLAVE",
        exit_code,
    )
