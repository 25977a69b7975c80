"""`neve namesrv`."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import click

from infra.config import ConfigError, load
from infra.startup import EXIT_CONFIG, EXIT_FAILED, StartupError, check_installation, check_port
from namesrv.namesrv_config import NamesrvConfig


@click.command()
@click.option("-c", "--config", "path", type=click.Path(path_type=Path), help="Configuration file (namesrv.conf).")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A key of the configuration file.")
def namesrv(path: Path | None, settings: tuple[str, ...]) -> None:
    """Run a name server."""
    try:
        check_installation()
        config = load(NamesrvConfig, path, settings)
        check_port(config.bind_address, config.listen_port)
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(config))
        code = 0
    except ConfigError as error:
        click.echo(f"neve: {error}", err=True)
        code = EXIT_CONFIG
    except StartupError as error:
        click.echo(f"neve: {error}", err=True)
        code = error.exit_code
    except OSError as error:
        click.echo(f"neve: {error}", err=True)
        code = EXIT_FAILED
    sys.exit(code)


async def _run(config: NamesrvConfig) -> None:
    from infra import log as logs
    from infra.clock import SystemClock
    from infra.disk import RealDisk
    from namesrv.namesrv_controller import NamesrvController

    logs.configure(config.log_level)
    disk = RealDisk()
    disk.make_dirs(config.kv_path.parent)
    server = NamesrvController(config, SystemClock(), disk)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await server.start()
    click.echo(json.dumps({"namesrv": f"{config.bind_address}:{server.port}", "pids": [os.getpid()]}))
    await stopped.wait()
    await server.shutdown()
