"""`neve broker-set`: broker sets, their members and masters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from neve.cli.aliases import VerbGroup, option
from neve.cli.cluster import administer_sets, cluster_options
from neve.cli.failures import CONFLICT, FAILED, NOT_FOUND, Failure
from neve.cli.options import DURATION, yes_option
from neve.cli.output import ask, emit, output_option, say

if TYPE_CHECKING:
    from neve.admin.broker_sets import BrokerSets, Replica, SetState

Command = TypeVar("Command", bound=Callable[..., Any])

_BECOMES_MASTER_S = 60.0
# A new master accepts sends with every value of `replication` once two members are in sync; a switchover implies two.
_ACCEPTS_SENDS = 2
# The keys that a new member must have in common with the set.
_SHARED = (
    "brokerClusterName", "brokerName", "namesrvAddr", "controllerAddr", "replication", "minInSyncReplicas",
    "flushDiskType", "mappedFileSizeCommitLog", "messageDelayLevel", "tlsEnable", "tlsServerMode",
    "apacheMembers",
)  # fmt: skip
_OWN = ("brokerIP1", "storePathRootDir")

set_argument = click.argument("name", metavar="SET")
within_option = click.option(
    "--within", type=DURATION, default="1h", show_default=True, metavar="DURATION", help="Fail if it takes longer."
)


def controller_option(command: Command) -> Command:
    """Add `--controller`."""
    return click.option(
        "--controller",
        "controllers",
        envvar="NEVE_CONTROLLER",
        show_envvar=True,
        help="Controllers, host:port[;host:port].  [default: those in the configuration of a broker]",
    )(command)


@click.group(cls=VerbGroup)
def broker_set() -> None:
    """Broker sets: masters, members in sync, elections, members that join or leave."""


# ---- read


@broker_set.command(name="list")
@click.argument("names", nargs=-1, metavar="[SET...]")
@controller_option
@cluster_options
@output_option
def list_sets(names: tuple[str, ...], controllers: str | None, namesrv: str, output: str) -> None:
    """List broker sets: those that are named, or all that the name server knows. Exit code 1: a set has no master.

    Name servers do not know a set without a master or slaves: give its name, and a controller.
    """
    rows = asyncio.run(_list(namesrv, controllers, names))
    emit(rows, ["set", "master", "address", "epoch", "in_sync", "living", "members"], output)
    if without := [row["set"] for row in rows if row["master"] is None]:
        raise Failure(FAILED, f"no living master: {', '.join(without)}")


async def _list(namesrv: str, controllers: str | None, named: tuple[str, ...]) -> list[dict[str, Any]]:
    async with administer_sets(namesrv, controllers) as (sets, known):
        if named:
            return [_summary(await sets.state(name)) for name in named]
        if found := await sets.states(known):
            return [_summary(state) for state in found]
    raise Failure(
        NOT_FOUND, f"the name server {namesrv} knows no broker set at present: give its name and a controller"
    )


def _summary(state: SetState) -> dict[str, Any]:
    master = state.living_master
    return {
        "set": state.name,
        "master": master.id if master else None,
        "address": master.address if master else None,
        "epoch": state.master_epoch,
        "in_sync": sum(one.in_sync for one in state.replicas),
        "living": sum(one.alive for one in state.replicas),
        "members": len(state.replicas),
    }


@broker_set.command()
@set_argument
@controller_option
@cluster_options
@output_option
def show(name: str, controllers: str | None, namesrv: str, output: str) -> None:
    """Show the members of a broker set, and the end of each log."""
    rows = asyncio.run(_show(namesrv, controllers, name))
    emit(rows, ["id", "address", "role", "in_sync", "alive", "epoch", "log_end", "behind"], output)


async def _show(namesrv: str, controllers: str | None, name: str) -> list[dict[str, Any]]:
    async with administer_sets(namesrv, controllers) as (sets, _):
        return await _member_rows(sets, await sets.state(name))


async def _member_rows(sets: BrokerSets, state: SetState) -> list[dict[str, Any]]:
    logs = await sets.logs(state, state.replicas)
    master = state.living_master
    end = next((log.end for one, log in zip(state.replicas, logs, strict=True) if one is master and log), None)
    return [
        {
            "id": one.id,
            "address": one.address,
            "role": "master" if one is master else "slave",
            "in_sync": one.in_sync,
            "alive": one.alive,
            "epoch": log.epoch if log else None,
            "log_end": log.end if log else None,
            "behind": max(end - log.end, 0) if log and end is not None else None,
        }
        for one, log in zip(state.replicas, logs, strict=True)
    ]


@broker_set.command()
@set_argument
@controller_option
@cluster_options
@output_option
def epochs(name: str, controllers: str | None, namesrv: str, output: str) -> None:
    """Show which leadership term wrote which part of each member's log, and so where logs diverge."""
    rows, silent = asyncio.run(_epochs(namesrv, controllers, name))
    emit(rows, ["member", "epoch", "start", "end"], output)
    if silent:
        raise Failure(FAILED, f"these members do not answer: {', '.join(silent)}")


