"""Commands `neve broker` and `neve up`."""

import asyncio
import dataclasses
import json
import logging
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import click
import msgspec

from broker.config import BrokerConfig
from infra.config.properties import ConfigError, LoadedConfig, read
from infra.process.server_command import announce, catch_signals, leave, run_and_exit, settings_option

RestoreFrom = click.option(
    "--restore-from",
    metavar="URL",
    help="Fill an empty data directory from this broker's archive (topics, groups, offsets), then serve.",
)
ImportFrom = click.option(
    "--import-from",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Fill an empty data directory from that of a stopped Apache RocketMQ broker, then replace it.",
)
DryRun = click.option(
    "--dry-run",
    is_flag=True,
    help="With --restore-from or --import-from: print the result and the losses, and change nothing.",
)


@click.command()
@click.option("-c", "--config", "path", type=click.Path(path_type=Path), help="Configuration file (broker.conf).")
@settings_option
@RestoreFrom
@ImportFrom
@DryRun
def broker(
    path: Path | None, settings: tuple[str, ...], restore_from: str | None, import_from: Path | None, dry_run: bool
) -> None:
    """Run a broker."""
    source = None if import_from is None else import_from.absolute()
    if source is None:
        run_and_exit(lambda: _begin(read(BrokerConfig, path, settings), None, restore_from, dry_run))
        return

    def start() -> Awaitable[int]:
        if restore_from is not None:
            raise ConfigError("--import-from and --restore-from exclude each other")
        loaded = read(BrokerConfig, path, settings)
        return _dry_import(loaded, source) if dry_run else _import_and_run(loaded, source)

    run_and_exit(start)


@click.command()
@click.option("--data", type=click.Path(path_type=Path), default=Path("neve-data"), show_default=True,
              help="Directory for all data.")  # fmt: skip
@click.option("--store", default=None, help="Archive store; default: dir:DATA/archive. '' switches it off.")
@click.option("--namesrv-port", type=click.IntRange(0, 65535), default=9876, show_default=True,
              help="Name server; 0 takes any.")  # fmt: skip
@click.option("--port", type=click.IntRange(0, 65535), default=10911, show_default=True, help="Broker; 0 takes any.")
@click.option("--replicas", type=click.IntRange(1, 7), default=1, show_default=True,
              help="Members of a broker set, each a process, on PORT, PORT + 10, PORT + 20, ...")  # fmt: skip
@click.option("--controller-port", type=click.IntRange(0, 65535), default=9878, show_default=True,
              help="With --replicas: port of the controller; 0 takes any.")  # fmt: skip
@settings_option
@RestoreFrom
@DryRun
def up(  # noqa: PLR0917 - the command line's own
    data: Path,
    store: str | None,
    namesrv_port: int,
    port: int,
    replicas: int,
    controller_port: int,
    settings: tuple[str, ...],
    restore_from: str | None,
    dry_run: bool,
) -> None:
    """Run a name server and a broker in one process, for development; a JSON line reports when they are ready.

    They listen on 127.0.0.1 only, with archiveMaxAge=10m and mappedFileSizeCommitLog=64m. --set overrides each key.

    With --replicas 3 a whole broker set on this machine, to try it: a name server and a controller in this process,
    the members in processes of their own, over directories 1, 2 and 3 of the data. One that is killed begins again 5
    seconds later.
    """

    def start() -> Awaitable[int]:
        if replicas > 1:
            if restore_from is not None:
                raise ConfigError("--restore-from and --replicas exclude each other")
            from broker import set_on_one_machine as one_machine

            places = one_machine.Places(data.absolute(), namesrv_port, controller_port, port)
            return one_machine.run(replicas, places, store, settings)
        base = [
            f"storePathRootDir={data.absolute() / 'broker'}",
            f"storeUrl={(restore_from or f'dir:{data.absolute()}/archive') if store is None else store}",
            f"listenPort={port}",
            "brokerIP1=127.0.0.1",
            "bindAddress=127.0.0.1",
            "archiveMaxAge=10m",
            "mappedFileSizeCommitLog=64m",
            f"adminPort={port + 2 if port else 0}",
        ]
        loaded = read(BrokerConfig, None, [*base, *settings])
        return _begin(loaded, (data.absolute() / "namesrv" / "kvConfig.json", namesrv_port), restore_from, dry_run)

    run_and_exit(start)


