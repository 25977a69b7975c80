"""`neve broker` and `neve up`."""

import asyncio
import dataclasses
import importlib
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click

from infra.config import BrokerConfig, ConfigError, SecurityConfig
from infra.startup import EXIT_CONFIG, EXIT_FAILED, EXIT_IN_USE, StartupError, check_installation, check_port

log = logging.getLogger("neve")

Set = click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A key of the configuration file.")


@click.command()
@click.option("-c", "--config", "path", type=click.Path(path_type=Path), help="Configuration file (broker.conf).")
@Set
def broker(path: Path | None, settings: tuple[str, ...]) -> None:
    """Run a broker."""
    _exit_with(lambda: _run(BrokerConfig.load(path, settings), None))


@click.command()
@click.option("--data", type=click.Path(path_type=Path), default=Path("neve-data"), show_default=True)
@click.option("--store", default=None, help="Archive store; default: a directory beside the data. '' switches it off.")
@click.option("--namesrv-port", type=click.IntRange(0, 65535), default=9876, show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=10911, show_default=True, help="Broker; 0 takes any.")
@Set
def up(data: Path, store: str | None, namesrv_port: int, port: int, settings: tuple[str, ...]) -> None:
    """Run a name server and a broker in one process; one JSON line says when they are ready."""

    def start() -> Awaitable[int]:
        base = [
            f"storePathRootDir={data.absolute() / 'broker'}",
            f"storeUrl={f'dir:{data.absolute()}/archive' if store is None else store}",
            f"listenPort={port}",
            "brokerIP1=127.0.0.1",
            "bindAddress=127.0.0.1",
            "archiveMaxAge=10m",
            "mappedFileSizeCommitLog=64m",
            f"adminPort={port + 2 if port else 0}",
        ]
        config = BrokerConfig.load(None, [*base, *settings])
        return _run(config, (data.absolute() / "namesrv" / "kvConfig.json", namesrv_port))

    _exit_with(start)


def _exit_with(start: Callable[[], Awaitable[int]]) -> None:
    """The one place that turns a refusal into a line and an exit code."""
    try:
        check_installation()
        import uvloop

        async def main() -> int:
            return await start()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(main())
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


async def _run(config: BrokerConfig, embedded: tuple[Path, int] | None) -> int:
    from broker.broker_controller import BrokerController
    from infra import log as logs
    from infra.clock import SystemClock
    from infra.disk import RealDisk

    logs.configure(config.log_level)
    name_server = await _start_name_server(embedded, config) if embedded is not None else None
    try:
        controller = BrokerController(config, SystemClock(), RealDisk())
        _catch_signals(controller.stop)
        await controller.start()
        ready: dict[str, Any] = {"broker": "{}:{}".format(*controller.context.address)}
        if name_server is not None:
            ready["namesrv"] = f"127.0.0.1:{name_server.port}"
        if controller.admin_address is not None:
            ready["admin"] = "{}:{}".format(*controller.admin_address)
        click.echo(json.dumps({**ready, "pids": [os.getpid()]}))
        await controller.stopped.wait()
        await controller.shutdown()
        return controller.exit_code
    finally:
        if name_server is not None:
            await name_server.shutdown()


async def _start_name_server(embedded: tuple[Path, int], config: BrokerConfig) -> Any:
    """The name server is the broker's sibling: neither imports the other, `up` alone puts them together by name."""
    from infra.clock import SystemClock
    from infra.disk import RealDisk

    path, port = embedded
    check_port("127.0.0.1", port)
    security = _shared_security(config)
    settings = importlib.import_module("namesrv.namesrv_config").NamesrvConfig(
        listen_port=port, bind_address="127.0.0.1", kv_config_path=str(path), **security
    )
    disk = RealDisk()
    disk.make_dirs(path.parent)
    server = importlib.import_module("namesrv.namesrv_controller").NamesrvController(settings, SystemClock(), disk)
    try:
        await server.start()
    except OSError as error:
        raise StartupError(f"name server port {port}: {error.strerror or error}", EXIT_IN_USE) from error
    config.namesrv_addr = f"127.0.0.1:{server.port}"
    return server


def _shared_security(config: BrokerConfig) -> dict[str, Any]:
    """One set of users, policies and certificates for both; the broker may always speak to its own name server."""
    if config.authentication_enabled:
        config.auth_config_path = config.auth_config_path or str(config.root / "config" / "auth" / "auth.json")
        if not config.inner_client_authentication_credentials:
            inner = {"accessKey": "neve.inner", "secretKey": secrets.token_urlsafe(32)}
            config.inner_client_authentication_credentials = json.dumps(inner)
    if config.tls_server_mode == "enforcing":
        config.tls_enable = True
        config.tls_trust_cert_path = config.tls_trust_cert_path or config.tls_cert_path
    names = {item.name for item in dataclasses.fields(SecurityConfig)}
    return {"cluster_name": config.broker_cluster_name, **{name: getattr(config, name) for name in names}}


def _catch_signals(stop: Callable[[], None]) -> None:
    """The first signal asks for a clean stop, the second ends at once."""
    loop = asyncio.get_running_loop()

    def first(number: int) -> None:
        log.info("stopping on signal %d", number)
        loop.add_signal_handler(number, os._exit, 128 + number)
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, first, number)
