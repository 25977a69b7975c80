"""What a namesrv.conf names, looked at before a start: `neve doctor -c FILE` loads this module by its name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from access.server_checks import check_free_port, check_keys, check_tls, check_users
from infra.clock import Clock, SystemClock
from infra.config.properties import ConfigError, read
from namesrv.namesrv_config import NamesrvConfig
from neve.cli.checks import FAIL, OK, WARN, Check, check_directory


def keys(path: Path, settings: Sequence[str]) -> Iterator[Check]:
    """What becomes of each key of the file."""
    return check_keys(NamesrvConfig, path, settings)


def checks(path: Path, settings: Sequence[str], clock: Clock | None = None) -> Iterator[Check]:
    """Of a file and `key=value` overrides, as `neve namesrv` takes them."""
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
        port = check_free_port("listenPort", config.bind_address, config.listen_port, running=False)
        mine = f"{port.found}; it is this one's if it runs already"
        yield port if port.state == OK else Check(port.check, WARN, mine)
    if config.admin_port > 0:
        admin = check_free_port("adminPort", "127.0.0.1", config.admin_port, running=False)
        mine = f"{admin.found}; it is this one's if it runs already"
        yield admin if admin.state == OK else Check(admin.check, WARN, mine)
    yield from check_tls(config, clock or SystemClock())
