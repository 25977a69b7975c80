"""RocketMQ property files with types and ranges: a wrong line is an error that names it, never a silent default.

A field `listen_port` is the key `listenPort`; its default gives the type, its metadata the range.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar, get_type_hints

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000

_SIZES = {"": 1, "k": KIB, "kib": KIB, "m": MIB, "mib": MIB, "g": GIB, "gib": GIB}
_TIMES = {"": 1, "ms": 1, "s": SECOND, "m": MINUTE, "min": MINUTE, "h": HOUR, "d": DAY}
_NUMBER_AND_UNIT = re.compile(r"(-?\d+)\s*([A-Za-z]*)")


class ConfigError(Exception):
    """A key or value that the file's author must correct; the text says where and what is allowed."""


def key(default: Any, *, low: int | None = None, high: int | None = None, choices: tuple[str, ...] = (),
        unit: str = "", live: bool = False, name: str = "", alias: str = "", secret: bool = False) -> Any:  # fmt: skip
    """A field of a configuration class; `live` keys may be changed on a running broker (request 25)."""
    metadata = {"low": low, "high": high, "choices": choices, "unit": unit, "live": live, "name": name}
    metadata |= {"alias": alias, "secret": secret}
    return field(default=default, metadata=metadata)


@dataclass
class SecurityConfig:
    """TLS, users and policies: the same keys for brokers and name servers. Secrets are never shown (request 26)."""

    tls_server_mode: str = key("permissive", choices=("disabled", "permissive", "enforcing"), alias="tls.server.mode")
    tls_cert_path: str = key("", alias="tls.server.certPath")
    tls_key_path: str = key("", alias="tls.server.keyPath")
    tls_enable: bool = key(False, alias="tls.enable")  # of what this server asks another
    tls_trust_cert_path: str = key("", alias="tls.client.trustCertPath")
    authentication_enabled: bool = key(False)
    authorization_enabled: bool = key(False)
    auth_config_path: str = key("")
    init_authentication_user: str = key("", secret=True)
    inner_client_authentication_credentials: str = key("", secret=True)


