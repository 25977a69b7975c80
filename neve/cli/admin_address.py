"""Finds the admin port that a command asks, and reports it.

The port listens only on the machine of the broker. Without `--admin`, the name server lists the brokers, and the broker
reports its `adminPort`. Without a name server, the default port is asked.
"""

from __future__ import annotations

import asyncio
import socket

import click

from neve.cli.cluster import connect
from neve.cli.failures import NOT_FOUND, UNREACHABLE, USAGE, Failure
from neve.cli.output import say
from neve.errors import ClientError, NeveError

DEFAULT_ADMIN = "127.0.0.1:10913"
_LOOPBACK = "127.0.0.1"


def find_admin(admin: str | None, broker: str | None, namesrv: str) -> str:
    """Return `host:port` of the admin port.

    Raises:
        Failure: there are several brokers and none is named, or the port of the broker is on another machine.
    """
    context = click.get_current_context()
    is_typed = context.get_parameter_source("admin") is click.core.ParameterSource.COMMANDLINE
    if admin is not None and broker is not None and is_typed:
        raise Failure(USAGE, "--admin and --broker exclude each other: give one of them")
    if admin is not None and (broker is None or is_typed):
        say(f"asking the broker at {admin}" + ("" if is_typed else " (NEVE_ADMIN)"))
        return admin
    try:
        name, found = asyncio.run(_ask_name_server(namesrv, broker))
    except NeveError as error:
        if broker is not None:
            raise
        say(f"asking the broker at {DEFAULT_ADMIN}: {error}")
        return DEFAULT_ADMIN
    say(f"asking broker {name} at {found}")
    return found


async def _ask_name_server(namesrv: str, broker: str | None) -> tuple[str, str]:
    async with connect(namesrv) as client:
        known = await client.admin.cluster_info()
        names = sorted(known) if broker is None else [broker]
        if not known:
            raise ClientError(f"the name server {namesrv} knows no broker")
        if names[0] not in known:
            raise Failure(NOT_FOUND, f"the name server {namesrv} knows no broker {broker}")
        if len(names) > 1:
            raise Failure(USAGE, f"there are several brokers, {', '.join(names)}: name one with --broker")
        name = names[0]
        master = known[name].master
        if master is None:
            raise Failure(
                UNREACHABLE, f"broker {name} has no master at present: give the admin port of a member with --admin"
            )
        host = master.rpartition(":")[0].strip("[]")
        port = int((await client.admin.broker_config(name)).get("adminPort", "-1"))
    if port < 0:
        raise Failure(UNREACHABLE, f"broker {name} has no admin port (adminPort=-1)")
    if not _is_here(host):
        where = f"{_LOOPBACK}:{port} of {host}: run the command there, or give a tunnel with --admin"
        raise Failure(UNREACHABLE, f"the admin port of broker {name} is {where}")
    return name, f"{_LOOPBACK}:{port}"


def _is_here(host: str) -> bool:
    """Return whether the address belongs to this machine: only such an address can be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
