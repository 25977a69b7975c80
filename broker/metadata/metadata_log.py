"""Application of the metadata log to the tables, at a start and on a slave.

    config/metadataImage.json   an image that is being installed; the next start installs it again, as a whole

A start applies the changes that are missing in each table's file. A slave applies changes as far as its log is
confirmed. Both apply each record once, in the order of the log.

A table's file records which changes it contains (`broker.tables.state_file`). A change that is in the log only is
applied at the start. A change in a file is not applied to that table again. A deletion removes the topic's queues below
its record, and nothing of a later topic with the same name. If only a start could complete a deletion, no queue begins
again at 0, because archived offsets since the record was written are unknown there.

Only records that a neve broker wrote are applied (`broker.intake.internal_records`). Foreign records, which clients of
an Apache master can store in this topic, are skipped.
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
    GroupDeleted,
    QueuesRaised,
    RowsErased,
    TopicDeleted,
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

# Records that are applied or skipped in one iteration of the event loop while tables are loaded again.
_CHANGES_IN_A_TURN = 50


class ImageNeeded(Exception):
    """Changes that the tables lack are no longer in the log: an image of the master's tables is needed."""


class FollowedChange(NamedTuple):
    """A change and its place in the log."""

    offset: int  # in the queue of changes
    record_end: int  # in the log
    change: Change


class Table(Protocol):
    """A table to which changes are applied."""

    def apply(self, change: Change) -> None:
        """Apply a change. A table ignores changes that don't concern it."""


class Modes(Table, Protocol):
    """Request modes: groups that pop."""

    file: StateFile

    def load_parts(self) -> Parts[None]:
        """Load the file, which stays suspended."""

    def image(self) -> ModesImage:
        """Return all rows, as `install` takes them."""

    def install(self, image: ModesImage) -> None:
        """Replace all rows."""


class UserTable(Protocol):
    """Users and policies."""

    def saved_position(self, end: int) -> int:
        """Return the offset below which the file contains all changes. `end` is the end of the log."""

    def apply(self, change: UserChange) -> None:
        """Apply a change durably."""

    def image(self) -> UsersImage:
        """Return all rows, as `install` takes them."""

    def install(self, image: UsersImage) -> None:
        """Replace all rows."""


class Delays(Protocol):
    """Delivery positions of delayed messages."""

    def load_parts(self) -> Parts[None]:
        """Read the positions of the log, or of the file if the log has none. The file stays suspended."""

    def positions(self) -> dict[int, int]:
        """Map each level to its next offset, as `install` takes it."""

    def install(self, positions: Mapping[int, int]) -> None:
        """Replace all positions."""

    def follow(self) -> None:
        """Take the last positions in the log."""


class PoppedMessages(Protocol):
    """Popped messages."""

    def forget(self, *, topic: str = "", group: str = "") -> bool:
        """Drop the state of a deleted topic or group. Return whether there was any."""

    def publish_offsets(self) -> None:
        """Set the committed offsets of popping groups, which this book knows best."""


