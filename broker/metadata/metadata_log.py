"""The metadata log as it is followed: by a start, behind what each table's file holds, and by a slave, as far as its
log is confirmed. Both go the same way, `catch_up`; a record is applied once, in the order of the log.

    config/metadataImage.json   an image that is being installed; the next start does it again, whole

A table's file says which changes it holds (`broker.tables.state_file`), so what a crash left in the log alone is
applied at the start, and what is in a file already is not applied to that table again. A deletion removes a topic's
queues below its record, and nothing that a later life of the topic has. One that only a start could finish begins none
of them at 0: what the archive has named since the record was written is not known there.

Only records that a neve broker wrote are applied (`broker.intake.internal_records`). Foreign records, which clients of
an Apache master can store in this topic, are passed over.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from broker.metadata.images import MetadataImage, ModesImage, OffsetsImage, UsersImage, decode_image
from broker.metadata.metadata_journal import MetadataJournal
from broker.metadata.stock_tables import StockImage
from broker.store import erased_rows
from broker.store.message_store import MessageStore
from broker.tables.changes import (
    CHANGES,
    DELAYS,
    SETTLED,
    ArchiveSettled,
    Change,
    GroupGone,
    QueuesRaised,
    RowsErased,
    TopicGone,
    UnreadableChange,
    UserChange,
    decode_change,
)
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from broker.tables.state_file import StateFile
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfigManager
from infra.disk.filesystem import Disk
from infra.loop.in_steps import Steps, at_once
from infra.loop.parts import Parts, nothing, run_here
from neve.record.codec import MessageRecord
from neve.remoting.names import METADATA_LOG, SYSTEM_GROUPS, is_internal

log = logging.getLogger(__name__)

# Changes that are applied in one turn of the event loop where tables are read again.
_CHANGES_IN_A_TURN = 50


class ImageNeeded(Exception):
    """Changes that this broker's tables lack are not in its log any more: only an image of its master's helps."""


class Followed(NamedTuple):
    """A change in its place."""

    offset: int  # in the queue of changes
    record_end: int  # in the log
    change: Change


class Table(Protocol):
    """What changes are applied to."""

    def apply(self, change: Change) -> None:
        """What the change makes of it; of most, nothing."""


class Modes(Table, Protocol):
    """Which groups pop."""

    file: StateFile

    def load_parts(self) -> Parts[None]:
        """As the file has it, which stays suspended."""

    def image(self) -> ModesImage:
        """All of them, as `install` takes them."""

    def install(self, image: ModesImage) -> None:
        """Take another's in place of these."""


class Users(Protocol):
    """Users and policies."""

    def stands_at(self, end: int) -> int:
        """The file holds the changes below this offset of the log, which ends there."""

    def apply(self, change: UserChange) -> None:
        """What the change makes of them, on disk when it returns."""

    def image(self) -> UsersImage:
        """All of them, as `install` takes them."""

    def install(self, image: UsersImage) -> None:
        """Take another's in place of these."""


class Delays(Protocol):
    """How far delayed messages are delivered."""

    def load_parts(self) -> Parts[None]:
        """Read the positions of the log, or of the file if the log has none. The file stays suspended."""

    def positions(self) -> dict[int, int]:
        """Level → the next one, as `install` takes them."""

    def install(self, positions: Mapping[int, int]) -> None:
        """Take another's in place of these."""

    def follow(self) -> None:
        """They are where the log says last."""


class Pops(Protocol):
    """What is popped."""

    def forget(self, *, topic: str = "", group: str = "") -> bool:
        """Of a topic or a group that is gone; whether there was anything."""

    def tell_offsets(self) -> None:
        """Where groups that pop stand, the book knows best."""


