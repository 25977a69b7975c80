"""Configuration of a controller."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from access.config import SecurityConfig
from infra.config import rocketmq_keys
from infra.config.properties import GIB, MIB, SECOND, ConfigError, key


class Peer(NamedTuple):
    """One controller as in `controllerDLegerPeers`: `n0-host:port`."""

    id: str
    host: str
    port: int


@dataclass
class ControllerConfig(SecurityConfig):
    """Configuration of one controller, with RocketMQ's key names."""

    rocketmq_classes: ClassVar[tuple[str, ...]] = rocketmq_keys.CONTROLLER

    listen_port: int = key(9878, low=0, high=65535)
    bind_address: str = key("0.0.0.0")
    controller_dleger_group: str = key("neve", name="controllerDLegerGroup")
    controller_dleger_peers: str = key("", name="controllerDLegerPeers")
    controller_dleger_self_id: str = key("n0", name="controllerDLegerSelfId")
    controller_type: str = key("DLedger", choices=("DLedger",))  # it does not serve the requests of JRaft controllers
    controller_store_path: str = key("~/controller")
    register_url: str = key("")
    etcd_user: str = key("")
    etcd_password: str = key("", secret=True)
    etcd_tls_enable: bool = key(False)
    etcd_tls_trust_cert_path: str = key("")
    etcd_tls_cert_path: str = key("")
    etcd_tls_key_path: str = key("")
    scan_not_active_broker_interval: int = key(1 * SECOND, low=100, high=600 * SECOND, unit="time")
    enable_elect_unclean_master: bool = key(False, live=True)
    notify_broker_role_changed: bool = key(True, live=True)
    cluster_name: str = key("DefaultCluster")  # the cluster that `Cluster:` in policies refers to
    max_members: int = key(16, low=1, high=1000, live=True)
    max_connections: int = key(10_000, low=1, high=1_000_000)
    max_unfinished_bytes: int = key(64 * MIB, low=16 * MIB, high=1024 * GIB, unit="size")
    admin_port: int = key(-1, low=-1, high=65535)
    log_level: str = key("INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"), live=True)

    @property
    def directory(self) -> Path:
        return Path(self.controller_store_path).expanduser()

    @property
    def register_path(self) -> Path:
        return self.directory / "register.json"

    @property
    def auth_path(self) -> Path:
        return self.directory / "auth" / "auth.json"

    @property
    def peers(self) -> tuple[Peer, ...]:
        """All controllers of `controllerDLegerPeers`. Raises ConfigError for several without a shared register."""
        parts = [part.strip() for part in self.controller_dleger_peers.split(";") if part.strip()]
        found = tuple(self._peer(part) for part in parts)
        if len(found) > 1 and not self.register_url:
            raise ConfigError(
                f"controllerDLegerPeers={self.controller_dleger_peers}: one controller keeps the register in its file; "
                "several would each elect a master of their own. With registerUrl=etcd://... they share one"
            )
        if found and [peer.id for peer in found].count(self.controller_dleger_self_id) != 1:
            raise self._no_peers()
        return found

    @property
    def peer(self) -> Peer | None:
        """This controller's entry in `controllerDLegerPeers`; None if there is none."""
        return next((peer for peer in self.peers if peer.id == self.controller_dleger_self_id), None)

    def _peer(self, part: str) -> Peer:
        peer_id, _, address = part.partition("-")
        host, _, port = address.rpartition(":")
        if not peer_id or not host or "," in host or not port.isdigit():
            raise self._no_peers()
        return Peer(peer_id, host, int(port))

    def _no_peers(self) -> ConfigError:
        own = f"{self.controller_dleger_self_id}-host:port"
        return ConfigError(
            f"controllerDLegerPeers={self.controller_dleger_peers}: expected {own}, of controllerDLegerSelfId; "
            "separate several with ;"
        )

    @property
    def port(self) -> int:
        """The port to listen on: that of `peer`, else `listenPort`."""
        return self.peer.port if self.peer is not None else self.listen_port
