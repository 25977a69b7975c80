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

if TYPE_CHECKING:
    from neve.client import AsyncClient

Command = TypeVar("Command", bound=Callable[..., Any])

ACCESS_KEY_VARIABLE = "NEVE_ACCESS_KEY"
SECRET_KEY_VARIABLE = "NEVE_SECRET_KEY"
_META = "neve.cli.cluster"
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


def connect(namesrv: str) -> AsyncClient:
    """A client as the running command's options want it."""
    from neve.client import connect as open_client

    chosen = security_of_the_command()
    return open_client(namesrv, credentials=chosen.credentials, tls=chosen.tls)


def security_of_the_command() -> Security:
    """As the running command's options want it."""
    return security(_chosen())


def security(chosen: dict[str, Any]) -> Security:
    """Credentials and TLS from the options and the environment.

    Raises:
        click.UsageError: half of a pair, or a file that is none.
    """
    file: Path | None = chosen.get("credentials")
    if file is not None:
        return Security(read_credentials(file), _tls(chosen))
    access_key, secret_key = environ.get(ACCESS_KEY_VARIABLE), environ.get(SECRET_KEY_VARIABLE)
    if bool(access_key) != bool(secret_key):
        raise click.UsageError(f"{ACCESS_KEY_VARIABLE} and {SECRET_KEY_VARIABLE} go together")
    return Security((access_key, secret_key) if access_key and secret_key else None, _tls(chosen))


def read_credentials(file: Path) -> tuple[str, str]:
    """(access key, secret key) from lines `accessKey: …` and `secretKey: …`; others are left alone.

    Raises:
        click.UsageError: one is missing. The message names the file, never what is in it.
    """
    found: dict[str, str] = {}
    for line in file.read_text().splitlines():
        name, separator, value = line.partition(":")
        if separator and not name.lstrip().startswith("#"):
            found[name.strip()] = value.strip().strip("'\"")
    missing = [name for name in ("accessKey", "secretKey") if not found.get(name)]
    if missing:
        raise click.UsageError(f"{file} has no {' and no '.join(missing)}")
    return found["accessKey"], found["secretKey"]


def _tls(chosen: dict[str, Any]) -> ssl.SSLContext | bool:
    trusted, certificate, key = (chosen.get(name) for name in ("tls_ca", "tls_cert", "tls_key"))
    if (certificate is None) != (key is None):
        raise click.UsageError("--tls-cert and --tls-key go together")
    if chosen.get("tls") is False:
        return False
    if not chosen.get("tls") and trusted is None and certificate is None:
        return False
    try:
        context = ssl.create_default_context(cafile=None if trusted is None else str(trusted))
        if certificate is not None and key is not None:
            context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise click.UsageError(f"a file for TLS is no PEM of that kind: {error}") from error
    return context


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
        default="127.0.0.1:9876",
        show_default=True,
        help="Name server, host:port[;host:port].",
    ),
    _kept(
        "--credentials",
        type=_FILE,
        envvar="NEVE_CREDENTIALS",
        metavar="FILE",
        help="Sign requests: a file with accessKey and secretKey (or NEVE_ACCESS_KEY, NEVE_SECRET_KEY).",
    ),
    _kept("--tls/--no-tls", default=None, envvar="NEVE_TLS", help="Connect over TLS."),
    _kept("--tls-ca", type=_FILE, envvar="NEVE_TLS_CA", metavar="FILE", help="Trust this PEM; implies --tls."),
    _kept("--tls-cert", type=_FILE, envvar="NEVE_TLS_CERT", metavar="FILE", help="Certificate to show; implies --tls."),
    _kept("--tls-key", type=_FILE, envvar="NEVE_TLS_KEY", metavar="FILE", help="Its private key."),
]
