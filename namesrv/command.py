"""`neve namesrv`."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import click

from infra.config import Loaded, read
from infra.server_command import announce, catch_signals, run_and_exit, settings_option
from infra.startup import check_port
from namesrv.namesrv_config import NamesrvConfig


@click.command()
@click.option("-c", "--config", "path", type=click.Path(path_type=Path), help="Configuration file (namesrv.conf).")
@settings_option
def namesrv(path: Path | None, settings: tuple[str, ...]) -> None:
    """Run a name server."""

    def start() -> Awaitable[int]:
        loaded = read(NamesrvConfig, path, settings)
        check_port(loaded.config.bind_address, loaded.config.listen_port)
        return _run(loaded)

    run_and_exit(start)


async def _run(loaded: Loaded[NamesrvConfig]) -> int:
    from infra import log as logs
    from infra.clock import SystemClock
    from infra.disk import RealDisk
    from namesrv.namesrv_controller import NamesrvController

    config = loaded.config
    logs.configure(config.log_level, loaded.warnings)
    disk = RealDisk()
    disk.make_dirs(config.kv_path.parent)
    server = NamesrvController(config, SystemClock(), disk)
    stopped = asyncio.Event()
    catch_signals(stopped.set)
    await server.start()
    announce({"namesrv": f"{config.bind_address}:{server.port}"})
    await stopped.wait()
    await server.shutdown()
    return 0