async def _epochs(namesrv: str, controllers: str | None, name: str) -> tuple[list[dict[str, Any]], list[str]]:
    async with administer_sets(namesrv, controllers) as (sets, _):
        state = await sets.state(name)
        logs = dict(zip(state.replicas, await sets.logs(state, state.replicas), strict=True))
    rows = [
        {"member": one.id, "epoch": epoch, "start": start, "end": end}
        for one, log in logs.items()
        if log
        for epoch, start, end in log.epochs
    ]
    return rows, [f"{one.id} at {one.address}" for one, log in logs.items() if not log]


@broker_set.command()
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--messages", is_flag=True, help="Print the messages as JSON lines, as `neve produce --json` reads them.")
@output_option
def diverged(data: Path, messages: bool, output: str) -> None:
    """Show the diverged tails that a member truncated from its log and keeps in its data directory DATA.

    With replication=sync or sync-available none of them was acknowledged. --messages prints each message that a broker
    stored for clients; pass the lines that you want to `neve produce TOPIC --json`.
    """
    from neve.cli.diverged import files, lines

    if messages:
        for line in lines(data):
            click.echo(line)
        return
    rows = list(files(data))
    emit(rows, ["file", "epoch", "from", "to", "messages", "topics"], output)
    if not rows:
        say(f"{data} holds no diverged tail")


# ---- elections


@broker_set.command()
@set_argument
@option(
    "--member", "target", former=["--to"], type=int, metavar="ID", help="The new master.  [default: a slave in sync]"
)
@controller_option
@cluster_options
def switchover(name: str, target: int | None, controllers: str | None, namesrv: str) -> None:
    """Make another member that is in sync the master, without loss; return when it accepts messages.

    A master of neve stops accepting messages, waits until the other member has its whole log, and then hands its role
    over. Nothing is lost with any value of `replication`. Clients retry the refused sends at the new master.
    """
    say(asyncio.run(_switchover(namesrv, controllers, name, target)))


async def _switchover(namesrv: str, controllers: str | None, name: str, target: int | None) -> str:
    async with administer_sets(namesrv, controllers) as (sets, _):
        state = await sets.state(name)
        former = state.living_master
        if former is None:
            raise Failure(CONFLICT, f"{name} has no living master that could switch over: see `neve broker-set elect`")
        chosen = await _successor(sets, state, former, target)
        if not await sets.switch_over(name, former, chosen):
            await sets.elect(name, chosen.id)
        state = await sets.wait_until_master(name, chosen, _BECOMES_MASTER_S, in_sync=_ACCEPTS_SENDS)
        return f"{name}: {chosen.id} at {chosen.address} is master in epoch {state.master_epoch}, it was {former.id}"


async def _successor(sets: BrokerSets, state: SetState, former: Replica, target: int | None) -> Replica:
    if target is not None:
        chosen = state.replica(target)
        if chosen.id == former.id:
            raise Failure(CONFLICT, f"{target} is the master of {state.name} already")
        if not (chosen.in_sync and chosen.alive):
            raise Failure(CONFLICT, f"{target} of {state.name} is not in sync: it may lack acknowledged messages")
        return chosen
    able = [one for one in state.replicas if one.in_sync and one.alive and one.id != former.id]
    if not able:
        raise Failure(CONFLICT, f"no slave of {state.name} is in sync")
    logs = await sets.logs(state, able)
    ends = {one: log.end if log else -1 for one, log in zip(able, logs, strict=True)}
    return max(able, key=lambda one: ends[one])


@broker_set.command()
@set_argument
@option("--member", "chosen", former=["--master"], type=int, required=True, metavar="ID", help="The new master.")
@click.option(
    "--frozen", is_flag=True, help="Also while the present master is alive: the controller reports it frozen."
)
@yes_option
@controller_option
@cluster_options
def elect(  # noqa: PLR0917 - the arguments of the command line
    name: str, chosen: int, frozen: bool, yes: bool, controllers: str | None, namesrv: str
) -> None:
    """Force an election where the controller does not elect by itself. May lose messages.

    For a first election over logs that are not empty, a register that was restored or lost, or a set without a living
    member in sync. The other members truncate what the new master does not have, and keep it in `diverged`.
    """
    say(asyncio.run(_elect(namesrv, controllers, name, chosen, frozen=frozen, yes=yes)))


async def _elect(namesrv: str, controllers: str | None, name: str, chosen: int, *, frozen: bool, yes: bool) -> str:
    async with administer_sets(namesrv, controllers) as (sets, _):
        state = await sets.state(name)
        member = state.replica(chosen)
        if state.living_master is not None and not frozen:
            raise Failure(CONFLICT, f"{name} has a living master, {state.master}: see `neve broker-set switchover`")
        rows = await _member_rows(sets, state)
        if not yes:
            longer = [row["id"] for row in rows if _rank(row) > _rank(next(r for r in rows if r["id"] == chosen))]
            warning = f" LONGER LOGS: {longer}." if longer else ""
            emit(rows, ["id", "address", "in_sync", "alive", "epoch", "log_end"], "table")
            ask(f"{name}: {chosen} becomes master, the others truncate what it does not have.{warning} Continue?")
        await sets.elect(name, chosen)
        state = await sets.wait_until_master(name, member, _BECOMES_MASTER_S)
        return f"{name}: {chosen} at {member.address} is master in epoch {state.master_epoch}"


