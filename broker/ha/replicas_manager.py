"""Driver of a broker's membership: passes events to its `Member` and does its actions. RocketMQ's ReplicasManager.

    events   a tick four times a second; answers and notifications of controllers; frames of slaves, by `HaService`, and
             of the master, by `HaClient`
    actions  requests to controllers run concurrently, and no action waits for their answers; heartbeats wait for
             nothing. One task does all other actions in order, each completely before the next. An action that fails
             is retried, and the change of role waits for it

A master opens its log for appends once all bytes that it had at its election are confirmed. Until then its
role-dependent state is not loaded, and readers see the confirmed part. The end of a leadership term takes effect at
once when it is known. All code except that one task and what it awaits runs on the event loop without suspension.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from broker.ha.confirm import Confirm, Held
from broker.ha.controller_calls import Identity, call_of, event_of, members_of
from broker.ha.controllers import Controllers, Unheard
from broker.ha.epoch_file import EpochFile, EpochFileDamaged
from broker.ha.epochs import EpochCache
from broker.ha.frames import HELLO_FORMAT, Hello
from broker.ha.ha_client import CutRefused, HaClient, Target
from broker.ha.ha_service import HaService, Leadership
from broker.ha.master_session import StreamRules
from broker.ha.member import Member, State
from broker.ha.member_events import (
    Action,
    Answer,
    ArchiveSettled,
    Ask,
    AskReplicaInfo,
    BeginEpoch,
    ClipGroups,
    ConfirmHeard,
    Cut,
    CutTornTail,
    CutWanted,
    Disowned,
    DropSlaves,
    EndTurn,
    Event,
    Follow,
    HandOver,
    Heartbeat,
    MasterSettled,
    MetadataSynced,
    RoleTaken,
    Save,
    Seen,
    StockControllers,
    StopFollowing,
    SyncMetadata,
    Tell,
    Tick,
    View,
    Withdraw,
)
from broker.ha.member_file import MemberFile, MemberFileDamaged
from broker.ha.member_record import begin_life
from broker.ha.member_rules import MemberRules
from broker.ha.reign import Reign
from broker.ha.slave_session import SlaveSession, SlaveState
from broker.ha.stock_master import read_settings, unlike_stock_member
from broker.role import FOLLOWING, BrokerRole, Role
from broker.store.message_store import MessageStore
from infra.clock import Clock
from infra.disk.filesystem import Disk
from infra.loop.in_steps import run_beside
from infra.loop.threads import SYSTEM_THREADS, Threads
from infra.net.remoting_peer import Sign
from infra.net.remoting_server import Connection, open_connection
from infra.process.startup import EXIT_FAILED, EXIT_IN_USE, StartupError
from neve.entropy import Entropy, salt, unique_name
from neve.errors import NeveError
from neve.remoting.address import parse_address
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand

log = logging.getLogger(__name__)

TICK_S = 0.25
# Epoch of a log that was written before there was a set; a controller's epochs begin with 1. Only the first master of
# the set assigns it: the log of another single broker has other bytes.
BEFORE_THE_SET = 0
_RESOLVE_S = 3.0
_RESOLVE_AGAIN_S = 0.5

_UNKNOWN_TO_CONTROLLERS = frozenset({State.NAMELESS, State.UNREGISTERED})
LEAD_TRIES = 3  # with growing pauses: a temporary lack of file descriptors is over then
_LEADING = frozenset({State.MASTER, State.HANDING_OVER})


_MEANINGS = {
    Held.TOO_FEW: "sends are refused with code 1",
    Held.AWAY: "sends are answered FLUSH_SLAVE_TIMEOUT, until it comes back or leaves the SyncStateSet",
    Held.SILENT: "sends are answered FLUSH_SLAVE_TIMEOUT, until it reports or leaves the SyncStateSet",
    Held.CUT_OFF: "sends are refused with code 1: another may be master",
}


class Trouble(NamedTuple):
    """A fault of a member: its name, its start (ms), its cause, and its effect on users."""

    name: str
    since_ms: int
    why: str
    means: str


# Timeout in seconds of a switchover: shorter than that of a client that requests one by 1002.
HAND_OVER_S = 8.0


class HandOverRefused(Exception):
    """No other member leads. The message has the reason."""


class HandOverNotDecided(HandOverRefused):
    """It is unknown which member leads."""


class Books(Protocol):
    """Role-dependent state of the broker besides its log. Runs on the event loop.

    Only `prepare`, `say_settled` and `retreat` suspend.
    """

    async def prepare(self) -> None:
        """Do the slow steps before `lead`. The whole log is confirmed. Raise as `lead`."""

    def lead(self, epoch: int) -> None:
        """Accept this broker's own records in the log from now on.

        Raise StoreError or ValueError: then the log is as before.
        """

    async def say_settled(self) -> bool:
        """Record in the log, after `lead`, that the archive is settled. Return False if the log is closed now."""

    def follow(self) -> None:
        """Reject own records from this moment on."""

    def before_cut(self) -> None:
        """Stop applying changes to the tables until a master is followed again, because the log will be truncated."""

    async def retreat(self) -> None:
        """Load the tables again, after `follow` or a truncation, because they contain more than the log.

        Called before a master is followed, while requests are refused. Raise as `lead`; the caller retries.
        """

    def confirmed(self) -> None:
        """Apply growth of the visible log."""

    def following(self, address: str, epoch: int, *, is_stock: bool) -> None:
        """Synchronize with a master, once the whole log is its.

        `is_stock`: it is Apache's, and has no tables in its log.
        """

    @property
    def has_image(self) -> bool:
        """Return whether all tables of the followed master have been installed."""

    def roles_changed(self) -> None:
        """Register the new role at the name servers."""


class SetArchive(Protocol):
    """The set's archive, during a change of role. Called on the event loop; only `settle` suspends."""

    @property
    def log_uuid(self) -> str:
        """Return the name by which the archive knows the log that all members have; empty: there is no archive."""

    @property
    def unsettled(self) -> str:
        """Return why `settle` fails; empty: it does not."""

    @property
    def eviction_frontier(self) -> int:
        """Return the offset below which the log is not needed: a new member's log may begin there."""

    def lead(self, master_epoch: int) -> None:
        """Begin the archive of a new master, which has appended nothing yet."""

    async def settle(self) -> bool:
        """Settle the archive of a master that may lack archived bytes, before it appends. Waits for the store.

        Return False if the term has ended.
        """

    def follow(self) -> None:
        """Stop archiving as the master."""

    def is_same_log(self, log_uuid: str) -> None:
        """Record that the own log is the master's, which the archive knows by this name."""

    def was_same_log(self, log_uuid: str) -> None:
        """Restore a name that `is_same_log` recorded in an earlier life."""


