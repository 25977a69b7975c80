"""One life of a broker: the real member, confirm and epochs, with a minimum of simulated I/O.

It executes the member's actions one after another, sends and receives the frames of the stream (a HELLO and H2, T1, T2
with pieces of records), appends the messages of producers, and answers readers. It reports its promises to `Promises`.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from broker.ha.confirm import Confirm, Waiting
from broker.ha.epochs import EpochConflict
from broker.ha.member import Member, State
from broker.ha.member_events import (
    Action,
    Alter,
    AlterRefused,
    ApplyBrokerId,
    AskNextBrokerId,
    AskReplicaInfo,
    BeginEpoch,
    BrokerIdApplied,
    BrokerIdLost,
    BrokerIdTaken,
    ClipGroups,
    ConfirmReceived,
    DropSlaves,
    Elect,
    EndRoleChange,
    Event,
    Follow,
    Heartbeat,
    Life,
    MasterSettled,
    MetadataSynced,
    NextBrokerId,
    NotifyOperator,
    NotRegistered,
    Register,
    Registered,
    RoleTaken,
    Save,
    SetSeen,
    SettledArchive,
    StopAcknowledging,
    StopFollowing,
    SyncMetadata,
    Tick,
    Truncate,
    TruncateTornTail,
    TruncationRequested,
    View,
)
from controller import decision
from controller.decision import Report
from neve.remoting.codes import ResponseCode
from tests.simulation.replicas.bucket import HOST as BUCKET
from tests.simulation.replicas.bucket import (
    Commit,
    Entry,
    Epoch,
    archived_end,
    archived_queue_ends,
    highest_epoch,
)
from tests.simulation.replicas.controllers import CLUSTER, NAME, Controller
from tests.simulation.replicas.log import BOOK_SIZE, NO_QUEUE, QUEUES, Disk, Piece, Record
from tests.simulation.replicas.machines import Connection, SimulatedProcess

if TYPE_CHECKING:
    from tests.simulation.replicas.world import ReplicasWorld

TICK = 0.25
RECONNECT = 0.3
IDLE = 4.0  # A connection that is silent for this long is closed.
TELL_EVERY = 0.5  # T1 and T2 without news.
FLUSH_EVERY = 0.5
POLL_GROUPS = 1.5
SLAVE_TIMEOUT = 3.0
ARCHIVE_EVERY = 1.0
SETTLE_AGAIN = 0.5
CHECKPOINT = 10.0  # A master writes one within this time.

Reply = Callable[[str], None]


class _Follower:
    """The master's side of one connection."""

    def __init__(self, life: Life, now: float) -> None:
        self.life, self.heard = life, now
        self.next: int | None = None  # The requested position; its first T1.
        self.is_throttled = False


