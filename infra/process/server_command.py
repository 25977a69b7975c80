"""What the commands that run a server share: their `--set`, their exit codes, their way to stop."""

import asyncio
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn

import click

from infra.config.properties import ConfigError
from infra.process import collector
from infra.process.startup import EXIT_CONFIG, EXIT_FAILED, StartupError, check_installation

log = logging.getLogger("neve")

# How long a thread in Python may keep the loop waiting, each time that the loop comes back from the kernel: tables are
# encoded and counted beside it, and a send comes back three times and more. Python's own 5 ms add up to dozens, half a
# millisecond to two; plain sends cost the same CPU time with any.
_SWITCH_S = 0.0001

settings_option = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="A key of the configuration file; may be repeated."
)


def run_and_exit(start: Callable[[], Awaitable[int]]) -> NoReturn:
    """The one place that turns a refusal into a line and an exit code; `start` is called on the running loop."""
    _raise_file_limit()
    sys.setswitchinterval(_SWITCH_S)
    try:
        check_installation()
        import uvloop  # noqa: PLC0415 - after the check, which says it better when something is missing

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


def leave(code: int) -> NoReturn:
    """End the process now: a thread that hangs in a disk or a store would be waited for."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _raise_file_limit() -> None:
    """Each queue and each connection is an open file; the usual soft limit, 1024, is for programs with select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def catch_signals(stop: Callable[[], None]) -> None:
    """The first signal asks for a clean stop, the second ends at once."""
    loop = asyncio.get_running_loop()

    def first(number: int) -> None:
        log.info("stopping on signal %d", number)
        loop.add_signal_handler(number, os._exit, 128 + number)
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, first, number)


def announce(ready: Mapping[str, Any]) -> None:
    """The one line on stdout by which a server says that it serves; systemd (Type=notify) hears it as well."""
    collector.settle()
    click.echo(json.dumps({**ready, "pids": [os.getpid()]}))
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
        try:
            notify.sendto(b"READY=1", "\0" + address[1:] if address.startswith("@") else address)
        except OSError as error:
            log.warning("NOTIFY_SOCKET %s: %s", address, error)
