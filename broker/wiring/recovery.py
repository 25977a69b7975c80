"""Start of a broker's state: its directory, log, tables and archive, in this order."""

from __future__ import annotations

import logging

from broker.archiving.archive import open_archive
from broker.archiving.restore import Restore, refuse_unfinished
from broker.clients.master_api import MasterApi
from broker.ha.plain_slave import refuse_slaves
from broker.importing.store_import import refuse_unfinished_import
from broker.loading import add_system_tables, check_directory, load_all, recover_log, refuse_members
from broker.promotion.promotion import refused
from broker.waiting.delivery import remove_unfinished
from broker.wiring.parts import BrokerParts
from infra.process.startup import StartupError

log = logging.getLogger(__name__)

# Directories of the data directory whose files contain users' secrets.
_PRIVATE = ("commitlog", "config", "diverged", "ha", "quarantine")


class BrokerRecovery:
    """Steps that recover the state at a start. Each raises StartupError, and leaves nothing of its own behind."""

    def __init__(self, parts: BrokerParts, restore: Restore | None) -> None:
        """`restore` creates the directory from the archive; None: the broker starts from its directory."""
        self._parts, self._restore = parts, restore
        self._config, self._disk, self._run = parts.runtime.config, parts.runtime.disk, parts.runtime.threads.run
        self._store, self._promotion = parts.storage.store, parts.messages.promotion
        self._replicas, self._slave = parts.replicas.manager, parts.archive.plain_slave
        self._promotes = False

    async def check_directory(self) -> None:
        if self._restore is not None:
            await self._run(self._restore.begin)
        else:
            refuse_unfinished(self._config, self._disk)
            refuse_unfinished_import(self._config, self._disk)
        await self._run(check_directory, self._config, self._disk)
        for name in _PRIVATE:  # new directories are private already; this one may be older or copied
            if self._disk.exists(self._config.root / name):
                self._disk.make_private(self._config.root / name)

    async def check_promotion(self) -> None:
        """Check whether a slave's directory is started as a single broker: then it is promoted."""
        config = self._config
        if self._slave is None and self._replicas is None and self._promotion.is_due:
            own = config.broker_cluster_name, config.broker_name, "{}:{}".format(*self._parts.runtime.address)
            await self._promotion.check(MasterApi(config), own, config.name_servers)
            self._promotes = True

    async def open_log(self) -> None:
        """Recover the log. If that fails, nothing stays locked."""
        await self._run(self._open_log)

    def _open_log(self) -> None:
        try:
            self._recover_log()
            remove_unfinished(self._disk, self._config.root)
        except BaseException:
            self._store.shutdown()
            raise

    def _recover_log(self) -> None:
        replicas, slave = self._replicas, self._slave
        if slave is not None:
            refuse_members(self._config, self._disk)
            slave.load()
            recover_log(self._config, self._store, following=True)
            self._promotion.take_back()
            slave.begin()
        elif replicas is None:
            refuse_members(self._config, self._disk)
            recover_log(self._config, self._store, following=self._promotes)
            if self._promotes:
                self._promotion.begin()
        else:
            refuse_slaves(self._disk, self._config.root)
            recover_log(self._config, self._store, confirmed=replicas.life.load())
            replicas.life.begin()

    async def close_log(self) -> None:
        await self._run(self._store.shutdown)

    async def load_tables(self) -> None:
        await self._run(self._load_tables)

    def _load_tables(self) -> None:
        # Messages that wait in an Apache master's log are in RocketMQ's form, and the master delivers them, as in a
        # set.
        tables, messages = self._parts.tables, self._parts.messages
        last_poll = () if self._slave is None else (messages.last_poll,)
        load_all((*self._parts.tables_of_log, messages.metadata, *last_poll))
        if self._promotes:
            self._promotion.run()
        if self._slave is None and self._replicas is None:
            load_all((messages.timers, messages.transactions))
        add_system_tables(self._config, tables.topics, tables.groups)

    async def open_archive(self) -> None:
        """Open the archive, which may restore its contents."""
        archive, promotion = self._parts.archive, self._promotion if self._promotes else None
        try:
            opened = await open_archive(
                archive.local_side,
                self._restore,
                cold_groups=self._parts.runtime.descriptors.cold_groups,
                promote=None if promotion is None else promotion.finish,
            )
        except StartupError as error:
            if promotion is not None and promotion.is_due:  # the promotion is not final, and the slave may continue
                raise refused(str(error), error.exit_code) from error
            raise
        archive.opened.opened(opened)
        if opened.reader is not None:
            self._parts.service.tiered.attach(opened.reader)

    async def close_archive(self) -> None:
        await self._parts.archive.opened.get().shutdown()

    async def settle_positions(self) -> None:
        """Settle positions that depend on log and archive: clip committed offsets, then load popped messages."""
        messages = self._parts.messages
        if self._replicas is not None:  # before it is master, its log may be confirmed further: no offset is clipped
            load_all((messages.pops,))
            return
        if self._slave is not None:
            return
        for line in self._parts.tables.offsets.clip(self._store.queues.max_offset):
            log.warning("group offset above the end of its queue: %s", line)
        load_all((messages.pops,))
        messages.metadata.settle()