Keep = Callable[[str, Callable[[], Coroutine[Any, Any, object]]], "asyncio.Task[None]"]


class _TablesCame(msgspec.Struct, frozen=True):
    """All tables that a log without its first bytes lacks are installed now."""


class _SaySettled(msgspec.Struct, frozen=True):
    """The log is to record that the archive is settled."""


class _Lead(msgspec.Struct, frozen=True):
    """All bytes that this member had at its election are confirmed."""

    confirming: Confirm


class _Retreat(msgspec.Struct, frozen=True):
    """This member no longer leads, or its log was truncated below its confirmed end."""

    cut: asyncio.Future[None] | None = None  # the truncation that waits for it


# Steps that the task does in order: the member's actions, and those of this module.
Step = Action | _Lead | _SaySettled | _Retreat | _TablesCame


class ReplicasManager:
    """Driver of one broker's membership in a set."""

    def __init__(
        self,
        rules: MemberRules,
        own: Identity,
        *,
        hello: Hello,
        stream: StreamRules,
        store: MessageStore,
        disk: Disk,
        member_file: MemberFile,
        controllers: Controllers,
        ha_service: HaService,
        reign: Reign,
        role: BrokerRole,
        books: Books,
        archive: Callable[[], SetArchive],
        on_confirmed: Callable[[], None],
        stop_acknowledging: Callable[[], None],
        clock: Clock,
        entropy: Entropy,
        spawn: Keep,
        keep: Keep,
        sync_log: Callable[[], Awaitable[None]],
        sign: Sign,
        tls: ssl.SSLContext | None = None,
        threads: Threads = SYSTEM_THREADS,
    ) -> None:
        """Create the driver.

        `hello` is this broker's HELLO without id and life. `sync_log` is as in `StateFile`. `spawn` runs a coroutine
        once, `keep` restarts it until it is cancelled. `sign` and `tls` are for requests to other brokers. `archive` is
        set by the start, before its first use. `on_confirmed` is called when more may be acknowledged.
        `stop_acknowledging` answers all waiting appends that their outcome is unknown.
        """
        self._rules, self._own, self._hello, self._stream = rules, own, hello, stream
        self._store, self._file, self._controllers, self._ha_service = store, member_file, controllers, ha_service
        self._reign, self._role, self._books, self._archive = reign, role, books, archive
        self._on_confirmed, self._stop_acknowledging = on_confirmed, stop_acknowledging
        role.become(Role.FENCED)
        self._clock, self._entropy, self._spawn, self._keep = clock, entropy, spawn, keep
        self._sync_log, self._sign, self._tls, self._threads = sync_log, sign, tls, threads
        self._epoch_file = EpochFile(disk, member_file.directory)
        self._epochs = EpochCache()
        self._actions: deque[Step] = deque()
        self._work, self._changed = asyncio.Event(), asyncio.Event()
        self._is_stopped = False
        self._is_copy = False
        self._confirming: Confirm | None = None  # the member's, during a term
        self._leads = False  # the log accepts own records
        self._has_begun_to_lead = False  # it leads, or has tried to: the role-dependent state may be partly a master's
        self._failed_to_lead = 0  # number of consecutive failures
        self._is_settled = False  # the log continues above all offsets that the archive names
        self._has_said_so = False
        self._follower: asyncio.Task[None] | None = None
        self._client: HaClient | None = None
        self._cut_waits: asyncio.Future[None] | None = None
        self._is_retreating = False  # the tables are being loaded again
        self._is_cutting = False  # a diverged tail is being truncated, until the tables are loaded again
        self._resolving = ""  # why the address of the master's HA port is unknown
        self.end_at_start = 0
        self._state_since_ms = clock.now_ms()
        self.cuts = 0  # truncations of the own log that saved bytes in `diverged/`
        self.told = ""  # the last message for operators
        self.asked: Counter[str] = Counter()  # requests to controllers, by kind
        self.unanswered = 0
        self.registered = 0  # number of members, in sync or not, from neve's controllers; 0: unknown
        self.switches: Counter[str] = Counter()  # changes of role, by the new role
        self.member: Member

    # -- start

    def load(self) -> int:
        """Load the member's files, before the log is opened. Return the stored confirm offset. Raise StartupError."""
        try:
            self._is_copy = self._file.load()
            self._epochs = self._epoch_file.load()
        except (MemberFileDamaged, EpochFileDamaged) as error:
            raise StartupError(f"who this member of a broker set is can't be read: {error}", EXIT_FAILED) from error
        return self._file.saved.confirm

    def begin(self) -> None:
        """Begin this life, after recovery of the log."""
        before, rules = self._file.saved, self._rules
        saved = begin_life(before, unique_name(self._entropy), rules, is_copy=self._is_copy)
        self._file.save(saved)
        self.end_at_start = self._store.max_physical_offset
        if self._epochs.drop_above(self._store.max_physical_offset):
            self._epoch_file.save(self._epochs.entries())
        self.member = Member(rules, process=unique_name(self._entropy), address=self._own.address)
        self.member.begin(saved, f"{self._own.address};{self._clock.now_ms()}")
        self._reign.member = self.member
        if self._is_copy and before.broker_id:
            log.warning("this directory is a copy of member %d's: it is a new member", before.broker_id)

    async def start(self) -> None:
        """Listen for slaves. From here on `run` and `tick` have to run. Raise StartupError if the port is in use."""
        try:
            await self._ha_service.start()
        except OSError as error:
            raise StartupError(f"haListenPort: {error.strerror or error}", EXIT_IN_USE) from error
        self._archive().was_same_log(self._file.log_name)

    async def shutdown(self) -> None:
        """Close the connections to slaves, master and controllers for good. The log no longer changes."""
        self._is_stopped = True
        self._changed.set()
        self._controllers.close()
        self._stop_acknowledging()
        await self._stop_following()
        await self._ha_service.shutdown()

    def end(self) -> None:
        """Record a clean end, once the whole log is on the disk. Thread-safe."""
        self._file.save(self.member.end_life())

    # -- queries

    @property
    def leads(self) -> bool:
        """Return whether the log accepts this broker's records."""
        return self._leads

    @property
    def leads_in(self) -> int | None:
        """Return the epoch in which this broker is the master; None: it is not."""
        confirming = self._confirming
        return confirming.master_epoch if self._leads and confirming is not None else None

    @property
    def in_sync_slaves(self) -> int:
        """Return the number of connected in-sync slaves, of a master."""
        confirming = self._confirming
        return 0 if confirming is None else sum(confirming.in_sync(member) for member in self._ha_service.slaves)

    @property
    def epochs(self) -> EpochCache:
        """Return the epochs of the log."""
        return self._epochs

    @property
    def client(self) -> HaClient | None:
        """Return the connection to the master, of a slave."""
        return self._client

    @property
    def controllers(self) -> Controllers:
        """Return the client of the controllers."""
        return self._controllers

    @property
    def ha_service(self) -> HaService:
        """Return the server for slaves."""
        return self._ha_service

    @property
    def registered_as(self) -> int | None:
        """Return the id to register at the name servers: 0 for the master; None: don't register.

        A slave of Apache's gets the address of its master's HA port from the name servers only, and its master may need
        it before it can lead.
        """
        if self._role.is_master or (self._stream.admits_stock and self._confirming is not None):
            return 0
        return None if self._role.current is Role.FENCED else self.member.broker_id

    def troubles(self) -> list[Trouble]:
        """Return the faults that keep this member from its work. A start of 0 ms means that it is unknown."""
        member, found = self.member, list[Trouble]()
        state, since = member.state, self._state_since_ms
        if state is State.REFUSED:
            why = self.told or "it must not go on by itself"
            found.append(Trouble("broker set: an operator is needed", since, why, "this member serves nobody"))
        elif member.is_to_join and state not in _UNKNOWN_TO_CONTROLLERS:
            means = "this member waits: it has nothing of the set; `neve broker-set elect` where nobody has"
            why = "no controller knows a master of the set that is to exist (brokerSetExists): is its register lost?"
            found.append(Trouble("broker set: not found", since, why, means))
        elif self._is_cutting:
            why = "its diverged tail is being cut off: another member was elected without it"
            found.append(Trouble("broker set: log is cut", since, why, "this member serves nobody until that is done"))
        elif self._role.current is Role.FENCED:
            unheard = "; ".join(f"{address}: {why}" for address, why in sorted(self._controllers.troubles.items()))
            means = "this member serves nobody until a controller has told it its role"
            found.append(Trouble("broker set: no role", since, unheard or f"it is {state.value}", means))
        elif state is State.SLAVE and not self._is_attached:
            fault = self._client.trouble if self._client is not None else None
            why = fault.text if fault is not None else self._resolving or "the master can't be reached"
            found.append(Trouble("broker set: follows nobody", 0, why, "what the set takes is not copied here"))
        elif (confirming := self._confirming) is not None:
            held, who = confirming.held(self._clock.monotonic())
            if held in _MEANINGS:
                why = f"{held.value} (member {who})" if who else held.value
                found.append(Trouble("broker set: not confirmed", 0, why, _MEANINGS[held]))
        if self._confirming is not None and (unsettled := self._archive().unsettled):
            means = "this member was elected, and takes nothing until then"
            found.append(Trouble("broker set: archive not settled", 0, unsettled, means))
        return found

    def status(self) -> dict[str, Any]:
        """Return the state for display."""
        member, end = self.member, self._store.max_physical_offset
        view, confirming = member.record.view, self._confirming
        slaves = (
            {} if confirming is None else {each: confirming.end_of(each) for each in sorted(self._ha_service.slaves)}
        )
        return {
            "member": member.broker_id,
            "state": member.state.value,
            "role": self._role.current.name.lower().replace("_", " "),
            "master": view.master,
            "masterAddress": view.master_address,
            "masterEpoch": view.master_epoch,
            "syncStateSet": sorted(view.sync_state_set),
            "syncStateSetEpoch": view.sync_state_set_epoch,
            "end": end,
            "confirmed": member.confirm,
            "slaves": slaves,
            "epochs": self._epochs.entries(),
            "controllers": self._controllers.connected,
            "troubles": [trouble._asdict() for trouble in self.troubles()],
        }

    @property
    def unconfirmed(self) -> int:
        """Return the number of unconfirmed bytes of the own log."""
        return self._store.max_physical_offset - min(self.member.confirm, self._store.max_physical_offset)

    # -- events

    def tick(self) -> None:
        """Pass a tick to the member. Called four times a second."""
        self.happens(Tick(self._store.max_physical_offset))
        if self._leads and not self._has_said_so and _SaySettled() not in self._actions:
            self._actions.append(_SaySettled())
            self._work.set()
        if self._file.lacks_tables and self._books.has_image and _TablesCame() not in self._actions:
            self._actions.append(_TablesCame())
            self._work.set()

    def notified(self, view: View) -> None:
        """Take a notification (1008) of a controller about roles."""
        self.happens(Seen(view))

    def can_not_follow(self, why: str) -> None:
        """Stop this member, because a change in the log can't be applied here. It must not become master."""
        self.happens(Disowned(why))

    async def hand_over(self, target: int | None = None) -> int:
        """Switch over to an in-sync member, and return its id. The default is the one with most of the log.

        No record is appended until the outcome is known. Raise HandOverRefused: this member continues to lead if it
        did. After HandOverNotDecided the master is unknown.
        """
        try:
            async with asyncio.timeout(HAND_OVER_S):
                return await self._hand_over(target)
        except TimeoutError as error:
            why = "no controller says who is master now; until one does nothing is taken here"
            raise HandOverNotDecided(why) from error

    async def _hand_over(self, target: int | None) -> int:
        confirming = self._confirming
        if confirming is None or not self._leads:
            raise HandOverRefused("this member is not the master")
        if (under_way := self.member.hands_over_to) is not None:
            if target not in (None, under_way):
                raise HandOverRefused("it hands over already")
            return await self._handed_over(confirming, under_way)
        in_sync = [member for member in self._ha_service.slaves if confirming.in_sync(member)]
        if target is None:
            target = max(in_sync, key=lambda member: (confirming.end_of(member), -member), default=0)
        if target not in in_sync:
            raise HandOverRefused(f"{target} does not follow in sync" if target else "no member follows in sync")
        self.tick()  # records the present end of the log: from this callback on nothing is appended
        self.happens(HandOver(target))
        return await self._handed_over(confirming, target)

    async def _handed_over(self, confirming: Confirm, target: int) -> int:
        while self._confirming is confirming and self.member.hands_over_to is not None and not self._is_stopped:
            self._changed.clear()
            await self._changed.wait()
        if self._confirming is confirming:
            raise HandOverRefused(f"{target} did not get all of it in time, or no controller has answered")
        if self.member.record.view.master != target:
            raise HandOverRefused(f"another one was elected before {target} was")
        log.info("handed over to member %d", target)
        return target

    def happens(self, event: Event) -> None:
        """Pass an event to the member, and queue its actions. Only the end of a term takes effect at once."""
        if self._is_stopped:
            return
        member, reigning = self.member, self._confirming
        before, state = member.confirm, member.state
        actions = member.happens(event, self._clock.monotonic())
        if member.state is not state:
            self._changed.set()
            self._state_since_ms = self._clock.now_ms()
            log.info("member %d is %s, by epoch %d.%d", member.broker_id, member.state.value, *member.role.pair)
        if reigning is not None and member.confirming is not reigning:
            self._end_reign()
        elif reigning is not None:
            self._ha_service.confirm_changed(before)
            self._lead_when_confirmed()
        self._settle_role()
        for action in actions:
            self._take(action)

    def _take(self, action: Action) -> None:
        """Queue an action. Heartbeats and queries, which show that this member is alive, are sent without waiting."""
        if isinstance(action, Heartbeat | AskReplicaInfo):
            self._ask_soon(action)
            return
        if isinstance(action, Save) and len(self._actions) > 1 and isinstance(self._actions[-1], Save):
            self._actions.pop()  # the new one contains the state of the queued one
        self._actions.append(action)
        self._work.set()

    @property
    def _is_attached(self) -> bool:
        """Return whether a slave's whole log is the master's, and the connection is streaming."""
        session = self._client.session if self._client is not None else None
        return session is not None and session.state is SlaveState.FOLLOWING

    def _settle_role(self) -> None:
        """Set the broker's role for its clients."""
        member, state = self.member, self.member.state
        self._reign.leads = self._leads and state is State.MASTER
        if self._leads:
            role = Role.MASTER
        elif not member.is_readable or self._is_cutting or self._is_retreating:
            role = Role.FENCED
        elif member.record.is_in_sync and (self._is_attached or state in _LEADING):
            role = Role.SLAVE_IN_SYNC
        else:
            role = Role.SLAVE
        if role not in FOLLOWING[self._role.current]:
            self._role.become(Role.FENCED)
        self._role.become(role, has_master=self._is_attached and role is not Role.FENCED)

    def _end_reign(self) -> None:
        self._confirming = None
        self._stop_acknowledging()
        self._ha_service.stop_leading()
        self._archive().follow()
        if not self._has_begun_to_lead:
            return
        self._leads, self._has_begun_to_lead, self._failed_to_lead = False, False, 0
        self._actions.append(_Retreat())
        self._work.set()
        try:
            self._books.follow()
        except OSError as error:  # nothing is appended anyway, and a start recovers the log as it is
            log.critical("this log can't be marked as one that follows: %s", error)
            self._store.fail(error)

    def _lead_when_confirmed(self) -> None:
        reigning = self._confirming
        if reigning is None or self._leads or reigning.value < reigning.epoch_start or not self._is_settled:
            return
        if not any(isinstance(action, _Lead) for action in self._actions):
            self._actions.append(_Lead(reigning))
            self._work.set()

    # -- callbacks about slaves (HaEvents)

    def confirmed(self, offset: int) -> None:
        """Publish the confirm offset."""
        self._store.confirm(offset)
        self._books.confirmed()  # before waiting requests are answered
        self._on_confirmed()
        self._lead_when_confirmed()

    def slave_came(self, member_id: int, hello: Hello | None) -> None:
        log.info("member %d follows", member_id)

    def slave_reported(self, member_id: int) -> None:
        """Check at once whether a slave outside the SyncStateSet may join."""
        self.tick()

    # -- actions

    async def run(self) -> None:
        """Do all queued actions. Never returns, but raises if an action fails; the next run retries that action."""
        while True:
            while self._actions and not self._is_stopped:
                await self._carry_out(self._actions[0])
                self._actions.popleft()
            self._work.clear()
            await self._work.wait()

    async def _carry_out(self, action: Step) -> None:
        match action:
            case Save(saved=saved):
                await self._threads.run(self._file.save, saved)
            case StopFollowing():
                await self._stop_following()
            case _TablesCame():
                await self._threads.run(self._file.tables_are_whole, True)
                if self._client is not None:
                    self._client.reconnect()
            case CutTornTail():
                await self._sync_log()  # the log has whole records only: a partly received one was never appended
            case BeginEpoch(epoch=epoch):
                await self._begin_epoch(epoch)
            case _Lead(confirming=confirming):
                await self._lead(confirming)
            case _SaySettled():
                await self._say_settled()
            case _Retreat(cut=waiter):
                await self._retreat(waiter)
            case Cut(to=to):
                await self._cut(to)
            case _:
                self._at_once(action)

    def _at_once(self, action: Step) -> None:
        match action:
            case Answer():
                self._stop_acknowledging()
            case DropSlaves():
                self._ha_service.stop_leading()
            case ClipGroups():
                pass  # done by `lead`: before the whole log is confirmed, offsets must not be clipped
            case Follow():
                self._follow(action)
            case EndTurn(epoch=epoch):
                self._end_turn(epoch)
            case SyncMetadata():
                self.happens(MetadataSynced())  # each change of a table is in the log before it is in the table
            case Tell(reason=reason):
                self.told = reason
                log.error("this member of the broker set needs an operator: %s", reason)
            case Withdraw():
                log.info("waits until the controller has noticed the end of this member's former life")
                self._controllers.hang_up()
            case _:
                self._ask_soon(action)

    async def _retreat(self, waiter: asyncio.Future[None] | None) -> None:
        """Load the tables again. Other callbacks run before they are complete: the role FENCED keeps clients out."""
        self._is_retreating = True
        self._settle_role()
        await self._books.retreat()
        self._is_retreating = self._is_cutting = False
        self._settle_role()
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _ask_soon(self, action: Step) -> None:
        assert isinstance(action, Ask)
        self._spawn("ask-controller", partial(self._ask, action))

    async def _begin_epoch(self, epoch: int) -> None:
        """Save a new epoch before its first byte."""
        store = self._store
        first, end = store.min_physical_offset, store.max_physical_offset
        entries = self._epochs.entries()
        if not entries and first < end:
            entries = ((BEFORE_THE_SET, first),)  # a single broker that is the first member of a set now
        wanted = EpochCache(entries)
        wanted.assign(epoch, end)
        await self._threads.run(self._epoch_file.save, wanted.entries())
        for entry in wanted.entries():
            if entry[0] > self._epochs.last_epoch:
                self._epochs.assign(*entry)

    def _end_turn(self, epoch: int) -> None:
        self.happens(RoleTaken(epoch, self._store.max_physical_offset))
        member, confirming = self.member, self.member.confirming
        if member.state is State.SLAVE:
            self.switches["slave"] += 1
            self._books.roles_changed()
        if confirming is None or member.state not in _LEADING or self._confirming is not None:
            return
        self.switches["master"] += 1
        self._confirming = confirming
        self._archive().lead(confirming.master_epoch)
        self._is_settled, self._has_said_so = not member.record.may_lack_archived, False
        own = replace(self._hello, **_who(member), master_epoch=confirming.master_epoch)
        self._ha_service.lead(
            Leadership(
                own,
                self._epochs,
                confirming,
                self,
                rules=self._stream,
                is_member=lambda member_id: member_id > 0,
                now=self._with_archive,
            )
        )
        if self._stream.admits_stock:
            self._books.roles_changed()
        if not self._is_settled:
            self._spawn("settle-archive", partial(self._settle, confirming))
        self.confirmed(confirming.value)

    def _with_archive(self, hello: Hello) -> Hello:
        archive = self._archive()
        return replace(hello, log_uuid=archive.log_uuid, eviction_frontier=archive.eviction_frontier)

    async def _settle(self, confirming: Confirm) -> None:
        """Settle the archive, which may name offsets that this log lacks."""
        if await self._archive().settle() and self._confirming is confirming:
            self._is_settled = True
            self._lead_when_confirmed()

    async def _lead(self, confirming: Confirm) -> None:
        """Lead the set. Heartbeats continue meanwhile; if the term ends, `_Retreat` is the next action."""
        if self._confirming is not confirming or self._leads:
            return
        self._has_begun_to_lead = True
        try:
            await self._books.prepare()
            if self._confirming is not confirming:
                return
            self._books.lead(confirming.master_epoch)
        except Exception as error:
            self._failed_to_lead += 1
            if self._failed_to_lead == LEAD_TRIES:
                log.critical("this member is elected and can't lead; it ends, so that another one is: %r", error)
                self._store.fail(error if isinstance(error, OSError) else OSError(errno.EIO, str(error)))
            raise
        self._leads, self._failed_to_lead = True, 0
        self._settle_role()
        log.info("leads the broker set in epoch %d, from %d on", confirming.master_epoch, confirming.epoch_start)
        self._books.roles_changed()
        await self._say_settled()

    async def _say_settled(self) -> None:
        """Record in the log that the archive is settled. If the log does not accept it now, a tick tries again."""
        confirming = self._confirming
        if confirming is None or not self._leads or self._has_said_so or not await self._books.say_settled():
            return
        if self._confirming is not confirming:
            return
        self._has_said_so = True
        if self.member.record.may_lack_archived:
            self._spawn("settled", partial(self._settled, ArchiveSettled(confirming.master_epoch)))

    async def _settled(self, event: ArchiveSettled | MasterSettled) -> None:
        """Pass an event to the member once its record in the log is on the disk.

        If it is lost, the next life settles again.
        """
        await self._sync_log()
        self.happens(event)

    # -- requests to controllers

    async def _ask(self, ask: Ask) -> None:
        member = self.member
        call = call_of(ask, self._own, member.broker_id, log_epoch=self._epochs.last_epoch)
        self.asked[type(ask).__name__] += 1
        try:
            if isinstance(ask, Heartbeat):
                for answer in await self._controllers.tell(call):
                    if answer.code != ResponseCode.SUCCESS:
                        log.warning("a controller does not take the heartbeat: %s", answer.remark)
                return
            answer = await self._controllers.ask(call)
            if self._controllers.are_stock:
                self.happens(StockControllers())
            is_known, is_stock = member.state not in _UNKNOWN_TO_CONTROLLERS, self._controllers.are_stock
            event = event_of(ask, answer, self._own, member.broker_id, is_known=is_known, is_stock=is_stock)
        except Unheard as error:
            self.unanswered += 1
            log.debug("no controller answers: %s", error.remark)
            return
        except (NeveError, ValueError) as error:
            log.warning("a controller's answer to %s can't be read: %s", type(ask).__name__, error)
            return
        if answer.code != ResponseCode.SUCCESS:
            log.info("a controller answers %s with %d: %s", type(ask).__name__, answer.code, answer.remark)
        if isinstance(ask, AskReplicaInfo) and answer.code == ResponseCode.SUCCESS:
            self.registered = members_of(answer.ext)
        if event is not None:
            self.happens(event)

    # -- slave

    def _follow(self, follow: Follow) -> None:
        assert self._follower is None
        member = self.member
        own = replace(self._hello, **_who(member), master_epoch=follow.epoch)
        self._client = HaClient(
            self._store,
            self._epochs,
            self._epoch_file,
            _Following(self, follow),
            own=own,
            clock=self._clock,
            entropy=self._entropy,
            confirm=lambda: member.confirm,
            followed_epoch=lambda: self._file.followed_epoch,
            sync=None if self._rules.acknowledges_from_memory else self._sync_log,
            secret=self._stream.secret,
            begins_at_frontier=True,
            is_learner=lambda: self._file.lacks_tables,
            tls=self._tls,
            threads=self._threads,
        )
        self._follower = self._keep("follow-master", partial(self._follow_master, self._client, follow))

    async def _follow_master(self, client: HaClient, follow: Follow) -> None:
        while True:
            try:
                target = await self._target_of(follow)
            except (OSError, TimeoutError, NeveError, ValueError) as error:
                why = str(error) or type(error).__name__
                if why not in self._resolving:
                    log.warning("the master at %s is not followed: %s", follow.address, why)
                self._resolving = f"the master at {follow.address} is not followed: {why}"
                await asyncio.sleep(_RESOLVE_AGAIN_S * (0.5 + (salt(self._entropy) % 1024) / 1024))
                continue
            self._resolving = ""
            await client.follow(target)

    async def _target_of(self, follow: Follow) -> Target:
        """Query the address of the master's HA port by 906, at its port for clients: the HA port may be any."""
        host, port = parse_address(follow.address)
        async with asyncio.timeout(_RESOLVE_S):
            connection = await open_connection(host, port, tls=self._tls)
            try:
                answer = await self._of_master(connection, RequestCode.EXCHANGE_BROKER_HA_INFO)
                is_stock = HELLO_FORMAT not in answer.ext
                if is_stock:
                    await self._check_stock(connection)
            finally:
                connection.close()
        ha_host, ha_port = parse_address(answer.ext.get("masterHaAddress", ""))
        return Target(host=ha_host, port=ha_port, master_epoch=follow.epoch, is_stock=is_stock)

    async def _of_master(self, connection: Connection, code: RequestCode) -> RemotingCommand:
        answer = await connection.invoke(RemotingCommand(code, ext=self._sign({}, b"")), _RESOLVE_S)
        if answer.code != ResponseCode.SUCCESS:
            raise NeveError(answer.code, answer.remark or "refused")
        return answer

    async def _check_stock(self, connection: Connection) -> None:
        """Check the settings of Apache's master, which its stream does not contain.

        Raise NeveError if they don't match.
        """
        if not self._stream.admits_stock:
            raise NeveError(None, "it is Apache's, and apacheMembers is not set here")
        answer = await self._of_master(connection, RequestCode.GET_BROKER_CONFIG)
        settings = read_settings(bytes(answer.body).decode("utf-8", "replace"))
        fault = unlike_stock_member(self._hello, settings, waits=self._rules.confirm.waits)
        if fault is not None:
            raise NeveError(None, fault.text)

    async def _stop_following(self) -> None:
        follower, self._follower, self._client = self._follower, None, None
        if follower is not None:
            follower.cancel()
            await asyncio.wait([follower])
        # of a truncation that this change of role has interrupted
        self._epochs.drop_above(self._store.max_physical_offset)

    async def wants_cut(self, to: int) -> None:
        """Ask the member for a truncation, and wait for it. Raise CutRefused or StoreError."""
        store, member = self._store, self.member
        waiter = self._cut_waits = asyncio.get_running_loop().create_future()
        start, floor = store.record_start(to), store.record_start(member.confirm)
        self.happens(CutWanted(start, floor))
        if member.state is State.REFUSED:
            raise CutRefused(f"the log parts from its master's at {start}, and what lies below {floor} was confirmed")
        await waiter

    async def _cut(self, to: int) -> None:
        """Truncate the log, unless the master is no longer followed. The member has checked the confirm offset."""
        waiter, self._cut_waits = self._cut_waits, None
        if waiter is None or waiter.done():
            return
        self._is_cutting = True
        self._settle_role()  # other callbacks run before the log is consistent again: the role FENCED keeps readers out
        self._books.before_cut()
        try:
            parts = self._store.truncation(to, epoch=self._epochs.last_epoch, floor=to)
            kept = await run_beside(parts, self._threads.run)
        except Exception as error:
            self._end_cut()
            if waiter.done():
                raise
            waiter.set_exception(error)  # an unexpected error ends `follow-master`, which is restarted
            return
        if kept is not None:
            self.cuts += 1
            log.warning("what this broker had alone is in %s", kept)
            # the next action, even if no caller waits any longer: the truncation has happened
            self._actions.insert(1, _Retreat(waiter))
            return
        self._end_cut()
        if not waiter.done():
            waiter.set_result(None)

    def _end_cut(self) -> None:
        self._is_cutting = False
        self._settle_role()

    async def attached(self, follow: Follow, master_epoch: int) -> None:
        """Record that the whole log is the master's."""
        session = None if self._client is None else self._client.session
        master = session.master if isinstance(session, SlaveSession) else None
        log_name = "" if master is None else master.log_uuid
        if log_name:
            self._archive().is_same_log(log_name)
        is_stock = isinstance(session, SlaveSession) and master is None
        if not self._file.lacks_tables and isinstance(session, SlaveSession) and self._begins_without_tables(session):
            await self._threads.run(self._file.tables_are_whole, False)
        if self._file.lacks_tables and isinstance(session, SlaveSession) and not session.is_learner:
            raise ConnectionAbortedError("this log is without its tables: until they are here it only learns")
        await self._threads.run(self._file.follows, master_epoch, log_name)
        self._books.following(follow.address, master_epoch, is_stock=is_stock)

    def _begins_without_tables(self, session: SlaveSession) -> bool:
        """Return whether the log lacks records of the tables.

        Either it begins late, or it is empty and the master is Apache's.
        """
        if session.master is None:
            return session.is_empty and not self._books.has_image
        return bool(session.begins_at)

    def tables_lost(self) -> None:
        """Become a learner until a master's tables are installed: the files have changes that the log lost."""
        log.warning("tables hold changes that were cut off the log: its master's are waited for")
        self._file.tables_are_whole(False)

    def master_settled(self, epoch: int) -> None:
        """Take the record in the log that its master has settled its archive.

        All changes that it depends on are applied.
        """
        if self.member.saved.settled_in != epoch:
            self._spawn("settled", partial(self._settled, MasterSettled(epoch)))

    def heard_confirm(self, offset: int) -> None:
        """Take the confirm offset from a frame of the master, up to the end of the stored log."""
        if self._role.has_master and not self._is_stopped:
            self.member.happens(ConfirmHeard(offset), self._clock.monotonic())  # only confirm changes by it
        else:
            # the first on a connection also changes the role: clients may be redirected to the master
            self.happens(ConfirmHeard(offset))
        self._store.confirm(offset)
        self._books.confirmed()


class _Following:
    """Callbacks of a replication connection to one master (SlaveEvents)."""

    def __init__(self, manager: ReplicasManager, follow: Follow) -> None:
        self._manager, self._follow = manager, follow

    async def cut(self, to: int) -> None:
        await self._manager.wants_cut(to)

    async def following(self, master_epoch: int) -> None:
        await self._manager.attached(self._follow, master_epoch)

    def confirmed(self, offset: int) -> None:
        self._manager.heard_confirm(offset)


def _who(member: Member) -> dict[str, Any]:
    life = member.record.life
    return {
        "member_id": life.broker_id,
        "incarnation": life.incarnation,
        "starts": life.starts,
        "process": life.process,
    }
