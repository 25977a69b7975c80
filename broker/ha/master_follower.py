"""A member's connection to its master: address of the HA port, stream, and the tables that belong to the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from broker.ha.controller_requests import Spawn
from broker.ha.epoch_file import StoredEpochs
from broker.ha.frames import HELLO_FORMAT, Hello
from broker.ha.ha_client import FollowTarget, HaClient, SlaveEvents
from broker.ha.member_events import Follow
from broker.ha.member_file import MemberFile
from broker.ha.member_role import MemberRole
from broker.ha.role_state import RoleState, SetArchive
from broker.ha.slave_session import SlaveSession
from broker.ha.stock_master import read_settings, unlike_stock_member
from broker.store.message_store import MessageStore
from infra.net.remoting_peer import PeerSecurity, RemotingPeer
from neve.entropy import Entropy, salt
from neve.errors import NeveError
from neve.remoting.address import parse_address
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand

log = logging.getLogger(__name__)

_RESOLVE_S = 3.0
_RESOLVE_AGAIN_S = 0.5


class MasterLookup:
    """Finds the HA port of an elected master: its port for clients answers 906."""

    def __init__(
        self, own: Hello, security: PeerSecurity, entropy: Entropy, *, admits_stock: bool, waits: bool
    ) -> None:
        """`waits`: acknowledgements wait for the set, which an Apache master's settings have to match."""
        self._own, self._security, self._entropy = own, security, entropy
        self._admits_stock, self._waits = admits_stock, waits
        self.trouble = ""  # why the address of the HA port is unknown

    async def target(self, follow: Follow) -> FollowTarget:
        """Return the master to connect to. Query it until it answers."""
        while True:
            try:
                target = await self._query(follow)
            except (OSError, TimeoutError, NeveError, ValueError) as error:
                why = str(error) or type(error).__name__
                if why not in self.trouble:
                    log.warning("the master at %s is not followed: %s", follow.address, why)
                self.trouble = f"the master at {follow.address} is not followed: {why}"
                await asyncio.sleep(_RESOLVE_AGAIN_S * (0.5 + (salt(self._entropy) % 1024) / 1024))
                continue
            self.trouble = ""
            return target

    async def _query(self, follow: Follow) -> FollowTarget:
        master = RemotingPeer(follow.address, self._security, connect_s=_RESOLVE_S)
        try:
            async with asyncio.timeout(_RESOLVE_S):
                answer = await _successful(master, RequestCode.EXCHANGE_BROKER_HA_INFO)
                is_stock = HELLO_FORMAT not in answer.ext
                if is_stock:
                    await self._check_stock(master)
        finally:
            master.close()
        host, port = parse_address(answer.ext.get("masterHaAddress", ""))
        return FollowTarget(host=host, port=port, master_epoch=follow.epoch, is_stock=is_stock)

    async def _check_stock(self, master: RemotingPeer) -> None:
        """Check the settings of Apache's master, which its stream does not contain.

        Raise NeveError if they don't match.
        """
        if not self._admits_stock:
            raise NeveError(None, "it is Apache's, and apacheMembers is not set here")
        answer = await _successful(master, RequestCode.GET_BROKER_CONFIG)
        settings = read_settings(bytes(answer.body).decode("utf-8", "replace"))
        fault = unlike_stock_member(self._own, settings, waits=self._waits)
        if fault is not None:
            raise NeveError(None, fault.text)


async def _successful(master: RemotingPeer, code: RequestCode) -> RemotingCommand:
    answer = await master.invoke(code, {}, timeout=_RESOLVE_S)
    if answer.code != ResponseCode.SUCCESS:
        raise NeveError(answer.code, answer.remark or "refused")
    return answer


class MasterFollower:
    """The stream from the followed master, and the record of which master the log and its tables are of."""

    def __init__(
        self,
        lookup: MasterLookup,
        store: MessageStore,
        epochs: StoredEpochs,
        file: MemberFile,
        *,
        archive: Callable[[], SetArchive],
        state: RoleState,
        role: MemberRole,
        new_client: Callable[[SlaveEvents], HaClient],
        keep: Spawn,
    ) -> None:
        """`keep` restarts a coroutine until it is cancelled."""
        self.lookup, self._store, self._epochs, self._file = lookup, store, epochs, file
        self._archive, self._state, self._role = archive, state, role
        self._new_client, self._keep = new_client, keep
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Restore the log's name in the archive. Called once, before any other method."""
        self._archive().was_same_log(self._file.log_name)

    def follow(self, follow: Follow, events: SlaveEvents) -> None:
        """Follow a master until `stop`."""
        assert self._task is None
        client = self._role.client = self._new_client(events)
        self._task = self._keep("follow-master", partial(self._follow, client, follow))

    async def _follow(self, client: HaClient, follow: Follow) -> None:
        await client.follow(await self.lookup.target(follow))

    async def stop(self) -> None:
        """Close the connection. Nothing is acknowledged to the master after that."""
        task, self._task, self._role.client = self._task, None, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        # of a truncation that this change of role has interrupted
        self._epochs.cache.drop_above(self._store.max_physical_offset)

    def confirmed(self, offset: int) -> None:
        """Publish the confirm offset of the master, up to the end of the stored log."""
        self._store.visibility.confirm(offset)
        self._state.confirmed()

    # -- the tables of the log

    async def attached(self, follow: Follow, master_epoch: int) -> None:
        """Record that the whole log is the master's."""
        session = None if self._role.client is None else self._role.client.session
        master = session.master if isinstance(session, SlaveSession) else None
        log_name = "" if master is None else master.log_uuid
        if log_name:
            self._archive().is_same_log(log_name)
        is_stock = isinstance(session, SlaveSession) and master is None
        file = self._file
        if not file.lacks_tables and isinstance(session, SlaveSession) and self._begins_without_tables(session):
            await file.in_thread(file.tables_are_whole, False)
        if file.lacks_tables and isinstance(session, SlaveSession) and not session.is_learner:
            raise ConnectionAbortedError("this log lacks its tables: until they arrive, this member is a learner")
        await file.in_thread(file.follows, master_epoch, log_name)
        self._state.following(follow.address, master_epoch, is_stock=is_stock)

    def _begins_without_tables(self, session: SlaveSession) -> bool:
        """Return whether the log lacks records of the tables.

        Either it begins late, or it is empty and the master is Apache's.
        """
        if session.master is None:
            return session.is_empty and not self._state.has_image
        return bool(session.begins_at)

    @property
    def has_missing_tables(self) -> bool:
        """Return whether all tables that the log lacked are installed now, which is not recorded yet."""
        return self._file.lacks_tables and self._state.has_image

    async def tables_installed(self) -> None:
        """Record that all tables are installed, and follow the master as more than a learner."""
        await self._file.in_thread(self._file.tables_are_whole, True)
        if self._role.client is not None:
            self._role.client.reconnect()

    def tables_lost(self) -> None:
        """Become a learner until a master's tables are installed: the files have changes that the log lost."""
        log.warning("tables contain truncated changes: waiting for the tables of the master")
        self._file.tables_are_whole(False)
