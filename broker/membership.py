"""Composition of a broker's membership in a broker set: admission of appends first, the manager once all parts exist.

The parts are wired explicitly, as everywhere in the broker (`broker_controller`). A single broker has none of them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from access.wiring import peer_security
from broker.archiving.archive import AnyArchive
from broker.change_of_role import ChangeOfRole
from broker.clients.master_api import MasterApi
from broker.config import BrokerConfig
from broker.ha.controller_calls import Identity
from broker.ha.controllers import Controllers
from broker.ha.frames import Hello
from broker.ha.ha_service import HaService
from broker.ha.master_session import StreamRules
from broker.ha.member_file import MemberFile
from broker.ha.plain_slave import PlainSlave
from broker.ha.reign import Reign
from broker.ha.replicas_manager import Keep, ReplicasManager
from broker.ha.settings import SetSettings
from broker.metadata.slave_synchronize import Master, SlaveSynchronize
from broker.role import BrokerRole
from broker.store.message_store import MessageStore
from infra.clock import Clock
from infra.disk.filesystem import Disk
from infra.loop.threads import Threads
from infra.net.tls import server_tls
from neve.entropy import system_entropy

log = logging.getLogger(__name__)


class Membership:
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
        self._settings, self._config, self._address = settings, config, address
        self._store, self._disk, self._clock, self._threads = store, disk, clock, threads
        self._security = peer_security(config)
        self.member_file = MemberFile(disk, config.root, threads.lock)
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
        self.reign = Reign(self.ha_service, clock)

    def manager(
        self,
        role: BrokerRole,
        books: ChangeOfRole,
        archive: Callable[[], AnyArchive],
        *,
        on_confirmed: Callable[[], None],
        stop_acknowledging: Callable[[], None],
        spawn: Keep,
        keep: Keep,
        sync_log: Callable[[], Awaitable[None]],
    ) -> ReplicasManager:
        """Create the manager, once the rest of the broker exists."""
        config, settings = self._config, self._settings
        host, port = self._address
        own = Identity(
            cluster=config.broker_cluster_name,
            name=config.broker_name,
            address=f"{host}:{port}",
            min_in_sync_replicas=settings.rules.confirm.min_in_sync,
            heartbeat_timeout_ms=config.controller_heart_beat_timeout_mills,
            election_priority=config.broker_election_priority,
        )
        return ReplicasManager(
            settings.rules,
            own,
            hello=hello_of(config, 0),
            stream=StreamRules(
                batch=config.ha_transfer_batch_size,
                rate=config.max_ha_transfer_byte_in_second if config.ha_flow_control_enable else 0,
                admits_stock=config.apache_members,
                secret="\0".join(self._security.credentials or ()).encode(),
            ),
            store=self._store,
            disk=self._disk,
            member_file=self.member_file,
            controllers=Controllers(settings.controllers, self._security, stock_is_refused=settings.stock_is_refused),
            ha_service=self.ha_service,
            reign=self.reign,
            role=role,
            books=books,
            archive=archive,
            on_confirmed=on_confirmed,
            stop_acknowledging=stop_acknowledging,
            clock=self._clock,
            entropy=system_entropy,
            spawn=spawn,
            keep=keep,
            sync_log=sync_log,
            sign=self._security.sign,
            tls=self._security.tls,
            threads=self._threads,
        )


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
    return PlainSlave(
        hello_of(config, config.broker_id),
        store=store,
        disk=disk,
        root=config.root,
        api=MasterApi(config),
        following=lambda address, life: synchronize.follow(Master(address, life, is_stock=True)),
        advanced=synchronize.advance,
        archive=archive,
        forget_poll=forget_poll,
        role=role,
        clock=clock,
        entropy=system_entropy,
        sync_log=sync_log if config.sync_flush else None,
        threads=threads,
    )


class MasterPins:
    """Pins of a slave with an archive.

    Messages that wait in its master's log are in no archive, and this broker may be promoted and have to deliver them.
    It therefore keeps as much of the log as the master has, while there is disk space.
    """

    def __init__(self, master_begins_at: Callable[[], int], *, is_crowded: Callable[[], bool]) -> None:
        self._master_begins_at, self._is_crowded = master_begins_at, is_crowded

    def lowest(self) -> int | None:
        return None if self._is_crowded() else self._master_begins_at()

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
