"""Checks of a broker.conf before a start: `neve doctor -c FILE` imports this module by name.

Nothing is changed, except that a file in the data directory and an object in the store are created and deleted again.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from access.server_checks import check_free_port, check_keys, check_tls, check_users
from broker import doctor_of_set, rocketmqs_store
from broker.archiving.archivable_limit import DivergenceFile
from broker.config import BrokerConfig
from infra.clock import Clock, SystemClock
from infra.config.properties import ConfigError, read
from infra.disk.filesystem import DiskLocked, RealDisk
from infra.objects.doctor import check_store
from infra.objects.store import BadStoreUrl
from infra.process.startup import StartupError
from neve.cli.checks import FAIL, OK, WARN, Check, check_directory, nearest
from neve.remoting.address import parse_address

_NAME_SERVER_S = 3.0
_VIP_OFFSET = 2
_LOG_FILES = 2  # the current one and the next: a start needs space for both


def keys(path: Path, settings: Sequence[str]) -> Iterator[Check]:
    """Yield how each key of the file is used."""
    return check_keys(BrokerConfig, path, settings)


def checks(path: Path, settings: Sequence[str], clock: Clock | None = None) -> Iterator[Check]:
    """Yield the checks of a file and `key=value` overrides, as `neve broker` takes them."""
    try:
        loaded = read(BrokerConfig, path, settings)
    except ConfigError as error:
        yield from (Check("configuration", FAIL, fault) for fault in error.faults)
        return
    config = loaded.config
    yield Check("configuration", OK, f"{path}: {config.broker_name} of {config.broker_cluster_name}")
    yield from (Check("no effect", WARN, text) for text in loaded.warnings)
    yield from _check_pairs(config)
    yield from check_users(config, path, config.root / "config" / "auth" / "auth.json")
    running = _is_running(config.root)
    foreign = rocketmqs_store.refusal(RealDisk(), config.root)
    yield Check("data directory", FAIL, foreign) if foreign else check_directory("data directory", config.root)
    yield from _check_room(config)
    yield from _check_ports(config, running=running)
    yield from check_tls(config, clock or SystemClock())
    yield from _check_name_servers(config)
    if config.replication != "none":
        yield from doctor_of_set.checks(config, clock or SystemClock())
    yield from _check_archive(config)
    yield from _check_divergence(config)


def _check_pairs(config: BrokerConfig) -> Iterator[Check]:
    """Check combinations of values that are valid alone."""
    if config.disk_max_used_space_ratio >= config.disk_space_warning_level_ratio:
        text = "diskMaxUsedSpaceRatio is not below diskSpaceWarningLevelRatio: writes stop before segments are evicted"
        yield Check("disk thresholds", WARN, text)
    if config.listen_port and config.admin_port in (config.listen_port, config.listen_port - _VIP_OFFSET):
        yield Check(
            "ports", FAIL, f"adminPort={config.admin_port} is listenPort or two below it, which the broker takes"
        )


def _is_running(root: Path) -> bool:
    """Return whether a broker is running on the data directory."""
    lock = root / "lock"
    if not lock.exists():
        return False
    try:
        RealDisk().lock(lock)()
    except DiskLocked:
        return True
    except OSError:
        return False  # not accessible: the check of the directory reports it
    return False


def _check_room(config: BrokerConfig) -> Iterator[Check]:
    disk, existing = RealDisk(), nearest(config.root)
    room = disk.room(existing)
    free, used = room.available, room.used_ratio
    early, refuse = config.disk_max_used_space_ratio, config.disk_space_warning_level_ratio
    state = FAIL if used > refuse / 100 else WARN if used > early / 100 else OK
    marks = f"segments are evicted early from {early} % on, writes are refused from {refuse} % on"
    text = f"{used:.1%} of {existing} used, {free / 2**30:.1f} GiB free; {marks}"
    yield Check("disk", state, text)
    needed = _LOG_FILES * config.mapped_file_size_commit_log
    if free < needed and not (config.root / "commitlog").exists():
        text = f"{free >> 20} MiB free, {needed >> 20} MiB needed; set mappedFileSizeCommitLog smaller"
        yield Check("room for the log", FAIL, text)


def _check_ports(config: BrokerConfig, *, running: bool) -> Iterator[Check]:
    """Check the ports. A used port is a fault, unless a broker runs on the data directory and has opened it."""
    listen, bind = config.listen_port, config.bind_address
    if listen:
        yield check_free_port("listenPort", bind, listen, running=running)
        vip = check_free_port("listenPort - 2", bind, listen - _VIP_OFFSET, running=running)
        yield vip if vip.state == OK else Check(vip.check, WARN, f"{vip.found}; only old clients use it")
    if config.admin_port > 0:
        yield check_free_port("adminPort", "127.0.0.1", config.admin_port, running=running)
    if config.replication != "none" and config.ha_port:
        yield check_free_port("haListenPort", bind, config.ha_port, running=running)
    if config.metrics_exporter_type == "PROM" and config.metrics_prom_exporter_port:
        host = config.metrics_prom_exporter_host or config.broker_ip1 or bind
        yield check_free_port("metricsPromExporterPort", host, config.metrics_prom_exporter_port, running=running)


def _check_name_servers(config: BrokerConfig) -> Iterator[Check]:
    if not config.name_servers:
        yield Check("name server", WARN, "namesrvAddr is empty: clients find no route to this broker")
    for address in config.name_servers:
        try:
            with contextlib.closing(socket.create_connection(parse_address(address), _NAME_SERVER_S)):
                yield Check("name server", OK, address)
        except ValueError:
            yield Check("name server", FAIL, f"namesrvAddr: {address!r} is not HOST:PORT")
        except OSError as error:
            yield Check("name server", WARN, f"{address}: {error.strerror or error}")


def _check_archive(config: BrokerConfig) -> Iterator[Check]:
    url = config.store_url
    if not url:
        text = (
            f"storeUrl is empty: messages older than {config.file_reserved_time} hours (fileReservedTime) are deleted"
        )
        yield Check("store", WARN, text)
        return
    try:
        yield from check_store(url)
    except BadStoreUrl as error:
        yield Check("store", FAIL, f"storeUrl: {error}")


def _check_divergence(config: BrokerConfig) -> Iterator[Check]:
    """Check whether the slave of an Apache master has stopped archiving."""
    try:
        divergence = DivergenceFile(RealDisk(), config.root / "archive").load()
    except StartupError as error:
        yield Check("archive", FAIL, str(error))
        return
    if divergence is not None:
        yield Check("archive", FAIL, f"archiving has stopped: {divergence.text}")