def _begin(
    loaded: LoadedConfig[BrokerConfig], embedded: tuple[Path, int] | None, restore_from: str | None, dry_run: bool
) -> Awaitable[int]:
    if restore_from is None:
        if dry_run:
            raise ConfigError("--dry-run needs --restore-from")
        return _run(loaded, embedded, restoring=False)
    from broker.archiving import restore

    restore.with_store(loaded.config, restore_from)
    return _dry_run(loaded.config) if dry_run else _run(loaded, embedded, restoring=True)


async def _dry_run(config: BrokerConfig) -> int:
    from broker.archiving import restore
    from infra.clock import SystemClock
    from infra.disk.filesystem import RealDisk
    from infra.observe import log as logs

    logs.configure(config.log_level)
    report = await asyncio.to_thread(restore.dry_run, config, RealDisk(), SystemClock())
    click.echo(json.dumps(report, indent=2, ensure_ascii=False))
    return 0


async def _dry_import(loaded: LoadedConfig[BrokerConfig], source: Path) -> int:
    from broker.importing.store_import import StoreImport
    from infra.disk.filesystem import RealDisk
    from infra.observe import log as logs

    logs.configure(loaded.config.log_level)
    report = await asyncio.to_thread(StoreImport(loaded.config, RealDisk(), source).look)
    click.echo(json.dumps(msgspec.to_builtins(report), indent=2, ensure_ascii=False))
    return 0


async def _import_and_run(loaded: LoadedConfig[BrokerConfig], source: Path) -> int:
    """Run the import as a slave, then a normal start, which is the promotion."""
    from broker.broker_controller import BrokerController
    from broker.clients.master_api import MasterApi
    from broker.importing.store_import import StoreImport
    from broker.machine import Machine
    from infra.clock import SystemClock
    from infra.disk.filesystem import RealDisk
    from infra.observe import log as logs

    config, disk = loaded.config, RealDisk()
    logs.configure(config.log_level, loaded.warnings)
    if config.replication != "none" or config.broker_role != "ASYNC_MASTER":
        raise ConfigError("--import-from makes a single master: set brokerRole=ASYNC_MASTER and replication=none")
    if not config.name_servers:
        raise ConfigError("--import-from needs namesrvAddr: name servers confirm that the old broker is gone")
    follower = dataclasses.replace(config, broker_role="SLAVE", broker_id=1)
    importer = BrokerController(follower, Machine(clock=SystemClock(), disk=disk))
    report = await importer.take_in(StoreImport(follower, disk, source), MasterApi(follower))
    logging.getLogger(__name__).info("imported: %s", report)
    return await _run(loaded, None, restoring=False)


async def _run(loaded: LoadedConfig[BrokerConfig], embedded: tuple[Path, int] | None, *, restoring: bool) -> int:
    from broker.archiving.restore import Restore
    from broker.broker_controller import BrokerController
    from broker.embedded import start_name_server
    from broker.machine import Machine
    from infra.clock import SystemClock
    from infra.disk.filesystem import RealDisk
    from infra.observe import log as logs

    config = loaded.config
    logs.configure(config.log_level, loaded.warnings)
    disk = RealDisk()
    name_server = await start_name_server(config, *embedded) if embedded is not None else None
    try:
        restore = Restore(config, disk) if restoring else None
        controller = BrokerController(config, Machine(clock=SystemClock(), disk=disk), restore)
        logs.set_level(config.log_level)  # as it was set on the running broker
        catch_signals(controller.stop)
        await controller.start()
        ready: dict[str, Any] = {"broker": "{}:{}".format(*controller.address)}
        if name_server is not None:
            ready["namesrv"] = f"127.0.0.1:{name_server.port}"
        if controller.admin_address is not None:
            ready["admin"] = "{}:{}".format(*controller.admin_address)
        if controller.metrics_address is not None:
            ready["metrics"] = "{}:{}".format(*controller.metrics_address)
        if restore is not None:
            ready["restored"] = restore.report
        announce(ready)
        await controller.life.end_requested.wait()
        await controller.shutdown()
        if controller.left_behind:
            leave(controller.life.exit_code)
        return controller.life.exit_code
    finally:
        if name_server is not None:
            await name_server.shutdown()
