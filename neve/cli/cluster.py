"""The cluster that a command talks to: its name servers, who signs the requests, and whether over TLS.

Secrets are taken from the environment or from a file, never from the command line: what stands there is seen by
everybody on the machine and stays in the shell's history. The file is the one that `mqadmin` reads, conf/tools.yml:

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
    from neve.client import AsyncClient

Command = TypeVar("Command", bound=Callable[..., Any])

_META = "neve.cli.cluster"
_HERE = "127.0.0.1:9876"
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class Security(NamedTuple):
    """How a connection is signed and encrypted."""

    credentials: tuple[str, str] | None = None
    tls: ssl.SSLContext | bool = False


def cluster_options(command: Command) -> Command:
    """`--namesrv`, handed to the command, and the options of security, kept for `connect`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def connect(namesrv: str, **changes: Any) -> AsyncClient:
    """A client as the running command's options want it; `changes` are fields of `ClientOptions`."""
    from neve.client import connect as open_client

    chosen = security_of_the_command()
    return open_client(namesrv, credentials=chosen.credentials, tls=chosen.tls, **changes)


def security_of_the_command() -> Security:
    """As the running command's options want it."""
    return security(_chosen())


def security(chosen: dict[str, Any]) -> Security:
    """Credentials and TLS from the options and the environment.

    Raises:
        click.UsageError: half of a pair, or a file that is none.
    """
    # Loaded with the client, when a command needs one.
    from neve.client.security import credentials_in_environment, credentials_in_file, tls_context
    from neve.errors import ClientError

    file: Path | None = chosen.get("credentials")
    trusted, certificate, key = (chosen.get(name) for name in ("tls_ca", "tls_cert", "tls_key"))
    has_tls = chosen.get("tls") or (chosen.get("tls") is None and bool(trusted or certificate))
    if (certificate is None) != (key is None):
        raise click.UsageError("--tls-cert and --tls-key go together")
    try:
        credentials = credentials_in_environment(environ) if file is None else credentials_in_file(file)
        return Security(credentials, tls_context(trusted, certificate, key) if has_tls else False)
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
        default=from_context("namesrv", _HERE),
        show_default=f"that of the context, or {_HERE}",
        help="Name server, host:port[;host:port].",
    ),
    _kept(
        "--credentials",
        type=_FILE,
        envvar="NEVE_CREDENTIALS",
        default=from_context("credentials"),
        metavar="FILE",
        help="Sign requests: a file with accessKey and secretKey (or NEVE_ACCESS_KEY, NEVE_SECRET_KEY).",
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
        help="Its private key.",
    ),
]
