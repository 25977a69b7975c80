"""`neve user`: the users of a cluster, at all brokers and name servers together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from neve.cli.aliases import VerbGroup
from neve.cli.cluster import administer, cluster_options
from neve.cli.failures import CONFLICT, NOT_FOUND, Failure
from neve.cli.options import yes_option
from neve.cli.output import ask, emit, output_option, say
from neve.cli.passwords import password_from

if TYPE_CHECKING:
    from neve.admin.users import Server, User, Users

Command = TypeVar("Command", bound=Callable[..., Any])


def password_option(command: Command) -> Command:
    """Add `--password-file`."""
    return click.option(
        "--password-file",
        type=click.Path(path_type=Path, allow_dash=True, dir_okay=False),
        metavar="FILE",
        help="Read the password from the only line of this file; - is stdin.  [default: prompt]",
    )(command)


@click.group(cls=VerbGroup)
def user() -> None:
    """Users, at all brokers and name servers together.

    Each server keeps its own users; a command changes all that keep any. Only a super user may do so. A user signs
    requests with the name as access key and the password as secret key.
    """


@user.command(name="list")
@cluster_options
@output_option
def list_users(namesrv: str, output: str) -> None:
    """List the users. MISSING_AT names servers without a user that others have."""
    rows = asyncio.run(_list(namesrv))
    emit(rows, ["user", "type", "status", *(["missing_at"] if any(row["missing_at"] for row in rows) else [])], output)


async def _list(namesrv: str) -> list[dict[str, Any]]:
    async with administer(namesrv, may_lack_brokers=True) as admin:
        users = await admin.users()
        report_servers_without_users(users)
        return [_row(name, at, users.keeping) for name, at in (await users.all()).items()]


def _row(name: str, at: dict[Server, User], keeping: list[Server]) -> dict[str, Any]:
    kinds = {"super" if one.is_super else "normal" for one in at.values()}
    states = {"enabled" if one.is_enabled else "disabled" for one in at.values()}
    missing = [server.label for server in keeping if server not in at]
    return {"user": name, "type": "/".join(sorted(kinds)), "status": "/".join(sorted(states)), "missing_at": missing}


def report_servers_without_users(users: Users) -> None:
    """Name the servers that keep no users, and are therefore passed over."""
    if users.without:
        say(f"keeps no users: {', '.join(server.label for server in users.without)}")


@user.command()
@click.argument("name")
@click.option("--super", "is_super", is_flag=True, help="Permit everything.")
@password_option
@cluster_options
def create(name: str, is_super: bool, password_file: Path | None, namesrv: str) -> None:
    """Create a user. Without a policy (`neve acl create`) it may do nothing, unless it is a super user."""
    settings = {
        "password": password_from(password_file, name),
        "userType": "Super" if is_super else "Normal",
        "userStatus": "enable",
    }
    created, present = asyncio.run(_create(namesrv, name, settings))
    say(f"created {name} at {', '.join(created)}")
    if present:
        raise Failure(
            CONFLICT,
            f"{', '.join(present)} had user {name} already, perhaps with another password: neve user set sets it",
        )


async def _create(namesrv: str, name: str, settings: dict[str, str]) -> tuple[list[str], list[str]]:
    async with administer(namesrv, may_lack_brokers=True) as admin:
        users = await admin.users()
        report_servers_without_users(users)
        present = (await users.all()).get(name, {})
        missing = [server for server in users.keeping if server not in present]
        if not missing:
            raise Failure(CONFLICT, f"user {name} exists already: neve user set changes it")
        await users.create(name, settings, missing)
        return [one.label for one in missing], [one.label for one in present]


@user.command(name="set")
@click.argument("name")
@click.option("--password", "new_password", is_flag=True, help="Set a new password, which is prompted for.")
@password_option
@click.option("--super/--normal", "is_super", default=None, help="Permit everything, or what policies permit.")
@click.option("--enable/--disable", "is_enabled", default=None, help="Accept or refuse requests that the user signs.")
@cluster_options
def set_user(
    *,
    name: str,
    new_password: bool,
    password_file: Path | None,
    is_super: bool | None,
    is_enabled: bool | None,
    namesrv: str,
) -> None:
    """Change a user. Settings that are not named stay."""
    settings = {}
    if new_password or password_file is not None:
        settings["password"] = password_from(password_file, name)
    if is_super is not None:
        settings["userType"] = "Super" if is_super else "Normal"
    if is_enabled is not None:
        settings["userStatus"] = "enable" if is_enabled else "disable"
    if not settings:
        raise click.UsageError("nothing to change: give --password, --super, --disable, …")
    at = asyncio.run(_set(namesrv, name, settings))
    say(f"changed {name} at {', '.join(at)}")


async def _set(namesrv: str, name: str, settings: dict[str, str]) -> list[str]:
    async with administer(namesrv, may_lack_brokers=True) as admin:
        users = await admin.users()
        report_servers_without_users(users)
        at = await _servers_with(users, name)
        await users.change(name, settings, at)
        return [one.label for one in at]


async def _servers_with(users: Users, name: str) -> list[Server]:
    found = (await users.all()).get(name)
    if found is None:
        raise Failure(NOT_FOUND, f"there is no user {name}")
    if missing := [server.label for server in users.keeping if server not in found]:
        say(f"{name} is missing at {', '.join(missing)}: neve user create creates it there")
    return [server for server in users.keeping if server in found]


@user.command()
@click.argument("name")
@yes_option
@cluster_options
def delete(name: str, yes: bool, namesrv: str) -> None:
    """Delete a user, with its policies."""
    if not yes:
        ask(f"Delete user {name} and its policies?")
    at = asyncio.run(_delete(namesrv, name))
    say(f"deleted {name} at {', '.join(at)}")


async def _delete(namesrv: str, name: str) -> list[str]:
    async with administer(namesrv, may_lack_brokers=True) as admin:
        users = await admin.users()
        report_servers_without_users(users)
        at = await _servers_with(users, name)
        await users.delete(name, at)
        return [one.label for one in at]
