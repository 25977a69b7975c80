"""The checks of `neve doctor -c FILE` for the file of any server: users, ports, TLS."""

from __future__ import annotations

import ssl
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from access.config import SecurityConfig
from access.guard import inner_credentials, read_credentials
from infra.clock import Clock
from infra.config.properties import IS_ABSENT, IS_FAULT, IS_IGNORED, ConfigError, verdicts
from infra.net.tls import client_context, server_tls
from infra.process.startup import StartupError, check_port
from neve.cli.checks import FAIL, OK, WARN, Check

_CERTIFICATE_DAYS = 14


_STATES = {IS_FAULT: FAIL, IS_IGNORED: WARN, IS_ABSENT: WARN}


def check_keys(kind: type[Any], path: Path, settings: Sequence[str]) -> Iterator[Check]:
    """Check each key of a file: honoured, without effect or refused. Shows no secret."""
    try:
        found = verdicts(kind, path, settings)
    except ConfigError as error:
        yield Check("configuration", FAIL, str(error))
        return
    for one in found:
        where = f"{one.where}: " if one.where else ""
        yield Check(one.name or "?", _STATES.get(one.state, OK), f"{where}{one.text}")


def check_users(config: SecurityConfig, path: Path, usual: Path) -> Iterator[Check]:
    """Check users; `usual`: the default path of the file of users and policies."""
    if config.authorization_enabled and not config.authentication_enabled:
        yield Check("authorizationEnabled", FAIL, "needs authenticationEnabled")
    first = config.init_authentication_user
    try:
        if first:
            read_credentials(first, "initAuthenticationUser")
        inner_credentials(config)
    except StartupError as error:
        yield Check("users", FAIL, str(error))
    users = Path(config.auth_config_path or usual).expanduser()
    if config.authentication_enabled and not first and not users.exists():
        yield Check("users", FAIL, f"authenticationEnabled without any user: set initAuthenticationUser, or {users}")
    if config.init_authentication_user or config.inner_client_authentication_credentials:
        open_to = stat.S_IMODE(path.stat().st_mode) & 0o077
        found = f"{path} holds secrets and has mode {stat.S_IMODE(path.stat().st_mode):o}"
        yield Check("secrets", WARN if open_to else OK, f"{found}: chmod 600" if open_to else found)


def check_free_port(name: str, host: str, port: int, *, running: bool) -> Check:
    """Check a port; `running`: it belongs to the broker that runs on the data directory."""
    try:
        check_port(host, port, "port")
    except StartupError as error:
        return (
            Check(name, OK, f"{port}, in use by the broker that runs on the data directory")
            if running
            else Check(name, FAIL, str(error))
        )
    except (OSError, OverflowError) as error:
        return Check(name, FAIL, f"{port} on {host}: {error}")
    return Check(name, OK, f"{port} on {host}")


def check_tls(config: SecurityConfig, clock: Clock) -> Iterator[Check]:
    try:
        tls = server_tls(config.tls_server_mode, config.tls_cert_path, config.tls_key_path)
        if tls is not None:
            yield _check_end(tls.certificate.ends_s(), config.tls_cert_path, clock)
    except StartupError as error:
        yield Check("TLS certificate", FAIL, str(error))
    except ssl.SSLCertVerificationError as error:
        yield Check("TLS certificate", FAIL, f"{config.tls_cert_path}: {error.verify_message}")
    except ssl.SSLError as error:
        yield Check("TLS certificate", FAIL, f"{config.tls_cert_path}: {error}")
    if config.tls_enable:
        try:
            client_context(config.tls_trust_cert_path)
        except StartupError as error:
            yield Check("TLS trust", FAIL, str(error))
        else:
            yield Check("TLS trust", OK, config.tls_trust_cert_path or "the system's certificates")


def _check_end(ends_s: float, path: str, clock: Clock) -> Check:
    days = (ends_s - clock.now_ms() / 1000) / 86_400
    state = FAIL if days < 0 else WARN if days < _CERTIFICATE_DAYS else OK
    return Check("TLS certificate", state, f"{path} ends in {days:.0f} days" if days >= 0 else f"{path} has expired")
