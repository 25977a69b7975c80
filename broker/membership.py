"""Composition of a broker's membership in a broker set: admission of appends first, the manager once all parts exist.

The parts are wired explicitly, as everywhere in the broker (`broker.wiring`). A single broker has none of them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from access.wiring import peer_security
from broker.archiving.archive import AnyArchive
from broker.change_of_role import ChangeOfRole
from broker.clients.master_api import MasterApi
from broker.config import BrokerConfig
from broker.ha.admission import MemberAdmission
from broker.ha.archive_settling import ArchiveSettling
from broker.ha.controller_calls import Identity
from broker.ha.controller_requests import ControllerRequests, Spawn
from broker.ha.controllers import Controllers
from broker.ha.diverged_tail import DivergedTail
from broker.ha.epoch_file import EpochFile, StoredEpochs
from broker.ha.frames import Hello
from broker.ha.greeting import identified
from broker.ha.ha_client import FollowTarget, HaClient, SlaveEvents, member_session
from broker.ha.ha_service import HaService
from broker.ha.master_follower import MasterFollower, MasterLookup
from broker.ha.master_session import StreamRules
from broker.ha.master_term import MasterTerm
from broker.ha.member import Member
from broker.ha.member_file import MemberFile
from broker.ha.member_life import MemberLife
from broker.ha.member_role import MemberRole
from broker.ha.plain_slave import DIRECTORY, FollowedFile, PlainSlave
from broker.ha.replicas_manager import ReplicasManager
from broker.ha.settings import SetSettings
from broker.ha.slave_session import SlaveSession
from broker.metadata.slave_synchronize import Master, SlaveSynchronize
from broker.role import BrokerRole
from broker.store.message_store import MessageStore
from infra.clock import Clock
from infra.disk.filesystem import Disk
from infra.loop.threads import Threads
from infra.net.tls import server_tls
from neve.entropy import system_entropy, unique_name

log = logging.getLogger(__name__)


class SetMembership:
    """Parts of a broker for its set."""

    def __init__(
        self,
        settings: SetSettings,
        config: BrokerConfig,
        address: tuple[str, int],
        *,
        ha_port: int,
        store: MessageStore,
        disk: Disk,
        clock: Clock,
        threads: Threads,
    ) -> None:
        """Create the parts that the log needs. `ha_port` 0 takes any free port."""
        self._settings, self._config, self._address = settings, config, "{}:{}".format(*address)
        self._store, self._clock, self._threads = store, clock, threads
        self._security = peer_security(config)
        self._member = Member(settings.rules, process=unique_name(system_entropy), address=self._address)
        self._file = MemberFile(disk, config.root, threads)
        self._epochs = StoredEpochs(EpochFile(disk, self._file.directory), threads)
        self.ha_service = HaService(
            store,
            clock,
            system_entropy,
            host=config.bind_address,
            port=ha_port,
            tls=server_tls(config.tls_server_mode, config.tls_cert_path, config.tls_key_path),
            threads=threads,
        )
        #: Called before each append, and for each waiting answer.
        self.admission = MemberAdmission(self._member, self.ha_service, clock)

    def manager(
        self,
        role: BrokerRole,
        state: ChangeOfRole,
        archive: Callable[[], AnyArchive],
        *,
        on_confirmed: Callable[[], None],
        stop_acknowledging: Callable[[], None],
        spawn: Spawn,
        keep: Spawn,
        sync_log: Callable[[], Awaitable[None]],
    ) -> ReplicasManager:
        """Create the manager, once the rest of the broker exists."""
        config, rules, member = self._config, self._settings.rules, self._member
        store, epochs, file, clock = self._store, self._epochs, self._file, self._clock
        hello, stream = hello_of(config, 0), self._stream_rules()
        member_role = MemberRole(
            role, member, self.admission, register=state.roles_changed, admits_stock=stream.admits_stock
        )

        def new_client(events: SlaveEvents) -> HaClient:
            life = member.record.life

            def new_session(target: FollowTarget) -> SlaveSession:
                own = identified(hello, life, target.master_epoch)
                return member_session(
                    target,
                    store,
                    epochs.cache,
                    replace(own, nonce=unique_name(system_entropy)),
                    confirm=member.confirm,
                    followed_epoch=file.followed_epoch,
                    begins_at_frontier=True,
                    is_learner=file.lacks_tables,
                    secret=stream.secret,
                )

            return HaClient(
                store,
                epochs,
                events,
                new_session,
                clock=clock,
                entropy=system_entropy,
                sync=None if rules.acknowledges_from_memory else sync_log,
                tls=self._security.tls,
            )

        return ReplicasManager(
            member,
            MemberLife(member, file, epochs, store, clock=clock, entropy=system_entropy),
            file,
            store=store,
            epochs=epochs,
            clock=clock,
            role=member_role,
            requests=self._requests(spawn),
            term=MasterTerm(
                member,
                store,
                epochs,
                self.ha_service,
                ArchiveSettling(member, archive, state, sync_log=sync_log, spawn=spawn),
                hello=hello,
                stream=stream,
                state=state,
                role=member_role,
                on_confirmed=on_confirmed,
                stop_acknowledging=stop_acknowledging,
            ),
            follower=MasterFollower(
                MasterLookup(
                    hello,
                    self._security,
                    system_entropy,
                    admits_stock=stream.admits_stock,
                    waits=rules.confirm.waits,
                ),
                store,
                epochs,
                file,
                archive=archive,
                state=state,
                role=member_role,
                new_client=new_client,
                keep=keep,
            ),
            tail=DivergedTail(store, epochs, state, member_role, sync_log=sync_log, threads=self._threads),
        )

    def _stream_rules(self) -> StreamRules:
        config = self._config
        return StreamRules(
            batch=config.ha_transfer_batch_size,
            rate=config.max_ha_transfer_byte_in_second if config.ha_flow_control_enable else 0,
            admits_stock=config.apache_members,
            secret="\0".join(self._security.credentials or ()).encode(),
        )

    def _requests(self, spawn: Spawn) -> ControllerRequests:
        config, settings = self._config, self._settings
        own = Identity(
            cluster=config.broker_cluster_name,
            name=config.broker_name,
            address=self._address,
            min_in_sync_replicas=settings.rules.confirm.min_in_sync,
            heartbeat_timeout_ms=config.controller_heart_beat_timeout_mills,
            election_priority=config.broker_election_priority,
        )
        controllers = Controllers(settings.controllers, self._security, stock_is_refused=settings.stock_is_refused)
        return ControllerRequests(controllers, own, self._member, self._epochs, spawn)


def hello_of(config: BrokerConfig, member_id: int) -> Hello:
    """Return the HELLO of a broker, without life, epoch and nonces."""
    return Hello(
        cluster=config.broker_cluster_name,
        broker_set=config.broker_name,
        member_id=member_id,
        incarnation="",
        starts=0,
        process="",
        nonce="",
        mapped_file_size_commit_log=config.mapped_file_size_commit_log,
        message_delay_level=config.message_delay_level,
        master_epoch=0,
    )


def plain_slave(
    config: BrokerConfig,
    role: BrokerRole,
    synchronize: SlaveSynchronize,
    *,
    store: MessageStore,
    disk: Disk,
    clock: Clock,
    threads: Threads,
    archive: Callable[[], AnyArchive],
    forget_poll: Callable[[], None],
    sync_log: Callable[[], Awaitable[None]],
) -> PlainSlave:
    """Create the slave of a broker whose master is Apache's and has no controller."""

    def new_client(slave: PlainSlave) -> HaClient:
        return HaClient(
            store,
            StoredEpochs(EpochFile(disk, config.root / DIRECTORY), threads),
            slave,
            slave.new_session,
            clock=clock,
            entropy=system_entropy,
            sync=sync_log if config.sync_flush else None,
            ask_stock_master=slave.ask_master,
        )

    return PlainSlave(
        hello_of(config, config.broker_id),
        store=store,
        file=FollowedFile(disk, config.root),
        new_client=new_client,
        api=MasterApi(config),
        following=lambda address, life: synchronize.follow(Master(address, life, is_stock=True)),
        advanced=synchronize.advance,
        archive=archive,
        forget_poll=forget_poll,
        role=role,
        threads=threads,
    )


class MasterPins:
    """Pins of a slave with an archive.

    Messages that wait in its master's log are in no archive, and this broker may be promoted and have to deliver them.
    It therefore keeps as much of the log as the master has, while there is disk space.
    """

    def __init__(self, slave: PlainSlave, *, is_crowded: Callable[[], bool]) -> None:
        self._slave, self._is_crowded = slave, is_crowded

    def lowest(self) -> int | None:
        return None if self._is_crowded() else self._slave.master_begins_at

    def undelivered_from(self) -> int | None:
        return 0  # the master knows which of its messages still wait

    def reappend(self, below: int) -> bool:
        return False

    async def save(self) -> None:
        """Do nothing: the state is in the master's tables."""

    def counts(self) -> dict[str, int]:
        return {}


class NoPins:
    """Pins of a slave whose master keeps waiting messages: its log is deleted by age, as the master's is."""

    def lowest(self) -> int | None:
        return None

    def undelivered_from(self) -> int | None:
        return 0  # the master knows which of its messages still wait

    def reappend(self, below: int) -> bool:
        return True

    async def save(self) -> None:
        """Do nothing: no messages wait here."""

    def counts(self) -> dict[str, int]:
        return {}
