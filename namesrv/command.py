"""`neve namesrv`."""

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from pathlib import Path

import click

from controller.controller_config import ControllerConfig
from infra.config.properties import LoadedConfig, read
from infra.process.server_command import announce, catch_signals, run_and_exit, settings_option
from infra.process.startup import check_port
from namesrv.namesrv_config import NamesrvConfig


@click.command()
@click.option("-c", "--config", "path", type=click.Path(path_type=Path), help="Configuration file (namesrv.conf).")
@click.option(
    "--controller",
    "beside",
    type=click.Path(path_type=Path),
    help="Run the controller of this controller.conf as well.",
)
@settings_option
def namesrv(path: Path | None, beside: Path | None, settings: tuple[str, ...]) -> None:
    """Run a name server; with --controller also a controller, in the same process."""

    def start() -> Awaitable[int]:
        loaded = read(NamesrvConfig, path, settings)
        check_port(loaded.config.bind_address, loaded.config.listen_port)
        check_port("127.0.0.1", max(loaded.config.admin_port, 0), "adminPort")
        controller = None if beside is None else read(ControllerConfig, beside)
        if controller is not None:
            check_port(controller.config.bind_address, controller.config.port)
            check_port("127.0.0.1", max(controller.config.admin_port, 0), "the controller's adminPort")
        return _run(loaded, controller)

    run_and_exit(start)


async def _run(loaded: LoadedConfig[NamesrvConfig], beside: LoadedConfig[ControllerConfig] | None) -> int:
    from infra.clock import SystemClock
    from infra.disk.filesystem import RealDisk
    from infra.observe import log as logs
    from namesrv.namesrv_controller import NamesrvController

    config = loaded.config
    logs.configure(config.log_level, [*loaded.warnings, *(beside.warnings if beside is not None else ())])
    disk = RealDisk()
    disk.make_dirs(config.kv_path.parent)
    server = NamesrvController(config, SystemClock(), disk)
    stopped = asyncio.Event()
    catch_signals(stopped.set)
    async with AsyncExitStack() as stack:  # an error of one server stops the other one cleanly
        addresses = {}
        if beside is not None:
            from controller.command import made  # a name server alone does not load it

            controller = made(beside.config)
            await controller.start()
            stack.push_async_callback(controller.shutdown)
            addresses["controller"] = f"{beside.config.bind_address}:{controller.port}"
            if controller.admin_address is not None:
                addresses["controllerAdmin"] = "{}:{}".format(*controller.admin_address)
        await server.start()
        stack.push_async_callback(server.shutdown)
        if server.admin_address is not None:
            addresses["admin"] = "{}:{}".format(*server.admin_address)
        announce({"namesrv": f"{config.bind_address}:{server.port}", **addresses})
        await stopped.wait()
    return 0