class SimulatedBroker(SimulatedProcess):
    def __init__(self, world: ReplicasWorld, host: str, disk: Disk, *, is_copy: bool = False) -> None:
        super().__init__(world.turns, host, world.dice.uniform(-3600, 3600))
        self.world, self.disk, self.log = world, disk, disk.log
        self.dice: random.Random = world.dice
        self.process = f"{host}.{world.next_number()}"
        self.from_memory = world.member_rules.acknowledges_from_memory
        self.log.cut_torn_tail()
        disk.epochs.drop_above(self.log.end)
        self._noted: list[tuple[int, tuple[int, ...]]] = []  # Raises by this master that are not saved yet.
        self._read_queues(is_clean=disk.saved.clean)
        disk.saved = world.begin_life(disk.saved, f"i{world.next_number()}", world.member_rules, is_copy)
        self.member: Member = world.member_of(world.member_rules, process=self.process, address=host)
        self.member.begin(disk.saved, f"{host};{self.process}")
        self._actions: deque[Action] = deque()
        self._is_busy = False
        self._waiting: Waiting[tuple[Record, Reply]] = Waiting(SLAVE_TIMEOUT)
        self._followers: dict[Connection, _Follower] = {}
        self._following: Follow | None = None
        self._upstream: Connection | None = None
        self._heard_upstream = 0.0
        self._is_attached = False  # The handshake is complete: T2s count.
        self._then: Callable[[], None] | None = None  # After a truncation.
        self._cuts = 0
        self._is_flushing = False
        self._flush_wanted = False
        self._next_offset = [0] * QUEUES
        # The leadership term of which the log has, or resumes above, everything archived.
        self._settled: Confirm | None = None
        self._unsaid: deque[tuple[int, ...]] = deque()  # For a slave: the raises of this term, or the end of them.
        self._heard = 0  # As a slave: settlement records of the log below this position are applied.
        # The position of the settlement record of its master, or of its own, until that is synced.
        self._saying: tuple[int, SettledArchive | MasterSettled] | None = None
        self._polled_groups: tuple[dict[int, int], int] | None = None
        self.told = ""
        self.after(self.dice.uniform(0, TICK), self._tick)
        self.after(FLUSH_EVERY, self._flush_sometimes)
        self.after(TELL_EVERY, self._tell)
        self.after(POLL_GROUPS, self._poll_groups)
        self.after(ARCHIVE_EVERY, self._archive)

    @property
    def is_attached(self) -> bool:
        """Return whether this slave is connected to its master and receives its appends."""
        return self.member.state is State.SLAVE and self._is_attached

    # ---- time

    def _tick(self) -> None:
        self.happens(Tick(self.log.whole_end))
        self._say_settled()
        self._hear_settled()
        for record, reply in list(self._waiting.overdue(self.now())):
            self._not_safe(record, reply)
        self._answer_reached()
        self.after(TICK, self._tick)

    def _flush_sometimes(self) -> None:
        self.flush()
        self.after(FLUSH_EVERY, self._flush_sometimes)

    def _tell(self) -> None:
        """Send T1 and T2 without news, and close silent connections."""
        now = self.now()
        if self._upstream is not None:
            if now - self._heard_upstream > IDLE:
                self.lose_upstream()
            elif self._is_attached:
                self._report()
        for connection, follower in list(self._followers.items()):
            if now - follower.heard > IDLE:
                self._drop(connection)
            elif follower.next is not None:
                self._send_frame(connection, follower.next, ())
        self.after(TELL_EVERY, self._tell)

    def flush(self) -> None:
        """Flush, one at a time; later appends belong to the next flush."""
        if self._is_flushing:
            self._flush_wanted = True
            return
        if self.log.synced >= self.log.end:
            return
        self._is_flushing, self._flush_wanted = True, False
        end, cuts = self.log.end, self._cuts

        def synced() -> None:
            self._is_flushing = False
            if cuts == self._cuts:
                self.log.synced = max(self.log.synced, end)
                self._has_synced()
            if self._flush_wanted or cuts != self._cuts:
                self.flush()

        self.after(self.world.flush_time(self.host), synced)

    def _has_synced(self) -> None:
        if self.from_memory:
            return
        if self.member.confirming is not None:
            self.member.confirming.appended(self.log.synced)
            self._answer_reached()
        elif self._upstream is not None and self._is_attached:
            self._report()

    # ---- the member

    def happens(self, event: Event) -> None:
        before = self.member.state
        actions = self.member.happens(event, self.now())
        if self.member.state is not before:
            self.world.note(f"{self.host} is {self.member.state.value} {self.member.role.pair}")
        self._actions.extend(actions)
        self._work()

    def _work(self) -> None:
        while self._actions and not self._is_busy and self.is_alive:
            action = self._actions.popleft()
            seconds = self._carry_out(action)
            if seconds:
                self._is_busy = True

                def done(action: Action = action) -> None:
                    self._is_busy = False
                    self._finish(action)
                    self._work()

                self.after(seconds, done)

    def _carry_out(self, action: Action) -> float:
        """Execute an action; return 0 or its duration, after which its changes take effect."""
        match action:
            case Save() | TruncateTornTail() | BeginEpoch() | Truncate() | SyncMetadata():
                return self.dice.uniform(0.001, 0.02)
            case StopAcknowledging():
                for record, reply in list(self._waiting.all()):
                    self._not_safe(record, reply)
            case DropSlaves():
                self.disk.is_following = True
                for connection in list(self._followers):
                    self._drop(connection)
            case StopFollowing():
                self._following = None
                self.lose_upstream()
            case ClipGroups():
                for queue, offset in self.disk.groups.items():
                    self.disk.groups[queue] = min(offset, len(self.log.queues[queue]))
            case Follow():
                self._following = action
                self._connect()
            case EndRoleChange():
                self._end_role_change(action.epoch)
            case NotifyOperator():
                self.told = action.reason
                self.world.note(f"{self.host} says: {action.reason}")
            case _:
                self._ask(action)
        return 0.0

    def _finish(self, action: Action) -> None:
        match action:
            case Save():
                self.disk.saved = action.saved
            case TruncateTornTail():
                self.log.cut_torn_tail()
                self._cuts += 1
                self.log.synced = self.log.end
                self.disk.epochs.drop_above(self.log.end)
            case BeginEpoch():
                self.disk.epochs.assign(action.epoch, self.log.end)
            case Truncate():
                self._cut(action.to)
                then, self._then = self._then, None
                if then is not None:
                    then()
            case SyncMetadata():
                self.happens(MetadataSynced())

    def _end_role_change(self, epoch: int) -> None:
        self.happens(RoleTaken(epoch, self.log.whole_end))
        if self.member.confirming is not None:
            self._raise(self.log.whole_end)
            self._next_offset = [self.world.next_queue_offset(self, queue) for queue in range(QUEUES)]
            self._unsaid.clear()
            self._saying = None
            if self.member.record.may_lack_archived:
                self._settle(self.member.confirming)
            else:
                self._has_settled(self.member.confirming)
            self.world.promises.promoted(self)

    def _ask(self, action: Action) -> None:
        """Send a request to a controller; a heartbeat goes to all."""
        world, network = self.world, self.world.network
        if isinstance(action, Heartbeat):
            report = Report(
                heard_ms=0,
                address=self.host,
                epoch=self.disk.epochs.last_epoch,
                max_offset=self.log.end,
                confirm_offset=action.confirm,
                incarnation=action.life.incarnation,
                starts=action.life.starts,
                process=action.life.process,
                master_epoch=action.pair[0],
                sync_state_set_epoch=action.pair[1],
            )
            broker_id = action.life.broker_id
            for host in world.controllers:
                network.post(self, host, lambda controller: controller.heartbeat(broker_id, report))
            return
        request, heard = self._request(action)

        def ask(controller: Controller, answer: Callable[[Any], None]) -> None:
            controller.handle(request, answer)

        network.ask(self, self.dice.choice(list(world.controllers)), ask, heard)

    def _request(self, action: Action) -> tuple[decision.Request, Callable[[decision.Answer], None]]:
        """Build a request to the controller, and interpret its answer."""
        success = ResponseCode.SUCCESS

        def seen(answer: decision.Answer, ask: int = 0) -> None:
            if answer.code in (success, ResponseCode.CONTROLLER_MASTER_STILL_EXIST):
                self.happens(SetSeen(_view(answer), ask))
            elif answer.code in (
                ResponseCode.CONTROLLER_BROKER_METADATA_NOT_EXIST,
                ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED,
            ):
                self.happens(NotRegistered())

        match action:
            case AskNextBrokerId():

                def next_id(answer: decision.Answer) -> None:
                    if answer.next_broker_id is not None:
                        self.happens(NextBrokerId(answer.next_broker_id))

                return decision.GetNextBrokerId(CLUSTER, NAME), next_id
            case ApplyBrokerId(broker_id, check_code):

                def applied(answer: decision.Answer) -> None:
                    self.happens(BrokerIdApplied(broker_id) if answer.code == success else BrokerIdTaken())

                return decision.ApplyBrokerId(CLUSTER, NAME, broker_id, check_code), applied
            case Register(life, check_code):

                def registered(answer: decision.Answer) -> None:
                    if answer.code == ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED:
                        self.happens(NotRegistered())
                    elif answer.code == ResponseCode.CONTROLLER_BROKER_ID_INVALID:
                        self.happens(BrokerIdLost(life.broker_id))
                    elif answer.code == success:
                        self.happens(Registered(None if answer.master_epoch is None else _view(answer)))

                registration = self.world.registration(life, self.host)
                return dataclasses.replace(registration, check_code=check_code), registered
            case Elect(designate):
                who = self.member.broker_id if designate is None else designate
                return decision.ElectMaster(NAME, who, designate is not None), seen
            case AskReplicaInfo(number):
                return decision.GetReplicaInfo(NAME), lambda answer: seen(answer, number)
            case Alter():

                def altered(answer: decision.Answer) -> None:
                    if answer.code == success:
                        assert answer.sync_state_set is not None and answer.sync_state_set_epoch is not None
                        self.happens(
                            SetSeen(
                                View(
                                    action.master_epoch,
                                    answer.sync_state_set_epoch,
                                    frozenset(answer.sync_state_set),
                                    self.member.broker_id,
                                    self.host,
                                )
                            )
                        )
                    else:
                        has_moved = answer.code == ResponseCode.CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH
                        self.happens(AlterRefused(action.request_id, has_moved))

                return self.world.alteration(action, self.member.broker_id), altered
        raise AssertionError(action)

    def notified(self, fields: dict[str, Any]) -> None:
        """Handle 1008, the controller's notification of roles."""
        self.happens(SetSeen(View(**fields)))

    def epoch_cache(self) -> tuple[str, int, int]:
        """Answer 1007 with the last epoch and the log end."""
        return self.process, self.disk.epochs.last_epoch, self.log.end

    # ---- as master: producers

    def send(self, uid: int, queue: int, size: int, reply: Reply) -> None:
        now = self.now()
        confirming = self.member.confirming
        if not self.member.may_append(now) or self._settled is not confirming:
            reply("refused")
            return
        assert confirming is not None
        record = Record(
            uid, queue, self._next_offset[queue], size, self.member.role.master_epoch, self.member.broker_id
        )
        self._next_offset[queue] += 1
        end = self.log.append(record)
        self.world.promises.appended(record)
        self._waiting.add(end, (record, reply), now)
        self._has_appended(confirming)
        self._answer_reached()

    def _has_appended(self, confirming: Confirm) -> None:
        if self.from_memory:
            confirming.appended(self.log.end)
        else:
            self.flush()
        for connection, follower in list(self._followers.items()):
            self._push(connection, follower)

    def _answer_reached(self) -> None:
        if not self._waiting:
            return
        acknowledged = self.member.acknowledged(self.now())
        for record, reply in list(self._waiting.reached(acknowledged)):
            self.world.promises.acknowledged(self, record)
            reply("ok")

    def _not_safe(self, record: Record, reply: Reply) -> None:
        reply("not safe")

    # ---- as master: slaves

    def accept(self, connection: Connection) -> None:
        connection.received[self] = lambda message: self._from_slave(connection, message)
        connection.closed[self] = lambda: self._forget_follower(connection)

    def _from_slave(self, connection: Connection, message: tuple[Any, ...]) -> None:
        confirming, now = self.member.confirming, self.now()
        if confirming is None:
            connection.close(self)
            return
        if message[0] == "hello":
            life: Life = message[1]
            for older in [c for c, f in self._followers.items() if f.life.broker_id == life.broker_id]:
                self._drop(older)
            self._followers[connection] = _Follower(life, now)
            confirming.connected(life.broker_id, connection, now)
            entries = self.disk.epochs.entries()
            connection.send(self, ("h2", self.member.role.master_epoch, entries, self.log.end))
            return
        follower = self._followers.get(connection)
        if follower is None:
            connection.close(self)
            return
        follower.heard = now
        _, end, synced = message
        if not confirming.reported(follower.life.broker_id, connection, end, now, synced=synced):
            self._drop(connection)
            return
        if follower.next is None:
            follower.next = end
        self._answer_reached()
        if not confirming.in_sync(follower.life.broker_id):
            self.happens(Tick(self.log.whole_end))
        if connection in self._followers:
            self._push(connection, follower)

    def _push(self, connection: Connection, follower: _Follower) -> None:
        """Send the log to a slave; catching up is throttled, and a frame ends where an epoch ends."""
        while follower.next is not None and follower.next < self.log.end and not follower.is_throttled:
            entry = self.disk.epochs.at(follower.next)
            assert entry is not None
            upto = min(self.log.end, follower.next + self.dice.choice((90, 250, 1000, 3000)))
            if entry[2] is not None:
                upto = min(upto, entry[2])
            self._send_frame(connection, follower.next, tuple(self.log.read(follower.next, upto)))
            follower.next = upto
            if self.world.pace:
                follower.is_throttled = True
                self.after(self.world.pace, lambda: self._push_on(connection, follower))

    def _push_on(self, connection: Connection, follower: _Follower) -> None:
        follower.is_throttled = False
        if connection in self._followers:
            self._push(connection, follower)

    def _send_frame(self, connection: Connection, offset: int, pieces: tuple[Piece, ...]) -> None:
        entry = self.disk.epochs.at(offset)
        assert entry is not None
        connection.send(self, ("t2", offset, entry[0], entry[1], self.member.confirm, pieces))

    def _drop(self, connection: Connection) -> None:
        connection.close(self)
        self._forget_follower(connection)

    def _forget_follower(self, connection: Connection) -> None:
        follower = self._followers.pop(connection, None)
        if follower is not None and self.member.confirming is not None:
            self.member.confirming.disconnected(follower.life.broker_id, connection, self.now())

    # ---- as slave

    def _connect(self) -> None:
        following = self._following
        if following is None or self._upstream is not None:
            return
        connection = self.world.network.connect(self, following.address)
        if connection is not None:
            self._upstream, self._is_attached = connection, False
            self._heard_upstream = self.now()
            connection.received[self] = lambda message: self._from_master(connection, message)
            connection.closed[self] = lambda: self._closed_by_master(connection)
            connection.send(self, ("hello", self.member.record.life))
        else:
            self._connect_later()

    def _connect_later(self) -> None:
        self.after(self.dice.uniform(0.5, 1.5) * RECONNECT, self._connect)

    def _closed_by_master(self, connection: Connection) -> None:
        if connection is self._upstream:
            self.lose_upstream()

    def lose_upstream(self) -> None:
        connection, self._upstream, self._is_attached = self._upstream, None, False
        self._then = None
        if connection is not None:
            connection.close(self)
        if self._following is not None:
            self._connect_later()

    def _from_master(self, connection: Connection, message: tuple[Any, ...]) -> None:
        if connection is not self._upstream:
            return
        self._heard_upstream = self.now()
        if message[0] == "h2":
            self._meet(connection, *message[1:])
        elif self._is_attached:
            self._take_frame(*message[1:])

    def _meet(self, connection: Connection, epoch: int, entries: tuple[tuple[int, int], ...], master_end: int) -> None:
        """Find where the two logs diverge, and truncate there."""
        following, log = self._following, self.log
        if following is None or following.epoch != epoch:
            self.lose_upstream()
            return
        local = self.disk.epochs.entries()
        if not local:
            point: int | None = 0
        else:
            point = self.world.truncation_point(
                local,
                log.end,
                entries,
                master_end,
                master_epoch=epoch,
                followed_epoch=self.disk.followed_epoch,
                last_confirm=self.member.confirm,
            )
        if point is None:
            self.world.note(f"{self.host} has nothing in common with {following.address}")
            self.lose_upstream()
            return

        def attach() -> None:
            if connection is self._upstream:
                self.disk.followed_epoch = epoch
                self._is_attached = True
                if self.from_memory:
                    self._report()
                else:
                    self._when_synced(self._report)

        if point >= log.whole_end:
            if log.partial is not None:
                log.partial = None
                self._cuts += 1
                log.synced = min(log.synced, log.end)
            self.world.drop_epochs(self.disk, point)
            attach()
            return
        self._then = attach
        floor = log.record_start(min(self.member.confirm, log.whole_end))
        self.happens(TruncationRequested(log.record_start(point), floor))

    def _when_synced(self, call: Callable[[], None]) -> None:
        if self.log.synced >= self.log.end:
            call()
        else:
            self.flush()  # A report follows.

    def _cut(self, to: int) -> None:
        self._cuts += 1
        gone = self.log.truncate(to)
        self._heard, self._saying = min(self._heard, to), None
        self._read_queues(is_clean=False)
        self.disk.diverged += gone
        self.disk.epochs.truncate(to)
        self.world.promises.cut(self, gone)
        self.world.note(f"{self.host} cuts to {to}: {gone}")

    def _report(self) -> None:
        connection = self._upstream
        if connection is not None and self._is_attached:
            end = self.log.end if self.from_memory else self.log.synced
            connection.send(self, ("t1", end, self.log.synced))

    def _take_frame(self, offset: int, epoch: int, start: int, confirm: int, pieces: tuple[Piece, ...]) -> None:
        log = self.log
        try:
            if offset != log.end:
                raise EpochConflict
            self.disk.epochs.assign(epoch, start)
        except EpochConflict:
            self.lose_upstream()
            return
        for piece in pieces:
            if not log.append_piece(piece):
                log.cut_torn_tail()
                self.lose_upstream()
                return
            self.disk.raises.arrived(piece[0])
        self.happens(ConfirmReceived(log.record_start(min(confirm, log.whole_end))))
        if pieces:
            if self.from_memory:
                self._report()
            else:
                self.flush()

    # ---- the archive

    def _archive(self) -> None:
        """Run a master's archiving round, once everything it had at its promotion is confirmed."""
        self.after(ARCHIVE_EVERY, self._archive)
        confirming, epoch = self.member.confirming, self.member.role.master_epoch
        if confirming is None or self._settled is not confirming or self.member.confirm < confirming.epoch_start:
            return

        def heard(entries: tuple[Entry, ...]) -> None:
            if self.member.confirming is not confirming or highest_epoch(entries) > epoch:
                return
            entry: Entry = Epoch(epoch)
            if highest_epoch(entries) == epoch:
                start, end = archived_end(entries), self.log.record_start(self.world.archivable(self))
                if end <= start:
                    return
                entry = Commit(start, end, self.log.between(start, end))
            self.world.network.ask(
                self, BUCKET, lambda bucket, reply: reply(bucket.append(len(entries), entry)), lambda done: None
            )

        self.world.network.ask(self, BUCKET, lambda bucket, reply: reply(tuple(bucket.entries)), heard)

    # ---- archived messages that it may lack

    def _settle(self, confirming: Confirm) -> None:
        """Settle a master before it appends: it takes the archive over, and resumes above all archived messages."""
        if self.member.confirming is not confirming or self._settled is confirming:
            return
        self.after(SETTLE_AGAIN, lambda: self._settle(confirming))
        epoch = self.member.role.master_epoch

        def heard(entries: tuple[Entry, ...]) -> None:
            if self.member.confirming is not confirming or self._settled is confirming:
                return
            if highest_epoch(entries) < epoch:
                taken: Entry = Epoch(epoch)
                self.world.network.ask(
                    self, BUCKET, lambda bucket, reply: reply(bucket.append(len(entries), taken)), lambda done: None
                )
            elif highest_epoch(entries) == epoch and self.member.confirm >= confirming.epoch_start:
                self._resume_log_above(entries, confirming)

        self.world.network.ask(self, BUCKET, lambda bucket, reply: reply(tuple(bucket.entries)), heard)

    def _resume_log_above(self, entries: tuple[Entry, ...], confirming: Confirm) -> None:
        gap = archived_end(entries) - self.log.whole_end
        if gap > 0:
            self._checkpointed(confirming)
            self._append_book(gap)
            self.log.synced = self.log.end
            self._has_appended(confirming)
        for queue, end in enumerate(archived_queue_ends(entries)):
            if end > self.world.next_queue_offset(self, queue):
                self._checkpointed(confirming)
                self.disk.raises.goes_on[queue] = end
                self.world.promises.raised(queue, end)
            self._next_offset[queue] = self.world.next_queue_offset(self, queue)
        self._has_settled(confirming)

    def _append_book(self, size: int, *, raises: tuple[int, ...] = (), settles: bool = False) -> Record:
        epoch, own = self.member.role.master_epoch, self.member.broker_id
        record = Record(self.world.next_number(), NO_QUEUE, 0, size, epoch, own, raises, settles)
        self.log.append(record)
        return record

    def _has_settled(self, confirming: Confirm) -> None:
        self._settled = confirming
        self.after(self.dice.uniform(0, CHECKPOINT), lambda: self._checkpointed(confirming))
        goes_on = self.disk.raises.goes_on
        raised = any(end > len(self.log.queues[queue]) for queue, end in enumerate(goes_on))
        self._unsaid.extend([(*goes_on,)] if raised and self.member.record.may_lack_archived else [])
        self._unsaid.append(())
        self._say_settled()

    def _checkpointed(self, confirming: Confirm) -> None:
        """Set the checkpoint: a start treats the log above it as its own."""
        if self.member.confirming is confirming:
            self.disk.is_following = False

    def _say_settled(self) -> None:
        """Append to the log, as soon as possible, the raised queues and then the end of them, for slaves."""
        confirming = self.member.confirming
        if confirming is None or self._settled is not confirming or not self.world.says_settled:
            return
        while self._unsaid and self.member.may_append(self.now()):
            raises = self._unsaid.popleft()
            if not raises:
                self.disk.raises.noted += self._noted
                self._noted = []
            self._append_book(BOOK_SIZE, raises=raises, settles=not raises)
            self._has_appended(confirming)
            self.disk.followed = self.log.end
            if raises:
                self._noted.append((self.log.end, raises))
            else:
                self._saying = self.log.end, SettledArchive(self.member.role.master_epoch)
        self._has_read_settled()

    def _hear_settled(self) -> None:
        """Apply, as a slave, the settlement records of the log in order."""
        log = self.log
        confirmed = log.record_start(min(self.member.confirm, log.whole_end))
        if self.member.state is not State.SLAVE or not self._is_attached or confirmed <= self._heard:
            return self._has_read_settled()
        self._raise(confirmed)
        at = self._heard
        for record in log.between(self._heard, confirmed):
            at += record.size
            if record.settles:
                self._saying = at, MasterSettled(record.epoch)
        self._heard = confirmed
        return self._has_read_settled()

    def _raise(self, upto: int) -> None:
        """Raise queues as recorded in the log so far, once."""
        disk, log = self.disk, self.log
        at = disk.followed
        for record in log.between(at, upto):
            at += record.size
            if raises := self.world.raised_by(record):
                disk.raises.resume_log(raises, at)
        disk.followed = max(disk.followed, upto)

    def _read_queues(self, *, is_clean: bool) -> None:
        """Read the queues from the disk: at a start, and after a truncation."""
        disk, end = self.disk, self.log.end
        self._noted = []
        disk.raises.lose(end)
        if disk.is_following and not is_clean:
            disk.raises.make_anew(self.log)
        disk.followed = min(disk.followed, end)
        disk.is_following = True

    def _has_read_settled(self) -> None:
        saying = self._saying
        if saying is not None and saying[0] <= self.log.synced:
            self._saying = None
            self.happens(saying[1])

    # ---- readers and groups

    def pull(self, queue: int, offset: int, reply: Callable[[list[Record] | None], None]) -> None:
        """Return messages, or None if this broker cannot answer now."""
        if not self.member.is_readable:
            reply(None)
            return
        visible = self.member.confirm
        found: list[Record] = []
        for record, end in self.log.queues[queue][offset : offset + 8]:
            if end > visible or record is None:
                break
            found.append(record)
        for record in found:
            self.world.promises.shown(self, record)
        reply(found)

    def commit_offset(self, queue: int, offset: int) -> None:
        if self.member.state is State.MASTER and self.member.acknowledged(self.now()) >= 0:
            self.disk.groups[queue] = offset
            self.world.promises.committed(queue, offset)

    def _poll_groups(self) -> None:
        self.after(POLL_GROUPS, self._poll_groups)
        following = self._following
        if following is None or self.member.state is not State.SLAVE:
            return
        polled = self._polled_groups
        if polled is not None and self.member.confirm >= polled[1]:
            self.disk.groups = dict(polled[0])
            self._polled_groups = None

        def heard(value: tuple[dict[int, int], int] | None) -> None:
            if value is not None and self._following is following and self._polled_groups is None:
                self._polled_groups = value

        self.world.network.ask(self, following.address, lambda broker, reply: reply(broker.groups()), heard)

    def groups(self) -> tuple[dict[int, int], int] | None:
        """Answer 43, with the log end that the offsets belong to."""
        if self.member.confirming is None:
            return None
        return dict(self.disk.groups), self.log.whole_end


def _view(answer: decision.Answer) -> View:
    return View(
        answer.master_epoch or 0,
        answer.sync_state_set_epoch or 0,
        frozenset(answer.sync_state_set or ()),
        answer.master,
        answer.master_address or "",
    )
