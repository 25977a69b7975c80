"""`neve controller`."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from controller.controller_config import ControllerConfig
from infra.config.properties import LoadedConfig, read
from infra.process.server_command import announce, catch_signals, run_and_exit, settings_option
from infra.process.startup import check_port

if TYPE_CHECKING:
    from controller.controller_manager import ControllerManager


@click.command()
@click.option("-c", "--config", "path", type=click.Path(path_type=Path), help="Configuration file (controller.conf).")
@settings_option
def controller(path: Path | None, settings: tuple[str, ...]) -> None:
    """Run a controller: it elects the masters of broker sets, of neve's and of Apache RocketMQ's."""

    def start() -> Awaitable[int]:
        loaded = read(ControllerConfig, path, settings)
        check_port(loaded.config.bind_address, loaded.config.port)
        check_port("127.0.0.1", max(loaded.config.admin_port, 0), "adminPort")
        return _run(loaded)

    run_and_exit(start)


def made(config: ControllerConfig) -> "ControllerManager":
    """Return a controller of this process, not started yet; `neve up` uses it as well. Raises StartupError."""
    from controller.controller_manager import ControllerManager
    from controller.registers import register_of
    from infra.clock import SystemClock
    from infra.disk.filesystem import RealDisk

    disk = RealDisk()
    return ControllerManager(config, SystemClock(), disk, *register_of(config, disk))


async def _run(loaded: LoadedConfig[ControllerConfig]) -> int:
    from infra.observe import log as logs

    config = loaded.config
    logs.configure(config.log_level, loaded.warnings)
    server = made(config)
    stopped = asyncio.Event()
    catch_signals(stopped.set)
    await server.start()
    admin = {} if server.admin_address is None else {"admin": "{}:{}".format(*server.admin_address)}
    announce({"controller": f"{config.bind_address}:{server.port}", **admin})
    await stopped.wait()
    await server.shutdown()
    return 0
