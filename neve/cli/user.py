"""`neve user`: who may sign requests, at all brokers and name servers of a cluster together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from neve.cli.aliases import AliasedGroup
from neve.cli.cluster import cluster_options
from neve.cli.failures import CONFLICT, NOT_FOUND, Failure
from neve.cli.output import ask, emit, output_option, say
from neve.cli.passwords import password_from

if TYPE_CHECKING:
    from neve.cli.auth_servers import AuthServers, Server, User

Command = TypeVar("Command", bound=Callable[..., Any])


def password_option(command: Command) -> Command:
    return click.option(
        "--password-file",
        type=click.Path(path_type=Path, allow_dash=True, dir_okay=False),
        metavar="FILE",
        help="Its one line is the password; - for stdin.  [default: it is asked for]",
    )(command)


@click.group(cls=AliasedGroup)
def user() -> None:
    """Users, at all brokers and name servers together.

    Each server keeps its own; a command tells all that keep any. Only a super user may. A user's password is the secret
    key by which it signs, and its name the access key.
    """


@user.command(name="ls")
@cluster_options
@output_option
def list_users(namesrv: str, output: str) -> None:
    """List the users. MISSING_AT: servers that do not have one that others have."""
    rows = asyncio.run(_list(namesrv))
    emit(rows, ["user", "type", "status", *(["missing_at"] if any(row["missing_at"] for row in rows) else [])], output)


async def _list(namesrv: str) -> list[dict[str, Any]]:
    from neve.cli.auth_servers import auth_servers

    async with auth_servers(namesrv) as servers:
        say_who_keeps_none(servers)
        return [_row(name, at, servers.keeping) for name, at in (await servers.users()).items()]


def _row(name: str, at: dict[Server, User], keeping: list[Server]) -> dict[str, Any]:
    kinds = {"super" if one.is_super else "normal" for one in at.values()}
    states = {"enabled" if one.is_enabled else "disabled" for one in at.values()}
    missing = [server.label for server in keeping if server not in at]
    return {"user": name, "type": "/".join(sorted(kinds)), "status": "/".join(sorted(states)), "missing_at": missing}


def say_who_keeps_none(servers: AuthServers) -> None:
    if servers.without:
        say(f"keeps no users: {', '.join(server.label for server in servers.without)}")


@user.command()
@click.argument("name")
@click.option("--super", "is_super", is_flag=True, help="May do everything.")
@password_option
@cluster_options
def add(name: str, is_super: bool, password_file: Path | None, namesrv: str) -> None:
    """Make a user. Without a policy (`neve acl add`) it may do nothing, unless it is a super user."""
    settings = {
        "password": password_from(password_file, name),
        "userType": "Super" if is_super else "Normal",
        "userStatus": "enable",
    }
    made, had = asyncio.run(_add(namesrv, name, settings))
    say(f"made {name} at {', '.join(made)}")
    if had:
        raise Failure(CONFLICT, f"{', '.join(had)} had {name}, whose password may be another: neve user alter sets it")


async def _add(namesrv: str, name: str, settings: dict[str, str]) -> tuple[list[str], list[str]]:
    from neve.cli.auth_servers import auth_servers

    async with auth_servers(namesrv) as servers:
        say_who_keeps_none(servers)
        had = (await servers.users()).get(name, {})
        lacking = [server for server in servers.keeping if server not in had]
        if not lacking:
            raise Failure(CONFLICT, f"there is a user {name}")
        await servers.create_user(name, settings, lacking)
        return [one.label for one in lacking], [one.label for one in had]


@user.command()
@click.argument("name")
@click.option("--password", "new_password", is_flag=True, help="Give it a new password, which is asked for.")
@password_option
@click.option("--super/--normal", "is_super", default=None, help="May do everything, or what policies let it.")
@click.option("--enable/--disable", "is_enabled", default=None, help="May sign requests, or not for now.")
@cluster_options
def alter(
    *,
    name: str,
    new_password: bool,
    password_file: Path | None,
    is_super: bool | None,
    is_enabled: bool | None,
    namesrv: str,
) -> None:
    """Change a user. What is not named stays as it is."""
    settings = {}
    if new_password or password_file is not None:
        settings["password"] = password_from(password_file, name)
    if is_super is not None:
        settings["userType"] = "Super" if is_super else "Normal"
    if is_enabled is not None:
        settings["userStatus"] = "enable" if is_enabled else "disable"
    if not settings:
        raise click.UsageError("nothing to change: --password, --super, --disable, …")
    at = asyncio.run(_alter(namesrv, name, settings))
    say(f"changed {name} at {', '.join(at)}")


async def _alter(namesrv: str, name: str, settings: dict[str, str]) -> list[str]:
    from neve.cli.auth_servers import auth_servers

    async with auth_servers(namesrv) as servers:
        say_who_keeps_none(servers)
        at = await _having(servers, name)
        await servers.update_user(name, settings, at)
        return [one.label for one in at]


async def _having(servers: AuthServers, name: str) -> list[Server]:
    found = (await servers.users()).get(name)
    if found is None:
        raise Failure(NOT_FOUND, f"there is no user {name}")
    if missing := [server.label for server in servers.keeping if server not in found]:
        say(f"{name} is not known at {', '.join(missing)}: neve user add makes it there")
    return [server for server in servers.keeping if server in found]


@user.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@cluster_options
def rm(name: str, yes: bool, namesrv: str) -> None:
    """Remove a user, with its policies."""
    if not yes:
        ask(f"Remove the user {name} and its policies?")
    at = asyncio.run(_rm(namesrv, name))
    say(f"removed {name} at {', '.join(at)}")


async def _rm(namesrv: str, name: str) -> list[str]:
    from neve.cli.auth_servers import auth_servers

    async with auth_servers(namesrv) as servers:
        say_who_keeps_none(servers)
        at = await _having(servers, name)
        await servers.delete_user(name, at)
        return [one.label for one in at]