class MetadataLog:
    """Follower of the metadata log. Runs on the event loop, and at a start before there is one."""

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
        users: UserTable | None,
        delays: Delays,
        pops: PoppedMessages,
        on_settled: Callable[[int], None] = lambda _: None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a follower.

        `users` is None without authentication; changes of users are skipped then. `on_settled` is called with the epoch
        in which a slave's master has settled its archive. `on_lost` is called if files of tables contain changes that
        the log has lost, and has to save that fact: the state before these changes is unknown.
        """
        self._journal, self._store, self._disk, self._image_path = journal, store, disk, image_path
        self._queues = store.queues
        self._topics, self._groups, self._offsets, self._modes = topics, groups, offsets, modes
        self._users, self._delays, self._pops = users, delays, pops
        # Deleted topics and groups that the files still had at the start, until the book of pops is loaded.
        self._deleted: list[TopicDeleted | GroupDeleted] = []
        # End of the queue of delay positions when they were read last.
        self._delays_followed = -1
        self._on_settled, self._on_lost = on_settled, on_lost
        # End of the queue of settled epochs when it was read last.
        self._settled_followed = -1

    # -- start

    def load(self) -> None:
        """Apply changes that the loaded tables lack. Raise UnreadableChange."""
        run_here(self._load_parts())

    def _load_parts(self) -> Parts[None]:
        if self._disk.exists(self._image_path):
            self._install(decode_image(self._disk.read(self._image_path)), at_start=True)
        end = self._queues.max_offset(METADATA_LOG, CHANGES)
        saved_positions = [_saved_position(file, end) for file in self._files]
        users_position = end if self._users is None else self._users.saved_position(end)
        first = max(min(*saved_positions, users_position), self._queues.min_offset(METADATA_LOG, CHANGES))
        for number, followed in enumerate(self._scan(first, end), 1):
            if followed is not None:
                behind = [saved_position <= followed.offset for saved_position in saved_positions]
                self._apply(followed, behind, users=users_position <= followed.offset, at_start=True)
                if isinstance(followed.change, TopicDeleted | GroupDeleted):
                    self._deleted.append(followed.change)
            if number % _CHANGES_IN_A_TURN == 0:
                yield nothing
        self._journal.reached(end)
        # A slave then searches only above this point, in a callback of the event loop.
        self._journal.records.last(METADATA_LOG, SETTLED, _settled)
        last = self._queues.next_offset(METADATA_LOG, CHANGES)
        if any(file.log_offset is not None and file.log_offset > last for file in self._files):
            self._on_lost()  # before a file is saved, which hides the loss
        if self._queues.records.has_unsaved_deletions:
            # before a file is saved, after which a start does not read these records again
            yield self._store.queue_changes.save_deletions
        for file in self._files:
            if file.log_offset is None or file.log_offset > end:
                # it contains changes that a power cut took from the log, and would not get the ones written in their
                # place
                yield from file.save_parts()

    def reload_parts(self) -> Parts[None]:
        """Load all tables again, after the log was truncated: on a deposed master, or a slave.

        The caller resumes the files, which are suspended until then, and applies nothing meanwhile. Changes that only a
        file contains are dropped with the next master's image; `on_lost` is called first. Raise as `load`.
        """
        for table in (self._topics, self._groups, self._offsets, self._modes, self._delays):
            yield from table.load_parts()
        yield from self._load_parts()
        self._deleted.clear()  # the book of pops is loaded again, and follows the log
        self._delays_followed = self._settled_followed = -1

    def settle(self) -> None:
        """Delete topics and groups from the book of pops, once it is loaded, and offsets that it has restored."""
        for change in self._deleted:
            if isinstance(change, TopicDeleted):
                is_deleted = self._topics.select(change.topic) is None and self._pops.forget(topic=change.topic)
            else:
                is_deleted = change.group not in self._groups.groups and self._pops.forget(group=change.group)
            if is_deleted:
                self._offsets.apply(change)
        self._deleted.clear()

    @property
    def _files(self) -> Sequence[StateFile]:
        return (self._topics.file, self._groups.file, self._offsets.file, self._modes.file)

    # -- slave

    def catch_up(self) -> int:
        """Apply visible changes. Return their number.

        Raise UnreadableChange or ImageNeeded: later changes were not applied, and the slave must not continue.
        """
        start, end = self._journal.position, self._queues.max_offset(METADATA_LOG, CHANGES)
        if start != end:  # called for each frame of a master; mostly there is nothing
            self._follow_changes(start, end)
        newest_end = self._queues.max_offset(METADATA_LOG, DELAYS)
        if newest_end != self._delays_followed:
            self._delays.follow()
            self._delays_followed = newest_end
        self._follow_settled()
        return self._journal.position - start

    def _follow_changes(self, start: int, end: int) -> None:
        lowest = self._queues.min_offset(METADATA_LOG, CHANGES)
        if start < min(lowest, end):
            raise ImageNeeded(f"the changes from {start} to {lowest} are not in this log")
        if start > end:  # changes written in place of those that the tables have would be skipped
            raise ImageNeeded(f"the tables have changes up to {start}, this log ends at {end}")
        for followed in self._read(start, end):
            self._apply(followed, [True] * len(self._files), users=True)
        self._journal.reached(end)  # foreign records after the last change are skipped

    def _follow_settled(self) -> None:
        """Publish the last settled epoch. All changes that it depends on precede it, and are applied by now."""
        newest_end = self._queues.max_offset(METADATA_LOG, SETTLED)
        if newest_end == self._settled_followed:
            return
        newest = self._journal.records.last(METADATA_LOG, SETTLED, _settled)
        if newest is not None and newest.offset >= self._settled_followed:
            self._on_settled(newest.epoch)
        self._settled_followed = newest_end

    def lead(self) -> list[str]:
        """Follow the log to its end, as master. Clip committed offsets that are above the end of a queue.

        Return a line for each clipped offset. For groups that pop, the book of pops, which followed the log, overrides
        polled offsets.
        """
        clipped = at_once(self.lead_steps())
        self._pops.publish_offsets()
        return clipped

    def lead_steps(self) -> Steps[list[str]]:
        """Run the slow part of `lead`, while the log does not grow and no offset changes."""
        self.catch_up()
        end = self._queues.next_offset(METADATA_LOG, CHANGES)
        assert self._journal.position == end, "a master's log is confirmed to its end before its first append"
        return (yield from self._offsets.clip_steps(self._queues.max_offset))

    # -- log

    def _read(self, first: int, end: int) -> Iterator[FollowedChange]:
        return (followed for followed in self._scan(first, end) if followed is not None)

    def _scan(self, first: int, end: int) -> Iterator[FollowedChange | None]:
        """Yield the changes in a range of offsets, and None for each foreign record."""
        first = max(first, self._queues.min_offset(METADATA_LOG, CHANGES))
        records, reached = self._journal.records, first
        for record in records.scan(METADATA_LOG, CHANGES, first, end):
            reached = record.queue_offset + 1
            if records.is_own(record):
                yield FollowedChange(record.queue_offset, record.physical_offset + record.size, _decoded(record))
            else:
                yield None
        if reached < end:
            raise UnreadableChange(f"{METADATA_LOG} can't be read at {reached}, below its end at {end}")

    def _apply(self, followed: FollowedChange, behind: Sequence[bool], *, users: bool, at_start: bool = False) -> None:
        """Apply a change. Set the journal's position after it, or at it if that fails."""
        self._journal.reached(followed.offset + 1)
        try:
            self._apply_change(followed, behind, users=users, at_start=at_start)
        except BaseException:
            self._journal.reached(followed.offset)
            raise

    def _apply_change(self, followed: FollowedChange, behind: Sequence[bool], *, users: bool, at_start: bool) -> None:
        change = followed.change
        if isinstance(change, UserChange):
            if users and self._users is not None:
                self._users.apply(change)
            return
        tables: Sequence[Table] = (self._topics, self._groups, self._offsets, self._modes)
        for table, takes in zip(tables, behind, strict=True):
            if takes:
                table.apply(change)
        if isinstance(change, TopicDeleted):
            self._forget_queues(change, followed.record_end, restart_at_zero=change.begins_again and not at_start)
            self._pops.forget(topic=change.topic)
        elif isinstance(change, GroupDeleted):
            self._pops.forget(group=change.group)
        elif isinstance(change, QueuesRaised):
            self._raise_queues(change, followed.record_end)
        elif isinstance(change, RowsErased):
            self._hide_rows(change)

    def _raise_queues(self, change: QueuesRaised, at: int) -> None:
        """Raise queues. Idempotent: queues that are as high stay, and topics deleted after this record stay deleted."""
        store = self._store
        raised = {topic: ends for topic, ends in change.queues.items() if store.queues.deleted_up_to(topic) < at}
        store.queue_changes.raise_queues(raised, record_end=at)

    def _hide_rows(self, change: RowsErased) -> None:
        """Hide erased rows. Raise OSError if the files of a queue can't be read: the change is applied again."""
        places = ((topic, queue, spans) for topic, queues in change.rows.items() for queue, spans in queues.items())
        rows = [(topic, queue, first, last) for topic, queue, spans in places for first, last in spans]
        hidden = erased_rows.hide(self._store, rows, erased_rows.at_once)
        if hidden.is_changed:
            self._store.queue_changes.save()
        for (topic, queue), reason in hidden.failed.items():
            raise OSError(errno.EIO, f"erased messages of {topic}, queue {queue} can't be hidden: {reason}")

    def _forget_queues(self, change: TopicDeleted, below: int, *, restart_at_zero: bool) -> None:
        store, topic = self._store, change.topic
        if store.queues.deleted_up_to(topic) < below and store.queues.names_of(topic):
            store.queue_changes.delete_topic(topic, restart_at_zero=restart_at_zero, below=below)

    def oldest_needed_physical(self) -> int | None:
        """Return the first physical offset that a start reads: its segment must not be evicted."""
        needed = [file.needs_log_from for file in self._files]
        first = min((offset for offset in needed if offset is not None), default=None)
        if first is None:
            return None
        entry = self._store.reader.entry(METADATA_LOG, CHANGES, first)
        return None if entry is None else entry[0]

    async def save(self) -> None:
        """Save the tables, so that a start needs no change that is in the log by now."""
        for file in self._files:
            if file.needs_log_from is not None:
                await file.save()

    # -- images

    def image(self) -> MetadataImage:
        """Return all tables except committed offsets, for a member that joins or reconnects.

        Fast enough for the event loop.
        """
        return MetadataImage(
            log_end=self._store.max_physical_offset,
            position=self._journal.position,
            topics=self._topics.image(),
            groups=self._groups.image(),
            modes=self._modes.image(),
            users=None if self._users is None else self._users.image(),
            delays=self._delays.positions(),
            ended=self._queues.records.ended(),
            ends=self._queues.ends(),
            settled_in=self._journal.settled_in,
        )

    def install(self, image: MetadataImage) -> None:
        """Replace all tables by a master's, atomically even through a crash; then follow the log from there.

        For a slave whose log is confirmed up to the image's end. Raise as `catch_up`.

        A slave that followed the former master mostly has the same tables. Then no file is written, because each takes
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
        """Return whether the tables that the log contains are equal, at the same position."""
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
        """Take the parts of an image that are not in the log."""
        for table, version in ((self._topics, image.topics.version), (self._groups, image.groups.version)):
            if table.data_version.to_wire() != version:
                table.data_version.read(version)
                table.file.touch()
        self._take_positions(image)

    def _take_positions(self, image: MetadataImage) -> None:
        self._delays.install(image.delays)
        self._delays_followed = -1
        self._store.queue_changes.remember_ended(image.ended)
        self._store.queue_changes.begin_queues(image.ends, image.log_end)

    def _install(self, image: MetadataImage, *, at_start: bool = False) -> None:
        self._follow_queues(image.position, at_start=at_start)
        self._journal.reached(image.position)
        self._topics.install(image.topics)
        self._groups.install(image.groups)
        self._modes.install(image.modes)
        if self._users is not None and image.users is not None:
            self._users.install(image.users)
        self._take_positions(image)
        if not at_start:  # at a start the book of pops is not loaded yet
            self.settle()
        if self._queues.records.has_unsaved_deletions:
            self._store.queue_changes.save_deletions()
        for file in self._files:
            file.save_now()
        self._disk.remove(self._image_path)
        self._disk.fsync_dir(self._image_path.parent)

    def _follow_queues(self, below: int, *, at_start: bool) -> None:
        """Apply changes of queues below the image's position: the image does not contain the queues of this broker."""
        first = max(self._journal.position, self._queues.min_offset(METADATA_LOG, CHANGES))
        for followed in self._read(first, min(below, self._queues.max_offset(METADATA_LOG, CHANGES))):
            change = followed.change
            if isinstance(change, TopicDeleted):
                self._forget_queues(change, followed.record_end, restart_at_zero=change.begins_again and not at_start)
            if isinstance(change, TopicDeleted | GroupDeleted):
                self._deleted.append(change)
            if isinstance(change, QueuesRaised):
                self._raise_queues(change, followed.record_end)
            if isinstance(change, RowsErased):
                self._hide_rows(change)

    def offsets_image(self) -> Steps[OffsetsImage]:
        """Return committed offsets, with the end of the log at that time.

        The position in the metadata log is that of the first step, so that no later change is missed; a change that is
        in the image already is applied again. The log end is that of the last step, so that no offset is above it.
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
        """Replace committed offsets by a master's, then apply later changes of the log.

        Offsets are never merged: a group that was reset to a lower offset would not go back. Raise ImageNeeded if this
        log begins above the image's position, and no image of the other tables is installed: otherwise older changes
        would be applied on top of newer offsets.
        """
        if image.position > self._journal.position:
            raise ImageNeeded(f"the offsets follow change {image.position}, the tables change {self._journal.position}")
        self._offsets.install(image.offsets, image.resets)
        for followed in self._read(image.position, self._journal.position):
            self._offsets.apply(followed.change)

    def install_stock(self, image: StockImage) -> None:
        """Replace tables by an Apache master's. Equal versions mean equal tables.

        Rows that every broker creates for itself stay. For a slave whose log is confirmed up to the image's end.
        Changes in the log are from a time before that master.
        """
        self._journal.reached(self._queues.max_offset(METADATA_LOG, CHANGES))
        topics, groups = self._topics, self._groups
        if image.topics.version != topics.data_version.to_wire():
            own = {name: topics.topics[name] for name in topics.system if name in topics.topics}
            # An Apache broker creates a row for any `rmq_sys_` topic that a client sends to. Rows of internal topics
            # are not taken.
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


def _saved_position(file: StateFile, end: int) -> int:
    return end if file.log_offset is None else min(file.log_offset, end)
