"""`neve cluster`: broker sets, who is in sync, hand-over, members that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from neve.cli import cluster_overview
from neve.cli.aliases import AliasedGroup
from neve.cli.cluster import cluster_options
from neve.cli.failures import CONFLICT, FAILED, NOT_FOUND, Failure
from neve.cli.output import ask, emit, output_option, say

if TYPE_CHECKING:
    from neve.cli.broker_sets import BrokerSets, Replica, SetState

Command = TypeVar("Command", bound=Callable[..., Any])

_LEADS_S = 60.0
#: Whatever `replication` is; and there were so many, else nobody could be handed over to.
_TAKES_SENDS = 2
#: What a new member has to have in common with the set.
_SHARED = (
    "brokerClusterName", "brokerName", "namesrvAddr", "controllerAddr", "replication", "minInSyncReplicas",
    "flushDiskType", "mappedFileSizeCommitLog", "messageDelayLevel", "tlsEnable", "tlsServerMode",
    "apacheMembers",
)  # fmt: skip
_OWN = ("brokerIP1", "storePathRootDir")

yes_option = click.option("--yes", is_flag=True, help="Do not ask.")
wait_option = click.option(
    "--within", type=click.FloatRange(0), default=3600.0, show_default=True, metavar="SECONDS", help="Wait so long."
)


def controller_option(command: Command) -> Command:
    return click.option(
        "--controller",
        "controllers",
        envvar="NEVE_CONTROLLER",
        show_envvar=True,
        help="host:port[;host:port].  [default: those that the name server's brokers name]",
    )(command)


@click.group(cls=AliasedGroup)
def cluster() -> None:
    """A cluster: its name servers and brokers; and broker sets: who leads, who is in sync, members that come and go."""


cluster.add_command(cluster_overview.list_clusters)
cluster.add_command(cluster_overview.describe)


# ---- looking


@cluster.command()
@click.argument("names", nargs=-1, metavar="[NAME...]")
@controller_option
@cluster_options
@output_option
def status(names: tuple[str, ...], controllers: str | None, namesrv: str, output: str) -> None:
    """Show broker sets: those that are named, or all that the name server knows. Exit code 1 where one has no master.

    A set of which nobody has a role is unknown to name servers: name it, and a controller.
    """
    rows = asyncio.run(_status(namesrv, controllers, names))
    emit(rows, ["set", "master", "address", "epoch", "in_sync", "living", "members"], output)
    if without := [row["set"] for row in rows if row["master"] is None]:
        raise Failure(FAILED, f"no living master: {', '.join(without)}")


async def _status(namesrv: str, controllers: str | None, named: tuple[str, ...]) -> list[dict[str, Any]]:
    from neve.cli.broker_sets import broker_sets

    async with broker_sets(namesrv, controllers) as (sets, known):
        if named:
            return [_summary(await sets.state(name)) for name in named]
        if found := await sets.states(known):
            return [_summary(state) for state in found]
    raise Failure(NOT_FOUND, f"{namesrv} knows no broker set now: name it")


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


@cluster.command()
@click.argument("name")
@controller_option
@cluster_options
@output_option
def members(name: str, controllers: str | None, namesrv: str, output: str) -> None:
    """Show the members of a broker set, and where their logs end."""
    rows = asyncio.run(_members(namesrv, controllers, name))
    emit(rows, ["id", "address", "role", "in_sync", "alive", "epoch", "log_end", "behind"], output)


async def _members(namesrv: str, controllers: str | None, name: str) -> list[dict[str, Any]]:
    from neve.cli.broker_sets import broker_sets

    async with broker_sets(namesrv, controllers) as (sets, _):
        return await _rows_of(sets, await sets.state(name))


async def _rows_of(sets: BrokerSets, state: SetState) -> list[dict[str, Any]]:
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


@cluster.command()
@click.argument("name")
@controller_option
@cluster_options
@output_option
def epochs(name: str, controllers: str | None, namesrv: str, output: str) -> None:
    """Show which master wrote what of each member's log. What parts two logs is seen here."""
    rows, silent = asyncio.run(_epochs(namesrv, controllers, name))
    emit(rows, ["member", "epoch", "start", "end"], output)
    if silent:
        raise Failure(FAILED, f"not reached: {', '.join(silent)}")


async def _epochs(namesrv: str, controllers: str | None, name: str) -> tuple[list[dict[str, Any]], list[str]]:
    from neve.cli.broker_sets import broker_sets

    async with broker_sets(namesrv, controllers) as (sets, _):
        state = await sets.state(name)
        replicas = state.replicas
        logs = await sets.logs(state, replicas)
    rows = [
        {"member": one.id, "epoch": epoch, "start": start, "end": end}
        for one, log in zip(replicas, logs, strict=True)
        if log
        for epoch, start, end in log.epochs
    ]
    return rows, [f"{one.id} at {one.address}" for one, log in zip(replicas, logs, strict=True) if not log]