class MetadataLog:
    """See the module. On the loop, and at a start before there is one."""

    def __init__(
        self,
        journal: MetadataJournal,
        store: MessageStore,
        disk: Disk,
        image_path: Path,
        *,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        offsets: ConsumerOffsetManager,
        modes: Modes,
        users: Users | None,
        delays: Delays,
        pops: Pops,
        on_settled: Callable[[int], None] = lambda _: None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """`users`: None where this broker asks nobody who he is; what changes of them then goes by it.

        `on_settled` is told of a slave's master that it has settled its archive, and in which epoch. `on_lost` is told,
        and has to keep, that files of tables hold changes which the log has lost: it can't say what was before them.
        """
        self._journal, self._store, self._disk, self._image_path = journal, store, disk, image_path
        self._topics, self._groups, self._offsets, self._modes = topics, groups, offsets, modes
        self._users, self._delays, self._pops = users, delays, pops
        # Deleted behind what the files held at the start, before the book of pops was read.
        self._gone: list[TopicGone | GroupGone] = []
        # The end of the queue of delay positions when they were read last.
        self._delays_followed = -1
        self._on_settled, self._on_lost = on_settled, on_lost
        # The same of that of who has settled.
        self._settled_followed = -1

    # ---- a start

    def load(self) -> None:
        """Behind the tables' own `load`: what the log has and they have not. Raises UnreadableChange."""
        run_here(self._load_parts())

    def _load_parts(self) -> Parts[None]:
        if self._disk.exists(self._image_path):
            self._install(decode_image(self._disk.read(self._image_path)), at_start=True)
        end = self._store.max_offset(METADATA_LOG, CHANGES)
        stands = [_stands_at(file, end) for file in self._files]
        users_stand = end if self._users is None else self._users.stands_at(end)
        first = max(min(*stands, users_stand), self._store.min_offset(METADATA_LOG, CHANGES))
        for number, followed in enumerate(self._read(first, end), 1):
            behind = [stands_at <= followed.offset for stands_at in stands]
            self._apply(followed, behind, users=users_stand <= followed.offset, at_start=True)
            if isinstance(followed.change, TopicGone | GroupGone):
                self._gone.append(followed.change)
            if number % _CHANGES_IN_A_TURN == 0:
                yield nothing
        self._journal.reached(end)
        # A slave then looks for it only behind this point, in a turn of the loop.
        self._journal.records.last(METADATA_LOG, SETTLED, _settled)
        last = self._store.next_offset(METADATA_LOG, CHANGES)
        if any(file.log_offset is not None and file.log_offset > last for file in self._files):
            self._on_lost()  # before a file says so no more
        if self._store.has_unsaved_deletions:
            yield self._store.save_deletions  # before a file is saved from which on their records are not read again
        for file in self._files:
            if file.log_offset is None or file.log_offset > end:
                # it speaks of changes that a power cut took: what comes in their places is not in it
                yield from file.save_parts()

    def reload_parts(self) -> Parts[None]:
        """Read all tables again, where the log shows less than it did: of a deposed master, or after a cut.

        The files are suspended until the caller resumes them, and nothing is applied to the tables meanwhile. Changes
        that only a file has are dropped with the next master's image; `on_lost` is called first.
        Raises as `load`.
        """
        for table in (self._topics, self._groups, self._offsets, self._modes, self._delays):
            yield from table.load_parts()
        yield from self._load_parts()
        self._gone.clear()  # the book is read anew, and follows the log
        self._delays_followed = self._settled_followed = -1

    def settle(self) -> None:
        """Once the book of pops is read, too: what is gone is gone there, and where the book has put it back."""
        for change in self._gone:
            if isinstance(change, TopicGone):
                is_gone = self._topics.select(change.topic) is None and self._pops.forget(topic=change.topic)
            else:
                is_gone = change.group not in self._groups.groups and self._pops.forget(group=change.group)
            if is_gone:
                self._offsets.apply(change)
        self._gone.clear()

    @property
    def _files(self) -> Sequence[StateFile]:
        return (self._topics.file, self._groups.file, self._offsets.file, self._modes.file)

    # ---- a slave

    def catch_up(self) -> int:
        """Apply what the log shows by now; how many changes that were.

        Raises UnreadableChange, and ImageNeeded: nothing from there on was applied, and the slave must not go on.
        """
        start, end = self._journal.position, self._store.max_offset(METADATA_LOG, CHANGES)
        if start != end:  # asked for with each frame of a master: mostly there is nothing
            self._follow_changes(start, end)
        said = self._store.max_offset(METADATA_LOG, DELAYS)
        if said != self._delays_followed:
            self._delays.follow()
            self._delays_followed = said
        self._follow_settled()
        return self._journal.position - start

    def _follow_changes(self, start: int, end: int) -> None:
        lowest = self._store.min_offset(METADATA_LOG, CHANGES)
        if start < min(lowest, end):
            raise ImageNeeded(f"the changes from {start} to {lowest} are not in this log")
        if start > end:  # others are to come in the places of those that these tables have: they would be passed over
            raise ImageNeeded(f"the tables have changes up to {start}, this log ends at {end}")
        for followed in self._read(start, end):
            self._apply(followed, [True] * len(self._files), users=True)
        self._journal.reached(end)  # foreign records behind the last change are passed over

    def _follow_settled(self) -> None:
        """The last that settled: behind it all changes that it needed are here, and followed by now."""
        said = self._store.max_offset(METADATA_LOG, SETTLED)
        if said == self._settled_followed:
            return
        newest = self._journal.records.last(METADATA_LOG, SETTLED, _settled)
        if newest is not None and newest.offset >= self._settled_followed:
            self._on_settled(newest.epoch)
        self._settled_followed = said

    def lead(self) -> list[str]:
        """All of the log is this broker's own from now on: follow it to its end, and let nobody stand above a queue's.

        Returns what stood above. Where groups pop, the book that followed the log beats what was polled.
        """
        clipped = at_once(self.lead_steps())
        self._pops.tell_offsets()
        return clipped

    def lead_steps(self) -> Steps[list[str]]:
        """The part of `lead` that takes its time, while the log does not grow and no offset changes."""
        self.catch_up()
        end = self._store.next_offset(METADATA_LOG, CHANGES)
        assert self._journal.position == end, "a master's log is confirmed to its end before it takes anything"
        return (yield from self._offsets.clip_steps(self._store.max_offset))

    # ---- the log

    def _read(self, first: int, end: int, queue: int = CHANGES) -> Iterator[Followed]:
        first = max(first, self._store.min_offset(METADATA_LOG, queue))
        records, reached = self._journal.records, first
        for record in records.scan(METADATA_LOG, queue, first, end):
            reached = record.queue_offset + 1
            if records.is_own(record):
                yield Followed(record.queue_offset, record.physical_offset + record.size, _decoded(record))
        if reached < end:
            raise UnreadableChange(f"{METADATA_LOG} can't be read at {reached}, below its end at {end}")

    def _apply(self, followed: Followed, behind: Sequence[bool], *, users: bool, at_start: bool = False) -> None:
        """The tables stand behind it then; where it can't be applied, they stand at it."""
        self._journal.reached(followed.offset + 1)
        try:
            self._apply_change(followed, behind, users=users, at_start=at_start)
        except BaseException:
            self._journal.reached(followed.offset)
            raise

    def _apply_change(self, followed: Followed, behind: Sequence[bool], *, users: bool, at_start: bool) -> None:
        change = followed.change
        if isinstance(change, UserChange):
            if users and self._users is not None:
                self._users.apply(change)
            return
        tables: Sequence[Table] = (self._topics, self._groups, self._offsets, self._modes)
        for table, takes in zip(tables, behind, strict=True):
            if takes:
                table.apply(change)
        if isinstance(change, TopicGone):
            self._forget_queues(change, followed.record_end, begin_again=change.begins_again and not at_start)
            self._pops.forget(topic=change.topic)
        elif isinstance(change, GroupGone):
            self._pops.forget(group=change.group)
        elif isinstance(change, QueuesRaised):
            self._raise_queues(change, followed.record_end)
        elif isinstance(change, RowsErased):
            self._hide_rows(change)

    def _raise_queues(self, change: QueuesRaised, at: int) -> None:
        """May be done again: a queue that is as high stays, and a topic that was deleted behind it stays deleted."""
        store = self._store
        raised = {topic: ends for topic, ends in change.queues.items() if store.gone_below(topic) < at}
        store.raise_queues(raised, said_at=at)

    def _hide_rows(self, change: RowsErased) -> None:
        """Raises OSError if the files of a queue can't be read: the change is applied again."""
        places = ((topic, queue, spans) for topic, queues in change.rows.items() for queue, spans in queues.items())
        rows = [(topic, queue, first, last) for topic, queue, spans in places for first, last in spans]
        hidden = erased_rows.hide(self._store, rows, erased_rows.at_once)
        if hidden.is_changed:
            self._store.save_queue_state()
        for (topic, queue), reason in hidden.failed.items():
            raise OSError(errno.EIO, f"erased messages of {topic}, queue {queue} can't be hidden: {reason}")

    def _forget_queues(self, change: TopicGone, below: int, *, begin_again: bool) -> None:
        store, topic = self._store, change.topic
        if store.gone_below(topic) < below and store.queues_of(topic):
            store.delete_topic(topic, begin_again=begin_again, below=below)

    def oldest_needed_physical(self) -> int | None:
        """The first log position that a start reads: its segment must not be evicted."""
        needed = [file.needs_log_from for file in self._files]
        first = min((offset for offset in needed if offset is not None), default=None)
        if first is None:
            return None
        entry = self._store.entry(METADATA_LOG, CHANGES, first)
        return None if entry is None else entry[0]

    async def save(self) -> None:
        """Then a start needs none of what the log has said by now."""
        for file in self._files:
            if file.needs_log_from is not None:
                await file.save()

    # ---- images

    def image(self) -> MetadataImage:
        """All tables but the positions, for a member that begins, or comes again; on the loop, at once."""
        return MetadataImage(
            log_end=self._store.max_physical_offset,
            position=self._journal.position,
            topics=self._topics.image(),
            groups=self._groups.image(),
            modes=self._modes.image(),
            users=None if self._users is None else self._users.image(),
            delays=self._delays.positions(),
            ended=self._store.deleted_below(),
            ends=self._store.queue_ends(),
            settled_in=self._journal.settled_in,
        )

    def install(self, image: MetadataImage) -> None:
        """Take a master's tables in place of these, all or none, also through a crash; then follow the log from there.

        For a slave whose log is confirmed as far as the image's. Raises as `catch_up`.

        A slave that followed the former master mostly has the same tables: then no file is written, because each takes
        two syncs on the event loop.
        """
        if self._has_tables_of(image):
            self._adopt(image)
        else:
            self._disk.write_atomic(self._image_path, msgspec.json.encode(image))
            self._install(image)
        self.catch_up()
        if image.settled_in:
            self._on_settled(image.settled_in)

    def _has_tables_of(self, image: MetadataImage) -> bool:
        """Whether the tables that the log brings are equal, at the same place of the log."""
        users = image.users if self._users is None else self._users.image()
        return (
            self._journal.position == image.position
            and self._topics.topics == image.topics.topics
            and self._groups.groups == image.groups.groups
            and self._groups.forbidden() == image.groups.forbidden
            and self._modes.image() == image.modes
            and (image.users is None or users == image.users)
        )

    def _adopt(self, image: MetadataImage) -> None:
        """Take the parts of an image that no record of the log brings."""
        for table, version in ((self._topics, image.topics.version), (self._groups, image.groups.version)):
            if table.data_version.to_wire() != version:
                table.data_version.read(version)
                table.file.touch()
        self._take_positions(image)

    def _take_positions(self, image: MetadataImage) -> None:
        self._delays.install(image.delays)
        self._delays_followed = -1
        self._store.remember_ended(image.ended)
        self._store.begin_queues(image.ends, image.log_end)

    def _install(self, image: MetadataImage, *, at_start: bool = False) -> None:
        self._follow_queues(image.position, at_start=at_start)
        self._journal.reached(image.position)
        self._topics.install(image.topics)
        self._groups.install(image.groups)
        self._modes.install(image.modes)
        if self._users is not None and image.users is not None:
            self._users.install(image.users)
        self._take_positions(image)
        if not at_start:  # else the book of pops is not read yet
            self.settle()
        if self._store.has_unsaved_deletions:
            self._store.save_deletions()
        for file in self._files:
            file.save_now()
        self._disk.remove(self._image_path)
        self._disk.fsync_dir(self._image_path.parent)

    def _follow_queues(self, below: int, *, at_start: bool) -> None:
        """What this log says of its queues and the image has passed: it says nothing of those that are here."""
        first = max(self._journal.position, self._store.min_offset(METADATA_LOG, CHANGES))
        for followed in self._read(first, min(below, self._store.max_offset(METADATA_LOG, CHANGES))):
            change = followed.change
            if isinstance(change, TopicGone):
                self._forget_queues(change, followed.record_end, begin_again=change.begins_again and not at_start)
            if isinstance(change, TopicGone | GroupGone):
                self._gone.append(change)
            if isinstance(change, QueuesRaised):
                self._raise_queues(change, followed.record_end)
            if isinstance(change, RowsErased):
                self._hide_rows(change)

    def offsets_image(self) -> Steps[OffsetsImage]:
        """Where groups stand, with the end of the log that this belongs to.

        The place in the log is that of the first step, so that no change made meanwhile is missed: one that is in it
        already is applied again. The end is that of the last, so that no group stands above it.
        """
        position = self._journal.position
        offsets = yield from self._offsets.copied()
        return OffsetsImage(
            log_end=self._store.max_physical_offset,
            position=position,
            offsets=offsets,
            resets=self._offsets.resets(),
        )

    def install_offsets(self, image: OffsetsImage) -> None:
        """Take what a master said of groups in place of what is here; what the log has said since holds on top of it.

        For a slave that has caught up with the log as far as the image's. Never merged: a group that was set back would
        not go back.
        """
        assert image.position <= self._journal.position, "older changes would be applied on top of newer offsets"
        self._offsets.install(image.offsets, image.resets)
        for followed in self._read(image.position, self._journal.position):
            self._offsets.apply(followed.change)

    def install_stock(self, image: StockImage) -> None:
        """Take what an Apache master said in place of what is here; equal versions mean equal tables.

        What every broker makes for itself stays. For a slave whose log is confirmed as far as the image's: changes that
        the log has are of a time before that master's.
        """
        self._journal.reached(self._store.max_offset(METADATA_LOG, CHANGES))
        topics, groups = self._topics, self._groups
        if image.topics.version != topics.data_version.to_wire():
            own = {name: topics.topics[name] for name in topics.system if name in topics.topics}
            # An Apache broker creates a row for any `rmq_sys_` topic that a client sends to: none of an internal topic
            # is taken over.
            others = {name: row for name, row in image.topics.topics.items() if not is_internal(name)}
            topics.install(msgspec.structs.replace(image.topics, topics=own | others))
        if image.groups.version != groups.data_version.to_wire():
            system = {name: groups.groups[name] for name in SYSTEM_GROUPS if name in groups.groups}
            groups.install(msgspec.structs.replace(image.groups, groups=system | image.groups.groups))
        if image.modes != self._modes.image():
            self._modes.install(image.modes)
        if image.delays != self._delays.positions():
            self._delays.install(image.delays)
        if image.offsets != self._offsets.table():
            self._offsets.install(image.offsets, {})


class _Settled(NamedTuple):
    offset: int  # of the record
    epoch: int


def _settled(record: MessageRecord) -> _Settled | None:
    change = _decoded(record)
    return _Settled(record.queue_offset, change.epoch) if isinstance(change, ArchiveSettled) else None


def _decoded(record: MessageRecord) -> Change:
    try:
        return decode_change(record.body)
    except UnreadableChange as error:
        raise UnreadableChange(f"{METADATA_LOG} at {record.queue_offset}: {error}") from error


def _stands_at(file: StateFile, end: int) -> int:
    return end if file.log_offset is None else min(file.log_offset, end)
