"""Users and policies in the metadata log: conversion between changes of `auth.json` and records.

Several servers on a machine may share the file, so it names the log of its position. If it names another log, or none,
it counts as complete.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import msgspec

from access.model import Policy, User
from access.store import AuthStore, AuthTables, LogPlace
from broker.metadata.images import UsersImage
from broker.tables.changes import PoliciesDeleted, PoliciesPut, UserChange, UserDeleted, UserPut, row_of
from broker.tables.journal import Journal


class UserJournal:
    """`access.store.ChangeLog` of the store of users, which calls it before a change is in force."""

    def __init__(self, journal: Journal, log_uuid: Callable[[], str], settled: Callable[[], Awaitable[None]]) -> None:
        """`settled` returns when records in the log are as durable as answers promise."""
        self._journal, self._log_uuid, self._settled = journal, log_uuid, settled

    def record(self, before: AuthTables, after: AuthTables) -> None:
        """Record a change. Raise BrokerError if the log accepts no record now."""
        for change in changes_between(before, after):
            self._journal.record(change)
        after.log = LogPlace(self._log_uuid(), self._journal.position)

    async def settled(self) -> None:
        """Wait until an answer may be sent."""
        await self._settled()


def changes_between(before: AuthTables, after: AuthTables) -> Iterator[UserChange]:
    """Yield the changes between two states, deletions first."""
    for name in before.users.keys() - after.users.keys():
        yield UserDeleted(name=name)
    for subject in before.policies.keys() - after.policies.keys():
        yield PoliciesDeleted(subject=subject)
    for name, user in after.users.items():
        if before.users.get(name) != user:
            yield UserPut(name=name, user=msgspec.to_builtins(user))
    for subject, policies in after.policies.items():
        if before.policies.get(subject) != policies:
            yield PoliciesPut(subject=subject, policies=msgspec.to_builtins(policies))


class FollowedUsers:
    """Store of users, as the metadata log's follower sees it."""

    def __init__(self, store: AuthStore, journal: Journal, log_uuid: Callable[[], str]) -> None:
        self._store, self._journal, self._log_uuid = store, journal, log_uuid

    def saved_position(self, end: int) -> int:
        """Return the offset below which the file contains all changes. `end` is the end of the log."""
        place = self._store.tables.log
        if isinstance(place, LogPlace) and place.uuid == self._log_uuid():
            return min(place.offset, end)
        return end

    def apply(self, change: UserChange) -> None:
        """Apply a change durably. Raise UnreadableChange."""

        def edit(tables: AuthTables) -> None:
            match change:
                case UserPut():
                    tables.users[change.name] = row_of(change.user, User)
                case UserDeleted():
                    tables.users.pop(change.name, None)
                case PoliciesPut():
                    tables.policies[change.subject] = row_of(change.policies, list[Policy])
                case PoliciesDeleted():
                    tables.policies.pop(change.subject, None)
            self._stamp(tables)

        self._store.change_now(edit)

    def image(self) -> UsersImage:
        """Return all rows, as `install` takes them."""
        tables = self._store.tables
        return UsersImage(tables.users, tables.policies)

    def install(self, image: UsersImage) -> None:
        """Replace all rows."""

        def edit(tables: AuthTables) -> None:
            tables.users, tables.policies = dict(image.users), dict(image.policies)
            self._stamp(tables)

        self._store.change_now(edit)

    def _stamp(self, tables: AuthTables) -> None:
        tables.log = LogPlace(self._log_uuid(), self._journal.position)