@cluster.command()
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--messages", is_flag=True, help="Their messages, a JSON line each, as `neve produce --json` takes them.")
@output_option
def diverged(data: Path, messages: bool, output: str) -> None:
    """Show what a member had alone and gave up, kept in its data directory DATA.

    It was acknowledged to nobody with replication=sync or sync-available. Messages: each once more, of those that a
    broker stored for clients; pipe the lines that are wanted to `neve produce TOPIC --json`.
    """
    from neve.cli.diverged import files, lines

    if messages:
        for line in lines(data):
            click.echo(line)
        return
    rows = list(files(data))
    emit(rows, ["file", "epoch", "from", "to", "messages", "topics"], output)
    if not rows:
        say(f"nothing was given up in {data}")


# ---- who is master


@cluster.command()
@click.argument("name")
@click.option("--to", "target", type=int, metavar="ID", help="The new master.  [default: a slave that is in sync]")
@controller_option
@cluster_options
def switch(name: str, target: int | None, controllers: str | None, namesrv: str) -> None:
    """Hand over to another member that is in sync; returns when it leads.

    A master of neve's takes nothing more, until the other one has all of its log, then that is elected: nothing is
    lost, whatever `replication` is. For a moment sends are refused, and clients send them again: to the new master.
    """
    said = asyncio.run(_switch(namesrv, controllers, name, target))
    say(said)


async def _switch(namesrv: str, controllers: str | None, name: str, target: int | None) -> str:
    from neve.cli.broker_sets import broker_sets

    async with broker_sets(namesrv, controllers) as (sets, _):
        state = await sets.state(name)
        former = state.living_master
        if former is None:
            raise Failure(CONFLICT, f"{name} has no living master: nobody hands over. See `neve cluster init`")
        chosen = await _successor(sets, state, former, target)
        if not await sets.hand_over(name, former, chosen):
            await sets.designate(name, chosen.id)
        now = await sets.until_it_leads(name, chosen, _LEADS_S, in_sync=_TAKES_SENDS)
        return f"{name}: {chosen.id} at {chosen.address} leads in epoch {now.master_epoch}, it was {former.id}"


async def _successor(sets: BrokerSets, state: SetState, former: Replica, target: int | None) -> Replica:
    if target is not None:
        chosen = state.replica(target)
        if chosen.id == former.id:
            raise Failure(CONFLICT, f"{target} is the master of {state.name}")
        if not (chosen.in_sync and chosen.alive):
            raise Failure(CONFLICT, f"{target} of {state.name} is not in sync: it may lack what was acknowledged")
        return chosen
    able = [one for one in state.replicas if one.in_sync and one.alive and one.id != former.id]
    if not able:
        raise Failure(CONFLICT, f"no slave of {state.name} is in sync")
    logs = await sets.logs(state, able)
    ends = {one: log.end if log else -1 for one, log in zip(able, logs, strict=True)}
    return max(able, key=lambda one: ends[one])


@cluster.command()
@click.argument("name")
@click.option("--master", "chosen", type=int, required=True, metavar="ID", help="Who has the truth.")
@click.option("--frozen", is_flag=True, help="Also while the present master lives: the controller says it is frozen.")
@yes_option
@controller_option
@cluster_options
def init(  # noqa: PLR0917 - the command line's own
    name: str, chosen: int, frozen: bool, yes: bool, controllers: str | None, namesrv: str
) -> None:
    """Designate a master where the controller does not decide by itself.

    A first election over logs that are not empty, a register that was restored or lost, a set of which nobody in sync
    is left: what only others have is given up, and kept in their `diverged`.
    """
    say(asyncio.run(_init(namesrv, controllers, name, chosen, frozen=frozen, yes=yes)))


async def _init(namesrv: str, controllers: str | None, name: str, chosen: int, *, frozen: bool, yes: bool) -> str:
    from neve.cli.broker_sets import broker_sets

    async with broker_sets(namesrv, controllers) as (sets, _):
        state = await sets.state(name)
        member = state.replica(chosen)
        if state.living_master is not None and not frozen:
            raise Failure(CONFLICT, f"{name} has a living master, {state.master}: see `neve cluster switch`")
        rows = await _rows_of(sets, state)
        if not yes:
            longer = [row["id"] for row in rows if _rank(row) > _rank(next(r for r in rows if r["id"] == chosen))]
            warned = f" LONGER LOGS: {longer}." if longer else ""
            emit(rows, ["id", "address", "in_sync", "alive", "epoch", "log_end"], "table")
            ask(f"{name}: {chosen} becomes master, the others give up what it does not have.{warned} Go on?")
        await sets.designate(name, chosen)
        now = await sets.until_it_leads(name, member, _LEADS_S)
        return f"{name}: {chosen} at {member.address} leads in epoch {now.master_epoch}"


