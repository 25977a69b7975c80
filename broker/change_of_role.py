"""Change of role of the broker's state besides its log: implements RoleState of `broker.ha.role_state`.

              the log                          tables                        waiting and popped messages
slave         accepts its master's bytes only  follow the log; committed     in the log; the book of pops follows
                                               offsets are polled            it, the other stores are empty
to master     confirmed to its end, resumes    follow it to its end; no      loaded, as at a start
              above its archive, then open     offset above a queue's end
              for own records
to slave      closed for own records, at once  follow the confirmed log      dropped

A change to master has two parts. `prepare` does the slow steps, on threads and in slices: timers and transactions in
the log, committed offsets, popped queues, queues that continue above the archive. The broker accepts nothing meanwhile,
and its log gets no record. `lead` runs in one callback of the event loop, so that no other code sees it half done.

A change to slave has two parts as well. `follow` runs in one callback. `reload` loads the tables again, on a thread
and in slices. The table files are suspended and no client is served until it has ended.

Neither waits for a checkpoint of the queues. A start after a crash rebuilds the queues above the last checkpoint from
the log, which was synced before its epoch began (`TruncateTornTail`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

import msgspec

from broker.archiving.deletion import PendingDeletions
from broker.ha.admission import MemberAdmission
from broker.metadata.metadata_journal import MetadataJournal
from broker.metadata.metadata_log import MetadataLog
from broker.metadata.slave_synchronize import Master, SlaveSynchronize
from broker.pop.pop_book import PopBook
from broker.store.message_store import MessageStore
from broker.tables.changes import ArchiveSettled, QueuesRaised
from broker.tables.state_file import StateFile
from broker.tables.topic_config_manager import TopicConfigManager
from broker.waiting.half_messages import HalfMessages
from broker.waiting.timer_message import TimerMessages
from infra.loop.in_steps import in_turns, run_beside
from infra.loop.parts import Parts
from infra.loop.threads import SYSTEM_THREADS, Threads
from infra.process.startup import EXIT_FAILED, StartupError
from neve.errors import BrokerError

log = logging.getLogger(__name__)

_EVENTS_AT_ONCE = 200
# Size of a record with raised queues: the log accepts one of this size whatever its limits are.
_BYTES_A_RECORD = 16 << 10
_BYTES_A_QUEUE = 40  # its number and its offset
# Tries before a warning, four per second: a set that lacks members for a moment needs no warning.
_TRIES_BEFORE_WARNING = 20


class ChangeOfRole:
    """State for a change of role. Runs on the event loop."""

    def __init__(
        self,
        store: MessageStore,
        admission: MemberAdmission,
        *,
        journal: MetadataJournal,
        metadata: MetadataLog,
        synchronize: SlaveSynchronize,
        topics: TopicConfigManager,
        pops: PopBook,
        timers: TimerMessages,
        transactions: HalfMessages,
        pending_deletions: PendingDeletions,
        register_soon: Callable[[], None],
        files: Sequence[StateFile],
        resume_log: Callable[[], Awaitable[Mapping[str, Mapping[int, int]]]],
        threads: Threads = SYSTEM_THREADS,
    ) -> None:
        """Create the state.

        `files`: those of all tables that `reload` loads again. `resume_log` continues log and queues above all offsets
        that the archive names, and returns the queues that were raised, with their ends.
        """
        self._threads = threads
        self._store, self._admission = store, admission
        self._metadata, self._synchronize, self._topics = metadata, synchronize, topics
        self._pops, self._timers, self._transactions = pops, timers, transactions
        self._pending_deletions, self._register_soon, self._resume_log = pending_deletions, register_soon, resume_log
        self._files = tuple(files)
        self._journal = journal
        self._unrecorded: ArchiveSettled | None = None  # record of this term that the log has not accepted yet
        self._raised: Mapping[str, Mapping[int, int]] = {}  # by `prepare`
        self._has_unsaved = False  # queues were raised, and that records of the log do so is not saved
        self._tries = 0
        self._is_reloading = False  # the tables are being loaded again

    async def prepare(self) -> None:
        """Do the slow steps before `lead`. All records are confirmed, and no master is followed.

        If this member does not become master after all, `follow` and `reload` undo this, except that queues remain
        raised: the next master's records lower them, or raise them further. Raise as `lead`; the call may be repeated.
        """
        store = self._store
        last = store.reader.last_record(store.max_physical_offset)
        assert last is None or last[0] < store.visibility.confirmed, "readers see all records"
        self._synchronize.forget()
        await self.follow_pops()
        await self._threads.run(store.prepare_to_lead)
        try:
            await in_turns(self._transactions.load_steps())
            await in_turns(self._timers.load_steps())
        except ValueError as error:
            raise StartupError(str(error), EXIT_FAILED) from error
        for line in await in_turns(self._metadata.lead_steps()):
            log.warning("group offset above the end of its queue: %s", line)
        await in_turns(self._pops.lead_steps())
        self._raised = await self._resume_log()

    def lead(self, epoch: int) -> None:
        """Accept this broker's own records in the log from now on, in this epoch. Called after `prepare`.

        Raise StoreError, StartupError or UnreadableChange: then the log remains a slave's.
        """
        self._store.lead()
        self._admission.leads = True
        try:
            # First: if a crash separated the end of a transaction from its mark, the mark is appended before any other
            # record.
            self._transactions.lead()
            self._pops.lead()
            self._topics.lead(epoch)
        except BaseException:
            self._close()
            raise
        self._journal.defer(_raised_records(self._raised))
        self._has_unsaved, self._tries = bool(self._raised), 0
        self._unrecorded = ArchiveSettled(epoch=epoch)

    async def record_settled(self) -> bool:
        """Record in the log, for later masters, which queues were raised, and that the archive is settled.

        Return False if the log accepts no record now.
        """
        if self._unrecorded is None:
            return True
        try:
            self._journal.record_deferred()
            if self._has_unsaved:
                # A later truncation, or a start, that finds the last record lowers no queue.
                await self._threads.run(self._store.queues.records.write, self._store.queue_changes.image())
                self._has_unsaved = False
            if self._unrecorded is not None:  # the term may have ended meanwhile
                self._journal.record(self._unrecorded)
        except (BrokerError, OSError) as error:
            self._tries += 1
            level = logging.WARNING if self._tries == _TRIES_BEFORE_WARNING else logging.DEBUG
            log.log(level, "the log does not record yet that the archive is settled: %s", error)
            return False
        self._unrecorded = None
        return True

    def follow(self) -> None:
        """Reject own records from this moment on, and suspend saving of the tables, which may contain some."""
        self._unrecorded = None
        self._journal.defer(())
        for file in self._files:
            file.suspend()
        self._close()

    def _close(self) -> None:
        self._admission.leads = False
        if not self._store.end.is_following:
            self._store.follow()

    def before_truncation(self) -> None:
        """Stop applying changes to the tables until a master is followed again, because the log will be truncated."""
        self._synchronize.forget()

    async def reload(self) -> None:
        """Load the tables again, because they contain more than the log. Raise as `lead`.

        While this runs the tables are incomplete: the caller refuses all requests, and nothing is saved or applied.
        """
        await run_beside(self._reload_parts(), self._threads.run)

    def _reload_parts(self) -> Parts[None]:
        self._is_reloading = True
        for file in self._files:
            file.suspend()
        self._synchronize.forget()  # nothing is applied before a master is followed again
        self._pending_deletions.forget()
        yield from self._timers.forget_parts()
        yield from self._transactions.forget_parts()
        yield from self._metadata.reload_parts()
        yield from self._pops.load_parts()
        for file in self._files:
            file.resume()
        self._is_reloading = False

    def confirmed(self) -> None:
        """Apply growth of the visible log: the own one of a master, or the one that a slave follows."""
        if self._store.end.is_following:
            self._synchronize.advance()
        else:
            self._pending_deletions.confirmed()

    @property
    def has_image(self) -> bool:
        """Return whether all tables of the followed master have been installed."""
        return self._synchronize.has_image

    async def follow_pops(self) -> None:
        """Let the book of pops follow the log, in slices, as a slave: little is left to read for a change to master."""
        has_more = True
        while has_more and self._store.end.is_following and not self._is_reloading:
            has_more = self._pops.follow(_EVENTS_AT_ONCE)
            await asyncio.sleep(0)

    def following(self, address: str, epoch: int, *, is_stock: bool) -> None:
        """Synchronize with a master, once the whole log is its."""
        self._synchronize.follow(Master(address, epoch, is_stock))

    def roles_changed(self) -> None:
        """Register the new role at the name servers."""
        self._register_soon()


def _raised_records(raised: Mapping[str, Mapping[int, int]]) -> Iterator[QueuesRaised]:
    queues: dict[str, dict[int, int]] = {}
    size = 0
    for topic, ends in raised.items():
        for queue, end in ends.items():
            more = _BYTES_A_QUEUE + (0 if topic in queues else len(msgspec.json.encode(topic)))
            if size + more > _BYTES_A_RECORD and queues:
                yield QueuesRaised(queues=queues)
                queues, size = {}, 0
                more = _BYTES_A_QUEUE + len(msgspec.json.encode(topic))
            size += more
            queues.setdefault(topic, {})[queue] = end
    if queues:
        yield QueuesRaised(queues=queues)
