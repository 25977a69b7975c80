"""Durable record of a member, and its newest view of the set. Pure.

The record changes before the act that depends on it: a caller saves it, on the disk, before its next action.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from broker.ha.member_events import Life, Save, SavedMember, View
from broker.ha.member_rules import MemberRules


def begin_life(saved: SavedMember, new_incarnation: str, rules: MemberRules, *, is_copy: bool = False) -> SavedMember:
    """Return the state that a start saves before it does anything else.

    `is_copy`: the directory has moved, so it is a backup or a copy. The original may be alive, and may have
    acknowledged more. This member starts as a new one, with its log.
    """
    if is_copy:
        saved = replace(saved, broker_id=0, check_code="", incarnation="", starts=0)
    may_lack = not saved.clean and rules.acknowledges_from_memory
    incarnation = new_incarnation if may_lack or not saved.incarnation else saved.incarnation
    return replace(saved, incarnation=incarnation, starts=saved.starts + 1, clean=False)


class MemberRecord:
    """Identity, epochs and archive state of one life of a member. Invariant: the pair of the view never decreases."""

    def __init__(self, saved: SavedMember, process: str) -> None:
        """`saved` is the result of `begin_life`, and is on the disk."""
        self.saved, self.process = saved, process
        known = frozenset(saved.sync_state_set)
        self.view = View(saved.master_epoch, saved.sync_state_set_epoch, known)  # the newest

    @property
    def life(self) -> Life:
        """Return the life as it is sent to controllers and masters."""
        saved = self.saved
        return Life(saved.broker_id, saved.incarnation, saved.starts, self.process)

    @property
    def is_in_sync(self) -> bool:
        """Return whether this member has all confirmed bytes. Only then can a reader rely on the end of a queue."""
        return self.saved.broker_id in self.view.sync_state_set

    @property
    def may_lack_archived(self) -> bool:
        """Return whether this master may lack archived bytes, because the members it was elected from may lack them."""
        return self.saved.may_lack_archived

    def take_view(self, view: View) -> None:
        """Take a newer view, and derive from it whether this member may lack archived bytes.

        An election alone gives no member any bytes. A member that is in sync with itself as master, or without a
        master, has the archived bytes only if it was in sync before. A member that is in sync with another master has
        what that one has. That includes all archived bytes if the log records that the master has settled its archive.
        """
        known, own = self.view, self.saved.broker_id
        assert view.pair >= known.pair
        self.view = view
        may_lack = self.may_lack_archived
        if own in view.sync_state_set:
            if view.master not in (None, own):
                may_lack = self.saved.settled_in != view.master_epoch
            elif not _has_stayed_in_sync(own, known, view):
                may_lack = True
        self.saved = replace(self.saved, may_lack_archived=may_lack)

    def archive_settled(self, confirm: int) -> list[Save]:
        """Record that the log continues above all offsets that the archive names."""
        return [self.save(confirm, may_lack_archived=False)] if self.may_lack_archived else []

    def master_settled(self, epoch: int, confirm: int) -> list[Save]:
        """Record that the master of this epoch has settled the archive, by a record of the log."""
        view = self.view
        if epoch == self.saved.settled_in:
            return []
        is_in_sync_with_it = epoch == view.master_epoch and view.master is not None and self.is_in_sync
        may_lack = self.may_lack_archived and not is_in_sync_with_it
        return [self.save(confirm, settled_in=epoch, may_lack_archived=may_lack)]

    def save_pair(self, confirm: int) -> list[Save]:
        """Return the action that saves the pair of the view, if it is higher than the saved one."""
        has_grown = self.view.pair > (self.saved.master_epoch, self.saved.sync_state_set_epoch)
        return [self.save(confirm)] if has_grown else []

    def save(self, confirm: int, **changes: Any) -> Save:
        """Change the record, and return the action that saves it."""
        self.saved = self.updated(confirm, **changes)
        return Save(self.saved)

    def updated(self, confirm: int, **changes: Any) -> SavedMember:
        """Return the record with the present view and confirm offset, and these changes."""
        view = self.view
        return replace(
            self.saved,
            master_epoch=view.master_epoch,
            sync_state_set_epoch=view.sync_state_set_epoch,
            sync_state_set=tuple(sorted(view.sync_state_set)),
            confirm=confirm,
            **changes,
        )


def _has_stayed_in_sync(broker_id: int, known: View, view: View) -> bool:
    """Return whether a member that is in sync in `view` is so by more than an election, which makes it the only one.

    An election increments both epochs, the end of a master's term the master epoch alone, any other change of the set
    the set's epoch alone.
    """
    changes = view.sync_state_set_epoch - known.sync_state_set_epoch
    if view.master == broker_id and view.master_epoch > known.master_epoch:
        return changes == 1 and broker_id in known.sync_state_set
    return changes == 0 or view.master_epoch <= known.master_epoch + 1
