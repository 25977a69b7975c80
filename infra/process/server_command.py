"""The common parts of the commands that run a server: `--set`, exit codes, signals, the ready line."""

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

# The longest time in seconds that another Python thread delays the event loop when it returns from the kernel. Threads
# encode tables beside the loop, and the loop returns three times or more for one send: Python's default of 5 ms would
# add up to dozens of milliseconds. The CPU time of a send is the same with any value.
_SWITCH_S = 0.0001

settings_option = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="A key of the configuration file; may be repeated."
)


def run_and_exit(start: Callable[[], Awaitable[int]]) -> NoReturn:
    """Run `start` on an event loop and exit; a failed start is one line on standard error and an exit code."""
    _raise_file_limit()
    sys.setswitchinterval(_SWITCH_S)
    try:
        check_installation()
        import uvloop  # noqa: PLC0415 - after the check, whose error is clearer if it is missing

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
    """End the process now: a normal exit would wait for threads that hang in a disk or a store."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _raise_file_limit() -> None:
    """Raise the soft limit, usually 1024 for programs with select(): every queue and connection is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def catch_signals(stop: Callable[[], None]) -> None:
    """Stop cleanly at the first signal; exit immediately at the second."""
    loop = asyncio.get_running_loop()

    def first(number: int) -> None:
        log.info("stopping on signal %d", number)
        loop.add_signal_handler(number, os._exit, 128 + number)
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, first, number)


def announce(ready: Mapping[str, Any]) -> None:
    """Print the ready line on standard output, and notify systemd (Type=notify)."""
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
