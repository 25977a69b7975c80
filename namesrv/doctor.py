"""The checks of `neve doctor -c FILE` for a namesrv.conf, which imports this module by its name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from access.server_checks import check_free_port, check_keys, check_tls, check_users
from infra.clock import Clock, SystemClock
from infra.config.properties import ConfigError, read
from namesrv.namesrv_config import NamesrvConfig
from neve.cli.checks import FAIL, OK, WARN, Check, check_directory


def keys(path: Path, settings: Sequence[str]) -> Iterator[Check]:
    """Check each key of the file."""
    return check_keys(NamesrvConfig, path, settings)


def checks(path: Path, settings: Sequence[str], clock: Clock | None = None) -> Iterator[Check]:
    """Check a file with `key=value` overrides, as `neve namesrv` reads them."""
    try:
        loaded = read(NamesrvConfig, path, settings)
    except ConfigError as error:
        yield from (Check("configuration", FAIL, fault) for fault in error.faults)
        return
    config = loaded.config
    yield Check("configuration", OK, f"{path}: a name server")
    yield from (Check("no effect", WARN, text) for text in loaded.warnings)
    yield from check_users(config, path, config.kv_path.parent / "auth.json")
    yield check_directory("directory", config.kv_path.parent)
    if config.listen_port:
        yield _check_port("listenPort", config.bind_address, config.listen_port)
    if config.admin_port > 0:
        yield _check_port("adminPort", "127.0.0.1", config.admin_port)
    yield from check_tls(config, clock or SystemClock())


def _check_port(name: str, host: str, port: int) -> Check:
    found = check_free_port(name, host, port, running=False)
    return found if found.state == OK else Check(name, WARN, f"{found.found}; ignore this if this name server runs")
