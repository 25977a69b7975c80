"""Checks of a controller.conf before a start: `neve doctor -c FILE` loads this module by its name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

from access.server_checks import check_free_port, check_keys, check_tls, check_users
from controller.controller_config import ControllerConfig
from controller.register import RegisterUnavailable
from controller.registers import register_of
from infra.clock import Clock, SystemClock
from infra.config.properties import ConfigError, read
from infra.disk.filesystem import RealDisk
from infra.process.startup import StartupError
from neve.cli.checks import FAIL, OK, WARN, Check, check_directory


def keys(path: Path, settings: Sequence[str]) -> Iterator[Check]:
    """Yield the checks of the file's keys."""
    return check_keys(ControllerConfig, path, settings)


def checks(path: Path, settings: Sequence[str], clock: Clock | None = None) -> Iterator[Check]:
    """Yield the checks of a file and its `key=value` overrides, with the arguments of `neve controller`."""
    try:
        loaded = read(ControllerConfig, path, settings)
        port = loaded.config.port
    except ConfigError as error:
        yield from (Check("configuration", FAIL, fault) for fault in error.faults)
        return
    config = loaded.config
    yield Check("configuration", OK, f"{path}: a controller")
    yield from (Check("no effect", WARN, text) for text in loaded.warnings)
    yield from check_users(config, path, config.auth_path)
    yield check_directory("directory", config.directory)
    if config.register_url:
        yield _check_etcd(config)
    if port:
        found = check_free_port("listenPort", config.bind_address, port, running=False)
        mine = f"{found.found}; ignore this if this controller runs"
        yield found if found.state == OK else Check(found.check, WARN, mine)
    if config.admin_port > 0:
        admin = check_free_port("adminPort", "127.0.0.1", config.admin_port, running=False)
        mine = f"{admin.found}; ignore this if this controller runs"
        yield admin if admin.state == OK else Check(admin.check, WARN, mine)
    yield from check_tls(config, clock or SystemClock())


def _check_etcd(config: ControllerConfig) -> Check:
    """Check whether etcd answers and accepts the user."""

    async def ask() -> int:
        register, _ = register_of(config, RealDisk())
        try:
            await register.open()
            return len(await register.all())
        finally:
            await register.close()

    try:
        return Check("registerUrl", OK, f"{config.register_url} has {asyncio.run(ask())} broker sets")
    except (StartupError, RegisterUnavailable) as error:
        return Check("registerUrl", FAIL, str(error))
