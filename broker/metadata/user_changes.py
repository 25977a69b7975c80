"""Users and policies in the metadata log: what a change of `auth.json` is as records, and what records make of it.

The file may be shared by servers of one machine, so it says in which log its position is: of another log's, or one that
nobody says, the file counts as it stands.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import msgspec

from access.model import Policy, User
from access.store import AuthStore, AuthTables, LogPlace
from broker.metadata.images import UsersImage
from broker.tables.changes import PoliciesGone, PoliciesPut, UserChange, UserGone, UserPut, row_of
from broker.tables.journal import Journal


class UserJournal:
    """Told by the store of users before a change is in force (`access.store.ChangeLog`)."""

    def __init__(self, journal: Journal, log_uuid: Callable[[], str], settled: Callable[[], Awaitable[None]]) -> None:
        """`settled` returns when what was put into the log is as safe as what is answered."""
        self._journal, self._log_uuid, self._settled = journal, log_uuid, settled

    def record(self, before: AuthTables, after: AuthTables) -> None:
        """Raises BrokerError where the log takes nothing now."""
        for change in changes_between(before, after):
            self._journal.record(change)
        after.log = LogPlace(self._log_uuid(), self._journal.position)

    async def settled(self) -> None:
        """The log's part of an answer."""
        await self._settled()


def changes_between(before: AuthTables, after: AuthTables) -> Iterator[UserChange]:
    """Deletions first."""
    for name in before.users.keys() - after.users.keys():
        yield UserGone(name=name)
    for subject in before.policies.keys() - after.policies.keys():
        yield PoliciesGone(subject=subject)
    for name, user in after.users.items():
        if before.users.get(name) != user:
            yield UserPut(name=name, user=msgspec.to_builtins(user))
    for subject, policies in after.policies.items():
        if before.policies.get(subject) != policies:
            yield PoliciesPut(subject=subject, policies=msgspec.to_builtins(policies))


class FollowedUsers:
    """The store of users as the metadata log sees it."""

    def __init__(self, store: AuthStore, journal: Journal, log_uuid: Callable[[], str]) -> None:
        self._store, self._journal, self._log_uuid = store, journal, log_uuid

    def stands_at(self, end: int) -> int:
        """The file holds the changes below this offset of the log, which ends there."""
        place = self._store.tables.log
        if isinstance(place, LogPlace) and place.uuid == self._log_uuid():
            return min(place.offset, end)
        return end

    def apply(self, change: UserChange) -> None:
        """What the change makes of them, on disk when it returns. Raises UnreadableChange."""

        def edit(tables: AuthTables) -> None:
            match change:
                case UserPut():
                    tables.users[change.name] = row_of(change.user, User)
                case UserGone():
                    tables.users.pop(change.name, None)
                case PoliciesPut():
                    tables.policies[change.subject] = row_of(change.policies, list[Policy])
                case PoliciesGone():
                    tables.policies.pop(change.subject, None)
            self._stamp(tables)

        self._store.change_now(edit)

    def image(self) -> UsersImage:
        """All of them, as `install` takes them."""
        tables = self._store.tables
        return UsersImage(tables.users, tables.policies)

    def install(self, image: UsersImage) -> None:
        """Take another's in place of these."""

        def edit(tables: AuthTables) -> None:
            tables.users, tables.policies = dict(image.users), dict(image.policies)
            self._stamp(tables)

        self._store.change_now(edit)

    def _stamp(self, tables: AuthTables) -> None:
        tables.log = LogPlace(self._log_uuid(), self._journal.position)
