"""`neve cluster`: clusters as their name servers list them, and the figures that their brokers report."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from neve.cli.aliases import VerbGroup
from neve.cli.broker import member_rows
from neve.cli.broker_set import broker_set
from neve.cli.cluster import administer, cluster_options
from neve.cli.failures import FAILED, NOT_FOUND, USAGE, Failure
from neve.cli.output import emit, emit_one, output_option
from neve.errors import NeveError
from neve.remoting.names import is_system_group

if TYPE_CHECKING:
    from neve.admin import ClusterAdmin

    Member = tuple[str, int, str]  # broker, id, address

_MEMBER_COLUMNS = ["broker", "id", "role", "address", "version", "put_tps", "get_tps", "disk"]
# Former words of `neve cluster`, and the verbs of `neve broker-set` that they became.
_FORMER = {
    "status": "list", "members": "show", "epochs": "epochs", "diverged": "diverged", "switch": "switchover",
    "init": "elect", "add": "add-member", "remove": "remove-member", "replace": "replace-member",
}  # fmt: skip


@click.group(cls=VerbGroup, former={word: broker_set.commands[verb] for word, verb in _FORMER.items()})
def cluster() -> None:
    """Clusters: their name servers, brokers and members."""


@cluster.command(name="list")
@cluster_options
@output_option
def list_clusters(namesrv: str, output: str) -> None:
    """List the clusters that the name servers know."""
    rows = asyncio.run(_list(namesrv))
    emit(rows, ["cluster", "brokers", "members", "without_master", "topics", "groups", "put_tps", "get_tps"], output)


async def _list(namesrv: str) -> list[dict[str, Any]]:
    async with administer(namesrv) as admin:
        return [await _summary(admin, name) for name in _clusters(admin)]


def _clusters(admin: ClusterAdmin) -> list[str]:
    return sorted({info.cluster for info in admin.brokers.known.values()})


async def _summary(admin: ClusterAdmin, cluster_name: str) -> dict[str, Any]:
    brokers = {name: info for name, info in sorted(admin.brokers.known.items()) if info.cluster == cluster_name}
    members = [row for name in brokers for row in await member_rows(admin, name)]
    with_master = [name for name, info in brokers.items() if info.master is not None]
    groups = {group for name in with_master for group in await admin.groups.settings_at(name)}
    return {
        "cluster": cluster_name,
        "brokers": len(brokers),
        "members": len(members),
        "without_master": [name for name in brokers if name not in with_master] or None,
        "topics": len(await admin.topics.names_of_cluster(cluster_name)),
        "groups": len([group for group in groups if not is_system_group(group)]),
        "put_tps": _sum(row["put_tps"] for row in members),
        "get_tps": _sum(row["get_tps"] for row in members),
    }


def _sum(rates: Iterable[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return round(sum(known), 1) if known else None


@cluster.command()
@click.argument("name", required=False, metavar="[CLUSTER]")
@cluster_options
@output_option
def show(name: str | None, namesrv: str, output: str) -> None:
    """Show a cluster: its name servers and whether they agree, the members of its brokers, and their conditions.

    Exit code 1: a name server does not answer or lacks members that others know, or a broker has no master.
    """
    found = asyncio.run(_show(namesrv, name))
    if output == "json":
        emit_one(found, output)
    else:
        emit_one({key: value for key, value in found.items() if not isinstance(value, list)}, output)
        click.echo()
        emit(found["name_servers"], ["name_server", "members", "problem"], output)
        click.echo()
        emit(found["members"], _MEMBER_COLUMNS, output)
        for row in found["members"]:
            if row["conditions"] not in {None, "none"}:
                click.echo(f"\n{row['broker']}: {row['conditions']}")
    problems = [
        f"name server {row['name_server']}: {row['problem']}" for row in found["name_servers"] if row["problem"]
    ]
    problems += [f"broker {one} has no master" for one in found["without_master"] or ()]
    if problems:
        raise Failure(FAILED, "\n".join(problems))


async def _show(namesrv: str, name: str | None) -> dict[str, Any]:
    async with administer(namesrv) as admin:
        clusters = _clusters(admin)
        if name is None and len(clusters) > 1:
            raise Failure(USAGE, f"name one of the clusters: {', '.join(clusters)}")
        chosen = clusters[0] if name is None else name
        if chosen not in clusters:
            raise Failure(NOT_FOUND, f"the name server knows no cluster {chosen}, only {', '.join(clusters)}")
        names = [one for one, info in sorted(admin.brokers.known.items()) if info.cluster == chosen]
        summary = await _summary(admin, chosen)
        members = [row for one in names for row in await member_rows(admin, one)]
        return {**summary, "name_servers": await _name_servers(admin, chosen), "members": members}


async def _name_servers(admin: ClusterAdmin, cluster_name: str) -> list[dict[str, Any]]:
    """Ask each name server: a client uses any of them."""
    views: dict[str, frozenset[Member] | NeveError] = {}
    for address in admin.brokers.name_servers:
        try:
            known = await admin.brokers.known_to(address)
        except NeveError as error:
            views[address] = error
        else:
            views[address] = frozenset(
                (name, number, member)
                for name, info in known.items()
                if info.cluster == cluster_name
                for number, member in info.addresses.items()
            )
    everything = frozenset(member for view in views.values() if isinstance(view, frozenset) for member in view)
    return [_name_server(address, view, everything) for address, view in views.items()]


def _name_server(
    address: str, view: frozenset[Member] | NeveError, everything: frozenset[Member]
) -> dict[str, Any]:  # fmt: skip
    if isinstance(view, NeveError):
        return {"name_server": address, "members": None, "problem": str(view)}
    missing = sorted(f"{name} {number} ({member})" for name, number, member in everything - view)
    return {
        "name_server": address,
        "members": len(view),
        "problem": f"does not know {', '.join(missing)}" if missing else None,
    }