def _rank(row: dict[str, Any]) -> tuple[int, int]:
    return (-1 if row["epoch"] is None else row["epoch"]), (-1 if row["log_end"] is None else row["log_end"])


# ---- who is a member


@cluster.command()
@click.argument("name")
@click.option("--wait-for", "address", metavar="HOST:PORT", help="Return when the new member there is in sync.")
@wait_option
@controller_option
@cluster_options
def add(name: str, address: str | None, within: float, controllers: str | None, namesrv: str) -> None:
    """Print the broker.conf of a new member; with --wait-for wait until it is in sync.

    A member is added by starting it: it takes an id, and the log of the master from where that begins.
    """
    if address is None:
        for line in asyncio.run(_configuration_of(namesrv, controllers, name)):
            click.echo(line)
        return
    member = asyncio.run(_in_sync(namesrv, controllers, name, address, within))
    say(f"{name}: {address} is member {member.id}, and in sync")


async def _configuration_of(namesrv: str, controllers: str | None, name: str) -> list[str]:
    from neve.cli.broker_sets import broker_sets

    async with broker_sets(namesrv, controllers) as (sets, _):
        master = (await sets.state(name)).living_master
        if master is None:
            raise Failure(CONFLICT, f"{name} has no living master to take the settings from")
        found = await sets.configuration(master.address)
    shared = [f"{key}={found[key]}" for key in _SHARED if found.get(key)]
    return [*shared, "brokerSetExists=true", "# of this machine alone:", *(f"{key}=" for key in _OWN)]


async def _in_sync(namesrv: str, controllers: str | None, name: str, address: str, within: float) -> Replica:
    from neve.cli.broker_sets import broker_sets

    async with broker_sets(namesrv, controllers) as (sets, _):
        return await sets.until_in_sync(name, address, within)


@cluster.command()
@click.argument("name")
@click.argument("ids", nargs=-1, type=int, required=True, metavar="ID...")
@click.option("--living", is_flag=True, help="Also one that lives; it comes back under a new id unless it is stopped.")
@yes_option
@controller_option
@cluster_options
def remove(  # noqa: PLR0917 - the command line's own
    name: str, ids: tuple[int, ...], living: bool, yes: bool, controllers: str | None, namesrv: str
) -> None:
    """Forget members that do not come back. Stop them first."""
    asyncio.run(_remove(namesrv, controllers, name, ids, living=living, yes=yes))
    say(f"{name}: forgot {', '.join(map(str, ids))}")


async def _remove(
    namesrv: str, controllers: str | None, name: str, ids: tuple[int, ...], *, living: bool, yes: bool
) -> None:
    from neve.cli.broker_sets import broker_sets

    async with broker_sets(namesrv, controllers) as (sets, _):
        await _forget(sets, await sets.state(name), ids, living=living, yes=yes)


async def _forget(sets: BrokerSets, state: SetState, ids: tuple[int, ...], *, living: bool, yes: bool) -> None:
    master = state.living_master
    if master is None:
        raise Failure(CONFLICT, f"{state.name} has no living master: its members may be all that is left of it")
    for one in (state.replica(broker_id) for broker_id in ids):
        if one.id == master.id:
            raise Failure(CONFLICT, f"{one.id} is the master of {state.name}: `neve cluster switch` first")
        if one.alive and not living:
            raise Failure(CONFLICT, f"{one.id} at {one.address} lives: stop it first")
    if not yes:
        ask(f"Forget {', '.join(map(str, ids))} of {state.name}?")
    cluster_name = (await sets.configuration(master.address)).get("brokerClusterName", "")
    await sets.forget(state.name, cluster_name, ids, living=living)


@cluster.command()
@click.argument("name")
@click.argument("old", type=int, metavar="ID")
@click.option("--by", "address", required=True, metavar="HOST:PORT", help="The new member; it has to be started.")
@wait_option
@yes_option
@controller_option
@cluster_options
def replace(
    *, name: str, old: int, address: str, within: float, yes: bool, controllers: str | None, namesrv: str
) -> None:
    """Forget a member that is gone, once the new one is in sync."""
    say(asyncio.run(_replace(namesrv, controllers, name, old, address=address, within=within, yes=yes)))


async def _replace(
    namesrv: str, controllers: str | None, name: str, old: int, *, address: str, within: float, yes: bool
) -> str:
    from neve.cli.broker_sets import broker_sets

    async with broker_sets(namesrv, controllers) as (sets, _):
        state = await sets.state(name)
        gone = state.replica(old)
        has_successor = any(one.address == address and one.id != old for one in state.replicas)
        if gone.address == address and gone.alive and not has_successor:
            raise Failure(CONFLICT, f"{address} is member {old} itself, and it is alive: nothing to replace")
        new = await sets.until_in_sync(name, address, within, other_than=old)
        await _forget(sets, await sets.state(name), (old,), living=False, yes=yes)
        return f"{name}: {new.id} at {address} is in sync, {old} is forgotten"