@dataclass
class BrokerConfig(SecurityConfig):
    """One broker. Sizes take k, m, g; times are milliseconds or take ms, s, m, h, d."""

    broker_name: str = key("broker-a")
    broker_cluster_name: str = key("DefaultCluster")
    broker_id: int = key(0, low=0, high=0)
    broker_role: str = key("ASYNC_MASTER", choices=("ASYNC_MASTER", "SYNC_MASTER"))
    broker_ip1: str = key("", name="brokerIP1")
    listen_port: int = key(10911, low=0, high=65535)
    bind_address: str = key("0.0.0.0")
    namesrv_addr: str = key("")
    broker_permission: int = key(6, low=0, high=7, live=True)
    auto_create_topic_enable: bool = key(True, live=True)
    auto_create_subscription_group: bool = key(True, live=True)
    default_topic_queue_nums: int = key(8, low=1, high=1024)
    trace_topic_enable: bool = key(False)
    message_delay_level: str = key("1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h")
    long_polling_enable: bool = key(True, live=True)
    register_name_server_period: int = key(30 * SECOND, low=10 * SECOND, high=60 * SECOND, unit="time")
    flush_consumer_offset_interval: int = key(5 * SECOND, low=100, high=10 * MINUTE, unit="time")
    enable_property_filter: bool = key(False, live=True)
    max_pop_polling_size: int = key(100_000, low=1, high=10_000_000, live=True)
    max_message_size: int = key(4 * MIB, low=1 * KIB, high=15 * MIB, unit="size", live=True)
    transaction_check_interval: int = key(30 * SECOND, low=100, high=DAY, unit="time")
    transaction_time_out: int = key(6 * SECOND, low=0, high=DAY, unit="time", live=True)
    transaction_check_max: int = key(15, low=1, high=100_000, live=True)
    reject_transaction_message: bool = key(False, live=True)
    timer_wheel_enable: bool = key(True, live=True)
    timer_max_pending: int = key(1_000_000, low=1, high=100_000_000, live=True)
    max_queues_per_topic: int = key(4096, low=1, high=65535, live=True)
    max_topics: int = key(100_000, low=1, high=10_000_000, live=True)
    max_groups: int = key(100_000, low=1, high=10_000_000, live=True)
    max_client_bytes: int = key(256 * MIB, low=MIB, high=1024 * GIB, unit="size", live=True)
    max_queue_locks: int = key(1_000_000, low=1, high=100_000_000, live=True)
    timer_max_delay_sec: int = key(259_200, low=1, high=31_536_000, live=True)
    recall_message_enable: bool = key(False, live=True)
    store_reply_message_enable: bool = key(True, live=True)
    max_connections: int = key(10_000, low=1, high=1_000_000)
    max_unfinished_bytes: int = key(256 * MIB, low=16 * MIB, high=1024 * GIB, unit="size")
    max_held_pulls: int = key(100_000, low=1, high=10_000_000)

    store_path_root_dir: str = key("~/store")
    mapped_file_size_commit_log: int = key(GIB, low=64 * KIB, high=GIB, unit="size")
    hot_bytes: int = key(2 * GIB, low=0, high=1 << 50, unit="size", live=True)
    flush_disk_type: str = key("ASYNC_FLUSH", choices=("ASYNC_FLUSH", "SYNC_FLUSH"))
    flush_interval_commit_log: int = key(500, low=10, high=60 * SECOND, unit="time", live=True)
    sync_flush_timeout: int = key(5 * SECOND, low=100, high=60 * SECOND, unit="time", live=True)
    file_reserved_time: int = key(72, low=1, high=1_000_000, live=True)
    delete_when: str = key("04")
    disk_max_used_space_ratio: int = key(75, low=10, high=95, live=True)
    disk_space_clean_forcibly_ratio: int = key(85, low=30, high=99, live=True)
    clean_file_forcibly_enable: bool = key(True, live=True)
    disk_space_warning_level_ratio: int = key(90, low=35, high=99, live=True)

    store_url: str = key("")
    archive_min_bytes: int = key(8 * MIB, low=1, high=GIB, unit="size", live=True)
    archive_max_age: int = key(HOUR, low=SECOND, high=30 * DAY, unit="time", live=True)
    archive_upload_bytes_per_second: int = key(0, low=0, high=1024 * GIB, unit="size", live=True)
    archive_period: int = key(10 * SECOND, low=SECOND, high=DAY, unit="time")
    tiered_storage_level: str = key("NOT_IN_DISK", choices=("DISABLE", "NOT_IN_DISK", "NOT_IN_MEM", "FORCE"), live=True)
    state_period: int = key(10 * SECOND, low=100, high=DAY, unit="time")
    journal_checkpoint_entries: int = key(256, low=2, high=1_000_000)
    cold_cache_bytes: int = key(256 * MIB, low=MIB, high=1024 * GIB, unit="size")
    cold_cache_disk_bytes: int = key(GIB, low=0, high=1 << 50, unit="size")
    # Below the 30 s that a stock push consumer waits for its pull: it hears why, and comes back.
    cold_read_timeout: int = key(20 * SECOND, low=10, high=HOUR, unit="time", live=True)
    cold_fetch_bytes: int = key(64 * MIB, low=MIB, high=16 * GIB, unit="size")
    expire_grace: int = key(DAY, low=0, high=365 * DAY, unit="time")
    default_ttl_hours: int = key(-1, low=-1, high=1_000_000_000)

    admin_port: int = key(10913, low=-1, high=65535)
    metrics_max_series: int = key(1_000, low=0, high=100_000, live=True)
    log_level: str = key("INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))

    @property
    def root(self) -> Path:
        return Path(self.store_path_root_dir).expanduser()

    @property
    def name_servers(self) -> list[str]:
        return [part.strip() for part in re.split(r"[;,]", self.namesrv_addr) if part.strip()]

    @property
    def delete_hours(self) -> frozenset[int]:
        """Hours of the day out of `deleteWhen`: `04`, or several with `;`. Raises ConfigError."""
        hours = [part.strip() for part in self.delete_when.split(";") if part.strip()]
        if not all(hour.isdecimal() and int(hour) < 24 for hour in hours):
            raise ConfigError(f"deleteWhen: {self.delete_when!r} is no hour of the day (00 to 23; several with ;)")
        return frozenset(map(int, hours))

    @property
    def sync_flush(self) -> bool:
        return self.flush_disk_type == "SYNC_FLUSH"

    @classmethod
    def load(cls, path: Path | None = None, overrides: Iterable[str] = ()) -> Self:
        return load(cls, path, overrides)


C = TypeVar("C")


def load(cls: type[C], path: Path | None, overrides: Iterable[str] = ()) -> C:
    """Defaults, then the file, then `key=value` overrides; every value checked."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            text = path.read_text("utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from error
        for where, name, raw in parse_properties(text, str(path)):
            values.update(_checked(cls, name, raw, where))
    for item in overrides:
        name, separator, raw = item.partition("=")
        if not separator:
            raise ConfigError(f"--set {item}: expected key=value")
        values.update(_checked(cls, name.strip(), raw.strip(), f"--set {item}"))
    return cls(**values)


def parse_properties(text: str, source: str) -> Iterable[tuple[str, str, str]]:
    """(where, key, value) of each line of a Java properties text; comments and blank lines left out."""
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped[0] in "#!":
            continue
        name, separator, raw = stripped.partition("=")
        if not separator:
            raise ConfigError(f"{source}:{number}: {stripped!r} is not key=value")
        yield f"{source}:{number}", name.strip(), raw.strip()


def update_live(config: object, changes: Mapping[str, str]) -> None:
    """Change a running configuration: all of the changes or, when one is not allowed, none."""
    values: dict[str, Any] = {}
    known = _fields(type(config))
    for given, raw in changes.items():
        name = _own_name(known, given)
        if name in known and not known[name].metadata.get("live", False):
            raise ConfigError(f"{name}: can't be changed on a running broker")
        values.update(_checked(type(config), name, raw, "update"))
    for attribute, value in values.items():
        setattr(config, attribute, value)


def live_keys(config: object) -> list[str]:
    return [name for name, item in _fields(type(config)).items() if item.metadata.get("live", False)]


def to_properties(config: object) -> str:
    """The text of request 26: every key with its value in force."""
    lines = []
    for name, item in sorted(_fields(type(config)).items()):
        if item.metadata.get("secret", False):
            continue
        value = getattr(config, item.name)
        lines.append(f"{name}={str(value).lower() if isinstance(value, bool) else value}")
    return "\n".join(lines) + "\n"


def wire_name(attribute: str) -> str:
    head, *rest = attribute.split("_")
    return head + "".join(part.capitalize() for part in rest)


def _fields(cls: type[Any]) -> dict[str, "dataclasses.Field[Any]"]:
    return {item.metadata.get("name") or wire_name(item.name): item for item in dataclasses.fields(cls)}


def _own_name(known: Mapping[str, "dataclasses.Field[Any]"], name: str) -> str:
    """RocketMQ sets some of these keys under dotted names, as system properties."""
    return next((own for own, item in known.items() if name and item.metadata.get("alias") == name), name)


def _checked(cls: type[Any], name: str, raw: str, where: str) -> dict[str, Any]:
    known = _fields(cls)
    name = _own_name(known, name)
    if name not in known:
        near = [candidate for candidate in known if candidate.lower() == name.lower()]
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{where}: unknown key {name}{hint}")
    item = known[name]
    kind = get_type_hints(cls)[item.name]
    try:
        value = _parse(kind, raw, item.metadata)
    except ValueError as error:
        raise ConfigError(f"{where}: {name}={raw}: {error}") from error
    return {item.name: value}


def _parse(kind: Any, raw: str, rules: Mapping[str, Any]) -> Any:
    if kind is bool:
        if raw.lower() not in ("true", "false"):
            raise ValueError("allowed: true, false")
        return raw.lower() == "true"
    if kind is not int:
        choices = rules.get("choices") or ()
        if choices and raw not in choices:
            raise ValueError(f"allowed: {', '.join(choices)}")
        return raw
    low, high = rules.get("low"), rules.get("high")
    allowed = f"allowed: a whole number from {low} to {high}" if low is not None else "allowed: a whole number"
    match = _NUMBER_AND_UNIT.fullmatch(raw)
    units = {"size": _SIZES, "time": _TIMES}.get(rules.get("unit", ""), {"": 1})
    if match is None or match[2].lower() not in units:
        raise ValueError(allowed)
    value = int(match[1]) * units[match[2].lower()]
    if (low is not None and value < low) or (high is not None and value > high):
        raise ValueError(allowed)
    return value
