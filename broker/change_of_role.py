"""What a change of role is for what the broker keeps besides its log (`broker.ha.replicas_manager`: Books).

              the log                          tables                        what waits, what is popped
slave         takes its master's bytes alone   follow the log; where         lies in the log; the pops' book
                                               groups stand is polled        follows it, the others are empty
to master     confirmed to its end, then       followed to its end, no       read, as at a start
              open for own records             group above a queue's end
to slave      closed for own records, at once  as the log is confirmed       forgotten

To master are two parts. `prepare` takes its time, on threads and in steps: the timers and transactions in the log, the
offsets of groups, the popped queues. The broker takes nothing meanwhile, and its log does not grow. `lead` is one turn
of the loop: nothing else finds it half done.

To slave are two parts as well: `follow` is one turn, `retreat` reads the tables again on a thread and in slices. The
files of the tables are suspended and the broker serves nobody until it has ended.

Neither waits for a checkpoint of the queues. The log is the truth: a start after a crash rebuilds the queues above the
last checkpoint, and the log was synced before its epoch began (`CutTornTail`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

import msgspec

from broker.archiving.deletion import DoomedQueues
from broker.clients.registration import Registration
from broker.ha.reign import Reign
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
# Of a record that says which queues were raised: the log takes one of this size whatever its limits are.
_BYTES_A_RECORD = 16 << 10
_BYTES_A_QUEUE = 40  # its number and its offset
# It is tried four times a second; that a set lacks members for a moment is nothing to tell.
_TRIES_TILL_WARNING = 20


class ChangeOfRole:
    """See the module. On the loop."""

    def __init__(
        self,
        store: MessageStore,
        reign: Reign,
        *,
        journal: MetadataJournal,
        metadata: MetadataLog,
        synchronize: SlaveSynchronize,
        topics: TopicConfigManager,
        pops: PopBook,
        timers: TimerMessages,
        transactions: HalfMessages,
        doomed: DoomedQueues,
        registration: Registration,
        files: Sequence[StateFile],
        go_on: Callable[[], Mapping[str, Mapping[int, int]]],
        may_go_on_above: Callable[[], bool],
        write_checkpoint: Callable[[], Awaitable[None]],
        threads: Threads = SYSTEM_THREADS,
    ) -> None:
        """`files`: all that `retreat` reads again. `go_on`: the log does so above all that its archive names; returns
        where queues go on above their last record. `may_go_on_above`: whether `go_on` compares the log with the
        archive. `write_checkpoint`: returns when the wanted one is on the disk.
        """
        self._may_go_on_above = may_go_on_above
        self._write_checkpoint, self._threads = write_checkpoint, threads
        self._store, self._reign = store, reign
        self._metadata, self._synchronize, self._topics = metadata, synchronize, topics
        self._pops, self._timers, self._transactions = pops, timers, transactions
        self._doomed, self._registration, self._go_on = doomed, registration, go_on
        self._files = tuple(files)
        self._journal = journal
        self._unsaid: ArchiveSettled | None = None  # of this reign: the log has not taken it yet
        self._has_unsaved = False  # where queues were raised by what the log says
        self._tries = 0
        self._is_retreating = False  # the tables are not read again to their end

    async def prepare(self) -> None:
        """All of the log is confirmed and no master is followed: do what takes its time before `lead`.

        If this member is not to lead after all, `follow` and `retreat` take it back. Raises as `lead`.
        """
        store = self._store
        self._synchronize.forget()
        await self.follow_pops()
        if self._may_go_on_above():
            await self._checkpoint()
        await self._threads.run(store.prepare_to_lead)
        try:
            await in_turns(self._transactions.load_steps())
            await in_turns(self._timers.load_steps())
        except ValueError as error:
            raise StartupError(str(error), EXIT_FAILED) from error
        for line in await in_turns(self._metadata.lead_steps()):
            log.warning("group offset above the end of its queue: %s", line)
        await in_turns(self._pops.lead_steps())

    async def _checkpoint(self) -> None:
        """A queue that is raised gets a checkpoint on the loop before and after: little is left to sync for these."""
        for _ in range(2):  # the first may be an older one that was due already
            if self._store.want_checkpoint(self._store.max_physical_offset):
                await self._write_checkpoint()

    def lead(self, epoch: int) -> None:
        """Behind `prepare`: the log takes this broker's own records from now on, of this epoch.

        Raises StoreError, StartupError and UnreadableChange: then the log is a slave's as before.
        """
        store = self._store
        assert store.confirmed_offset == store.max_physical_offset, "readers see all of it"
        store.lead()
        self._reign.leads = True
        try:
            raised = self._go_on()
            # First: where a crash tore the end of a transaction from its mark, that is appended before all else.
            self._transactions.lead()
            self._pops.lead()
            self._topics.lead(epoch)
        except BaseException:
            self._close()
            raise
        self._journal.owe(_told(raised))
        self._has_unsaved, self._tries = bool(raised), 0
        self._unsaid = ArchiveSettled(epoch=epoch)

    def say_settled(self) -> bool:
        """In the log, for who may lead after this one: which queues go on higher than it says, and that this is all.

        False: not yet, it takes nothing now.
        """
        if self._unsaid is None:
            return True
        try:
            self._journal.record_owed()
            if self._has_unsaved:
                self._store.save_queue_state()  # a cut above what was said lowers no queue
                self._has_unsaved = False
            self._journal.record(self._unsaid)
        except (BrokerError, OSError) as error:
            self._tries += 1
            level = logging.WARNING if self._tries == _TRIES_TILL_WARNING else logging.DEBUG
            log.log(level, "who follows is not told yet that the archive is settled: %s", error)
            return False
        self._unsaid = None
        return True

    def follow(self) -> None:
        """From this instant on the log takes nothing of its own, and what the tables have of it is not saved."""
        self._unsaid = None
        self._journal.owe(())
        for file in self._files:
            file.suspend()
        self._close()

    def _close(self) -> None:
        self._reign.leads = False
        if not self._store.is_following:
            self._store.follow()

    def before_cut(self) -> None:
        """The log is going to be cut: nothing is applied to the tables before a master is followed again."""
        self._synchronize.forget()

    async def retreat(self) -> None:
        """Read the tables again, because the log shows less than they hold. Raises as `lead`.

        Between two parts they are incomplete: the caller refuses all requests, and nothing is saved or applied.
        """
        await run_beside(self._retreat_parts(), self._threads.run)

    def _retreat_parts(self) -> Parts[None]:
        self._is_retreating = True
        for file in self._files:
            file.suspend()
        self._synchronize.forget()  # nothing is applied to them before a master is followed again
        self._doomed.forget()
        self._timers.forget()
        self._transactions.forget()
        yield from self._metadata.reload_parts()
        yield from self._pops.load_parts()
        for file in self._files:
            file.resume()
        self._is_retreating = False

    def confirmed(self) -> None:
        """The log shows more: of a master, or of what it follows."""
        if self._store.is_following:
            self._synchronize.advance()
        else:
            self._doomed.confirmed()

    @property
    def has_image(self) -> bool:
        """Whether all tables of the master that is followed have been taken in place of what was here."""
        return self._synchronize.has_image

    async def follow_pops(self) -> None:
        """As a slave, a slice at a time: a master that begins has little left to read."""
        has_more = True
        while has_more and self._store.is_following and not self._is_retreating:
            has_more = self._pops.follow(_EVENTS_AT_ONCE)
            await asyncio.sleep(0)

    def following(self, address: str, epoch: int, *, is_stock: bool) -> None:
        """All that is here is of this master's log."""
        self._synchronize.follow(Master(address, epoch, is_stock))

    def roles_changed(self) -> None:
        """The name servers hear it."""
        self._registration.soon()


def _told(raised: Mapping[str, Mapping[int, int]]) -> Iterator[QueuesRaised]:
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
