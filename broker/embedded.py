"""The name server and the controller in `neve up`'s process: no broker imports them, they are found by their names.

Both listen on 127.0.0.1, with the first users and the certificates of the broker's configuration. A name server beside
one broker has its file of users and policies; beside a broker set, whose users are in its log, each server has its own.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

from access.config import SecurityConfig
from broker.config import BrokerConfig
from infra.clock import SystemClock
from infra.disk.filesystem import RealDisk
from infra.process.startup import EXIT_IN_USE, StartupError, check_port
from neve.entropy import system_entropy

HERE = "127.0.0.1"


async def start_name_server(config: BrokerConfig, path: Path, port: int, *, of_a_set: bool = False) -> Any:
    """Its own settings are in `path`; the broker is told where it listens. Raises StartupError."""
    check_port(HERE, port, "name server port")
    if not of_a_set:
        _share_users(config)
    settings = importlib.import_module("namesrv.namesrv_config").NamesrvConfig(
        listen_port=port, bind_address=HERE, kv_config_path=str(path), **_shared_security(config)
    )
    disk = RealDisk()
    disk.make_dirs(path.parent)
    server = importlib.import_module("namesrv.namesrv_controller").NamesrvController(settings, SystemClock(), disk)
    await _start(server, "name server", port)
    config.namesrv_addr = f"{HERE}:{server.port}"
    return server


async def start_controller(config: BrokerConfig, directory: Path, port: int) -> Any:
    """One, whose register is a file in `directory`. Raises StartupError."""
    check_port(HERE, port, "controller port")
    settings = importlib.import_module("controller.controller_config").ControllerConfig(
        listen_port=port, bind_address=HERE, controller_store_path=str(directory), **_shared_security(config)
    )
    server = importlib.import_module("controller.command").made(settings)
    await _start(server, "controller", port)
    config.controller_addr = f"{HERE}:{server.port}"
    return server


async def _start(server: Any, what: str, port: int) -> None:
    try:
        await server.start()
    except OSError as error:
        raise StartupError(f"{what} port {port}: {error.strerror or error}", EXIT_IN_USE) from error


def _share_users(config: BrokerConfig) -> None:
    """One file of users and policies for both; the broker may always speak to its own name server."""
    if config.authentication_enabled:
        config.auth_config_path = config.auth_config_path or str(config.root / "config" / "auth" / "auth.json")
        if not config.inner_client_authentication_credentials:
            inner = {"accessKey": "neve.inner", "secretKey": system_entropy(32).hex()}
            config.inner_client_authentication_credentials = json.dumps(inner)


def share_certificates(config: BrokerConfig) -> None:
    """Where the servers take nothing but TLS they ask each other so, and trust their own certificate."""
    if config.tls_server_mode == "enforcing":
        config.tls_enable = True
        config.tls_trust_cert_path = config.tls_trust_cert_path or config.tls_cert_path


def _shared_security(config: BrokerConfig) -> dict[str, Any]:
    share_certificates(config)
    names = {item.name for item in dataclasses.fields(SecurityConfig)}
    return {"cluster_name": config.broker_cluster_name, **{name: getattr(config, name) for name in names}}
