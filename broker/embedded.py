"""Name server and controller in the process of `neve up`. No broker imports them, so they are imported by name.

Both listen on 127.0.0.1, with the first users and the certificates of the broker's configuration. A name server next to
a single broker shares its file of users and policies. A broker set has its users in its log, so that each server there
has its own file.
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
    """Start a name server with settings in `path`, and enter its address in `config`. Raise StartupError."""
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
    """Start a controller whose state is a file in `directory`. Raise StartupError."""
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
    """Let both servers use one file of users and policies, and let the broker authenticate at its own name server."""
    if config.authentication_enabled:
        config.auth_config_path = config.auth_config_path or str(config.root / "config" / "auth" / "auth.json")
        if not config.inner_client_authentication_credentials:
            inner = {"accessKey": "neve.inner", "secretKey": system_entropy(32).hex()}
            config.inner_client_authentication_credentials = json.dumps(inner)


def share_certificates(config: BrokerConfig) -> None:
    """If servers accept TLS only, let them use TLS between each other and trust their own certificate."""
    if config.tls_server_mode == "enforcing":
        config.tls_enable = True
        config.tls_trust_cert_path = config.tls_trust_cert_path or config.tls_cert_path


def _shared_security(config: BrokerConfig) -> dict[str, Any]:
    share_certificates(config)
    names = {item.name for item in dataclasses.fields(SecurityConfig)}
    return {"cluster_name": config.broker_cluster_name, **{name: getattr(config, name) for name in names}}