def _rank(row: dict[str, Any]) -> tuple[int, int]:
    return (-1 if row["epoch"] is None else row["epoch"]), (-1 if row["log_end"] is None else row["log_end"])


# ---- members


@broker_set.command(name="add-member")
@set_argument
@click.option("--wait-for", "address", metavar="HOST:PORT", help="Return when the new member there is in sync.")
@within_option
@controller_option
@cluster_options
def add_member(name: str, address: str | None, within: float, controllers: str | None, namesrv: str) -> None:
    """Print the broker.conf of a new member; with --wait-for, wait until it is in sync.

    A member joins when it is started: it takes an id, and copies the master's log from its first offset.
    """
    if address is None:
        for line in asyncio.run(_configuration(namesrv, controllers, name)):
            click.echo(line)
        return
    member = asyncio.run(_in_sync(namesrv, controllers, name, address, within))
    say(f"{name}: {address} is member {member.id}, and in sync")


async def _configuration(namesrv: str, controllers: str | None, name: str) -> list[str]:
    async with administer_sets(namesrv, controllers) as (sets, _):
        master = (await sets.state(name)).living_master
        if master is None:
            raise Failure(CONFLICT, f"{name} has no living master to copy the settings from")
        found = await sets.config(master.address)
    shared = [f"{key}={found[key]}" for key in _SHARED if found.get(key)]
    return [*shared, "brokerSetExists=true", "# of this machine alone:", *(f"{key}=" for key in _OWN)]


async def _in_sync(namesrv: str, controllers: str | None, name: str, address: str, within: float) -> Replica:
    async with administer_sets(namesrv, controllers) as (sets, _):
        return await sets.wait_until_in_sync(name, address, within)


@broker_set.command(name="remove-member")
@set_argument
@click.argument("ids", nargs=-1, type=int, required=True, metavar="ID...")
@click.option("--living", is_flag=True, help="Also a member that is alive; it rejoins with a new id unless stopped.")
@yes_option
@controller_option
@cluster_options
def remove_member(  # noqa: PLR0917 - the arguments of the command line
    name: str, ids: tuple[int, ...], living: bool, yes: bool, controllers: str | None, namesrv: str
) -> None:
    """Remove members that will not return. Stop them first."""
    asyncio.run(_remove_members(namesrv, controllers, name, ids, living=living, yes=yes))
    say(f"{name}: removed {', '.join(map(str, ids))}")


async def _remove_members(
    namesrv: str, controllers: str | None, name: str, ids: tuple[int, ...], *, living: bool, yes: bool
) -> None:
    async with administer_sets(namesrv, controllers) as (sets, _):
        await _remove(sets, await sets.state(name), ids, living=living, yes=yes)


async def _remove(sets: BrokerSets, state: SetState, ids: tuple[int, ...], *, living: bool, yes: bool) -> None:
    master = state.living_master
    if master is None:
        raise Failure(CONFLICT, f"{state.name} has no living master: its members may hold the only copy of its log")
    for one in (state.replica(broker_id) for broker_id in ids):
        if one.id == master.id:
            raise Failure(CONFLICT, f"{one.id} is the master of {state.name}: run `neve broker-set switchover` first")
        if one.alive and not living:
            raise Failure(CONFLICT, f"{one.id} at {one.address} is alive: stop it first")
    if not yes:
        ask(f"Remove {', '.join(map(str, ids))} from {state.name}?")
    cluster = (await sets.config(master.address)).get("brokerClusterName", "")
    await sets.remove(state.name, cluster, ids, living=living)


@broker_set.command(name="replace-member")
@set_argument
@click.argument("old", type=int, metavar="ID")
@click.option("--by", "address", required=True, metavar="HOST:PORT", help="The new member, which must be started.")
@within_option
@yes_option
@controller_option
@cluster_options
def replace_member(
    *, name: str, old: int, address: str, within: float, yes: bool, controllers: str | None, namesrv: str
) -> None:
    """Remove a member that is gone, as soon as the new one is in sync."""
    say(asyncio.run(_replace(namesrv, controllers, name, old, address=address, within=within, yes=yes)))


async def _replace(
    namesrv: str, controllers: str | None, name: str, old: int, *, address: str, within: float, yes: bool
) -> str:
    async with administer_sets(namesrv, controllers) as (sets, _):
        state = await sets.state(name)
        replaced = state.replica(old)
        has_successor = any(one.address == address and one.id != old for one in state.replicas)
        if replaced.address == address and replaced.alive and not has_successor:
            raise Failure(CONFLICT, f"{address} is member {old} itself, and alive: there is nothing to replace")
        new = await sets.wait_until_in_sync(name, address, within, other_than=old)
        await _remove(sets, await sets.state(name), (old,), living=False, yes=yes)
        return f"{name}: {new.id} at {address} is in sync, {old} is removed"
