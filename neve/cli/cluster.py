"""The connection options of a command: name servers, credentials and TLS.

Secrets come from the environment or from a file, never from the command line, which other users and the shell history
see. The file has the format that `mqadmin` reads, conf/tools.yml:

    accessKey: alice
    secretKey: …
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from neve.cli.contexts import from_context

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from neve.admin import BrokerSets, ClusterAdmin
    from neve.client import AsyncClient

Command = TypeVar("Command", bound=Callable[..., Any])

_META = "neve.cli.cluster"
_LOCAL = "127.0.0.1:9876"
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class ConnectionSecurity(NamedTuple):
    """The credentials and the encryption of connections."""

    credentials: tuple[str, str] | None = None
    tls: ssl.SSLContext | bool = False


def cluster_options(command: Command) -> Command:
    """Add `--namesrv`, which is passed to the command, and the security options, which `connect` uses."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def connect(namesrv: str, **changes: Any) -> AsyncClient:
    """Return a client with the options of the running command; `changes` are fields of `ClientOptions`."""
    from neve.client import connect as open_client

    chosen = security_of_the_command()
    return open_client(namesrv, credentials=chosen.credentials, tls=chosen.tls, **changes)


def administer(namesrv: str, **changes: Any) -> AbstractAsyncContextManager[ClusterAdmin]:
    """Return the administration of a cluster, opened as the options of the running command say."""
    from neve.admin import connect as open_admin

    chosen = security_of_the_command()
    return open_admin(namesrv, credentials=chosen.credentials, tls=chosen.tls, **changes)


def administer_sets(namesrv: str, controllers: str | None) -> AbstractAsyncContextManager[tuple[BrokerSets, list[str]]]:
    """Return the broker sets of a controller, opened as the options of the running command say."""
    from neve.admin import connect_controllers

    chosen = security_of_the_command()
    return connect_controllers(namesrv, controllers, credentials=chosen.credentials, tls=chosen.tls)


def security_of_the_command() -> ConnectionSecurity:
    """Return the credentials and the encryption that the options of the running command describe."""
    return security(_chosen())


def security(chosen: dict[str, Any]) -> ConnectionSecurity:
    """Return credentials and TLS from options and environment.

    Raises:
        click.UsageError: one of a pair of options is missing, or a file cannot be read.
    """
    # imported only by commands that need a client
    from neve.client.security import credentials_in_environment, credentials_in_file, tls_context
    from neve.errors import ClientError

    file: Path | None = chosen.get("credentials")
    trusted, certificate, key = (chosen.get(name) for name in ("tls_ca", "tls_cert", "tls_key"))
    has_tls = chosen.get("tls") or (chosen.get("tls") is None and bool(trusted or certificate))
    if (certificate is None) != (key is None):
        raise click.UsageError("--tls-cert and --tls-key need each other")
    try:
        credentials = credentials_in_environment(environ) if file is None else credentials_in_file(file)
        return ConnectionSecurity(credentials, tls_context(trusted, certificate, key) if has_tls else False)
    except ClientError as error:
        raise click.UsageError(error.remark) from error


def _keep(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    if parameter.name is not None:
        context.meta.setdefault(_META, {})[parameter.name] = value
    return value


def _chosen() -> dict[str, Any]:
    context = click.get_current_context(silent=True)
    found: dict[str, Any] = context.meta.get(_META, {}) if context is not None else {}
    return found


def _kept(name: str, **settings: Any) -> Callable[[Command], Command]:
    return click.option(name, expose_value=False, callback=_keep, **settings)


_OPTIONS: list[Callable[[Any], Any]] = [
    click.option(
        "-n",
        "--namesrv",
        envvar="NAMESRV_ADDR",
        show_envvar=True,
        default=from_context("namesrv", _LOCAL),
        show_default=f"from the context, or {_LOCAL}",
        help="Name servers, host:port[;host:port].",
    ),
    _kept(
        "--credentials",
        type=_FILE,
        envvar="NEVE_CREDENTIALS",
        default=from_context("credentials"),
        metavar="FILE",
        help="Sign requests: file with accessKey and secretKey (or NEVE_ACCESS_KEY, NEVE_SECRET_KEY).",
    ),
    _kept("--tls/--no-tls", default=from_context("tls"), envvar="NEVE_TLS", help="Connect over TLS."),
    _kept(
        "--tls-ca",
        type=_FILE,
        default=from_context("tls_ca"),
        envvar="NEVE_TLS_CA",
        metavar="FILE",
        help="Trust this PEM; implies --tls.",
    ),
    _kept(
        "--tls-cert",
        type=_FILE,
        default=from_context("tls_cert"),
        envvar="NEVE_TLS_CERT",
        metavar="FILE",
        help="Certificate to show; implies --tls.",
    ),
    _kept(
        "--tls-key",
        type=_FILE,
        default=from_context("tls_key"),
        envvar="NEVE_TLS_KEY",
        metavar="FILE",
        help="Private key of the certificate.",
    ),
]
