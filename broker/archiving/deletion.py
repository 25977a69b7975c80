"""What goes with a topic, or with a group, and in which order: in memory, on disk, in the archive."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from broker.archiving.tombstone import Tombstones
from broker.clients.registration import Registration
from broker.intake.replication import Replication
from broker.long_polling.message_arriving import MessageArriving
from broker.pop.pop_book import PopBook
from broker.store.message_store import MessageStore
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from broker.tables.journal import Journal
from broker.tables.retry_names import RetryNames
from broker.tables.state_file import SyncLog
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfigManager
from infra.loop.threads import SYSTEM_THREADS, Threads
from neve.errors import BrokerError

log = logging.getLogger(__name__)


class DoomedQueues:
    """Of topics whose deletion the broker set has not confirmed yet: was it cut off, the topic is as it was.

    What is left here when this broker is master no more, it deletes as a slave, by the log.
    """

    def __init__(self, store: MessageStore, replication: Replication) -> None:
        self._store, self._replication = store, replication
        self._topics: dict[str, int] = {}  # topic → the end of the record that deletes it

    @property
    def term(self) -> int:
        """In which a deletion begins; see `Replication`."""
        return self._replication.term

    def add(self, topic: str) -> None:
        """Its record is the log's last; where nobody is waited for it is confirmed already."""
        self._topics[topic] = self._store.max_physical_offset
        self.confirmed()

    async def deleted(self, term: int) -> None:
        """Returns when all that were added in this term are gone; BrokerError where that is not known in time."""
        await self._replication.replicated(max(self._topics.values(), default=0), term)
        self.confirmed()  # where nobody is waited for it was so before it was on the disk, and nobody says it again

    def confirmed(self) -> None:
        """More is. Messages of a later life of a topic stay."""
        store = self._store
        for topic, end in [item for item in self._topics.items() if item[1] <= store.confirmed_offset]:
            del self._topics[topic]
            if store.gone_below(topic) < end:
                store.delete_topic(topic, below=end)

    def forget(self) -> None:
        """This broker is master no more."""
        self._topics.clear()


class TopicDeletion:
    """Gone for clients at once; the archive expires its objects by their own rules.

    A topic that was never archived begins at offset 0 again, as in RocketMQ; any other goes on above what it had,
    and so does one whose deletion a start had to finish.
    """

    def __init__(
        self,
        *,
        store: MessageStore,
        journal: Journal,
        sync_log: SyncLog,
        tombstones: Callable[[], Tombstones],
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        offsets: ConsumerOffsetManager,
        retry_names: RetryNames,
        pops: PopBook,
        arriving: MessageArriving,
        registration: Registration,
        doomed: DoomedQueues | None = None,
        threads: Threads = SYSTEM_THREADS,
    ) -> None:
        """`tombstones`: the archive's; it is settled after this is made. `doomed`: of a member of a broker set."""
        self._threads = threads
        self._doomed = doomed
        self._store, self._journal, self._sync_log, self._tombstones = store, journal, sync_log, tombstones
        self._topics, self._groups, self._offsets, self._retry_names = topics, groups, offsets, retry_names
        self._pops, self._arriving, self._registration = pops, arriving, registration

    async def delete(self, topic: str) -> None:
        """With the retry topics that only it has; returns when it is gone on disk, in the archive, for name servers."""
        if self._topics.select(topic) is None:
            return
        # A disk that refuses the deletion refuses this, and the topic is as it was.
        await self._threads.run(self._store.write_queue_state, self._store.queue_state_image())
        if self._doomed is not None:
            await self._delete_in_set(topic, self._doomed)
            return
        # Of all its queues, also of those that only an earlier life had: the newest tombstone alone counts.
        tombstones, told = self._tombstones(), self._store.following_of(topic)
        retries = [name for group in self._groups.groups for name in self._retry_names.gone_with(group, topic)]
        named = tombstones.has_named(topic)
        if named:
            await self._record(topic, told)
        begins_again = not named and tombstones.begin_again(topic)
        if not named and not begins_again:  # a round has named it meanwhile
            await self._record(topic, told)
        # no await from begin_again to here: no message may come in between
        ends = self._store.following_of(topic)
        self._delete_now(topic, ends, begins_again=begins_again)
        await self._threads.run(self._store.save_deletions)
        await self._save()
        self._arriving.release_topic(topic)
        for retry in retries:
            await self.delete(retry)
        await self._registration.now()
        # Last, for the topic is gone: where this fails, the archive's next look at what has expired does it.
        if not begins_again and ends != told:  # sent while the archive wrote; a round may have taken it
            await tombstones.record(topic, ends)

    async def _delete_in_set(self, topic: str, doomed: DoomedQueues) -> None:
        """The archive hears of it once it is confirmed: S3 is there for a master that is cut off from its slaves, too,
        and the next one would have the topic without what is archived of it.
        """
        term, wanted = doomed.term, [topic]
        gone: dict[str, Mapping[int, int]] = {}
        for name in wanted:
            if self._topics.select(name) is not None:
                wanted += [retry for group in self._groups.groups for retry in self._retry_names.gone_with(group, name)]
                gone[name] = self._store.following_of(name)
                self._delete_now(name, gone[name], begins_again=False)
        await self._save()
        for name in gone:
            self._arriving.release_topic(name)
        await self._registration.now()
        await doomed.deleted(term)
        await self._threads.run(self._store.save_deletions)
        for name, ends in gone.items():
            try:
                await self._tombstones().record(name, ends)
            except BrokerError as error:
                log.warning("%s is deleted, and the archive's next look at what has expired tells it: %s", name, error)

    async def _save(self) -> None:
        await self._topics.file.save()
        await self._offsets.file.save()

    def _delete_now(self, topic: str, ends: Mapping[int, int], *, begins_again: bool) -> None:
        """Decide, by the record in the metadata log; no I/O but that append.

        No table is saved with this change before the store has saved the deletion: a start would then not read the
        record again, and find the queues. Where the store can't save it this broker ends, and the next start deletes
        the queues by the record, before the archive looks at them.
        """
        change = self._topics.deletion(topic, ends, begins_again=begins_again)
        self._journal.record(change)
        if self._doomed is None:
            self._store.delete_topic(topic, begin_again=begins_again)
        else:
            self._doomed.add(topic)
        self._topics.apply(change)
        self._pops.drop(topic=topic)  # before the offsets: a start takes them from the pop book
        self._offsets.apply(change)

    async def _record(self, topic: str, ends: Mapping[int, int]) -> None:
        """Whether the tombstone stands may never be known, and the topic goes on then: were these offsets not on the
        disk, a start without the archive would give them again, and the tombstone hide what got them.
        """
        await self._sync_log()
        await self._tombstones().record(topic, ends)


class GroupDeletion:
    """Its settings and what it has popped; where it stands stays, unless that is to go, too."""

    def __init__(
        self,
        *,
        journal: Journal,
        groups: SubscriptionGroupManager,
        offsets: ConsumerOffsetManager,
        pops: PopBook,
    ) -> None:
        self._journal, self._groups, self._offsets, self._pops = journal, groups, offsets, pops

    async def delete(self, group: str, *, with_offsets: bool) -> None:
        """Returns when it is gone on disk."""
        change = self._groups.deletion(group, with_offsets=with_offsets)
        self._journal.record(change)
        self._groups.apply(change)
        self._pops.drop(group=group)  # before the offsets: at a start the book tells the table
        self._offsets.apply(change)
        await self._groups.file.save()
        if with_offsets:
            await self._offsets.file.save()
