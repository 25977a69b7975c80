"""`neve cluster list` and `describe`: a cluster as its name servers have it, and what its brokers say of themselves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from neve.cli.broker import member_rows
from neve.cli.cluster import cluster_options
from neve.cli.failures import FAILED, NOT_FOUND, USAGE, Failure
from neve.cli.output import emit, emit_one, output_option
from neve.errors import NeveError
from neve.remoting.names import is_system_group

if TYPE_CHECKING:
    from neve.cli.brokers import Brokers

_MEMBERS = ["broker", "id", "role", "address", "version", "put_tps", "get_tps", "disk"]


@click.command(name="list")
@cluster_options
@output_option
def list_clusters(namesrv: str, output: str) -> None:
    """List the clusters that the name servers know, with what is in each."""
    rows = asyncio.run(_list(namesrv))
    emit(rows, ["cluster", "brokers", "members", "without_master", "topics", "groups", "put_tps", "get_tps"], output)


async def _list(namesrv: str) -> list[dict[str, Any]]:
    from neve.cli.brokers import brokers

    async with brokers(namesrv) as asked:
        clusters = sorted({info.cluster for info in asked.known.values()})
        return [await _summary(asked, cluster) for cluster in clusters]


async def _summary(asked: Brokers, cluster: str) -> dict[str, Any]:
    names = [name for name in asked.named(None) if asked.known[name].cluster == cluster]
    members = [row for name in names for row in await member_rows(asked, name)]
    groups = {group for name in names if asked.known[name].master is not None for group in await asked.groups(name)}
    return {
        "cluster": cluster,
        "brokers": len(names),
        "members": len(members),
        "without_master": [name for name in names if asked.known[name].master is None] or None,
        "topics": len(await asked.topics_of_cluster(cluster)),
        "groups": len([group for group in groups if not is_system_group(group)]),
        "put_tps": _sum(row["put_tps"] for row in members),
        "get_tps": _sum(row["get_tps"] for row in members),
    }


def _sum(rates: Any) -> float | None:
    told = [rate for rate in rates if rate is not None]
    return round(sum(told), 1) if told else None


@click.command()
@click.argument("name", required=False, metavar="[CLUSTER]")
@cluster_options
@output_option
def describe(name: str | None, namesrv: str, output: str) -> None:
    """Show a cluster: its name servers, whether they agree, its brokers' members, and what these can't do now.

    Exit code 1 where a name server does not answer or knows other members than the rest, or a broker has no master.
    """
    told = asyncio.run(_describe(namesrv, name))
    if output == "json":
        emit_one(told, output)
    else:
        emit_one({key: value for key, value in told.items() if not isinstance(value, list)}, output)
        click.echo()
        emit(told["name_servers"], ["name_server", "members", "trouble"], output)
        click.echo()
        emit(told["members"], _MEMBERS, output)
        for row in told["members"]:
            if row["conditions"] not in {None, "none"}:
                click.echo(f"\n{row['broker']}: {row['conditions']}")
    troubles = [f"{row['name_server']}: {row['trouble']}" for row in told["name_servers"] if row["trouble"]]
    troubles += [f"{one}: no master" for one in told["without_master"] or ()]
    if troubles:
        raise Failure(FAILED, "\n".join(troubles))


async def _describe(namesrv: str, name: str | None) -> dict[str, Any]:
    from neve.cli.brokers import brokers

    async with brokers(namesrv) as asked:
        clusters = sorted({info.cluster for info in asked.known.values()})
        if name is None and len(clusters) > 1:
            raise Failure(USAGE, f"which cluster? {', '.join(clusters)}")
        chosen = clusters[0] if name is None else name
        if chosen not in clusters:
            raise Failure(NOT_FOUND, f"the name server knows no cluster {chosen}, only {', '.join(clusters)}")
        names = [one for one in asked.named(None) if asked.known[one].cluster == chosen]
        summary = await _summary(asked, chosen)
        members = [row for one in names for row in await member_rows(asked, one)]
        return {**summary, "name_servers": await _name_servers(asked, chosen), "members": members}


async def _name_servers(asked: Brokers, cluster: str) -> list[dict[str, Any]]:
    """Each as it answers itself: clients ask any of them."""
    views: dict[str, frozenset[tuple[str, int, str]] | NeveError] = {}
    for address in asked.name_servers:
        try:
            known = await asked.known_to(address)
        except NeveError as error:
            views[address] = error
        else:
            views[address] = frozenset(
                (name, number, member)
                for name, info in known.items()
                if info.cluster == cluster
                for number, member in info.addresses.items()
            )
    everything = frozenset[tuple[str, int, str]]().union(*(v for v in views.values() if isinstance(v, frozenset)))
    return [_name_server(address, view, everything) for address, view in views.items()]


def _name_server(
    address: str, view: frozenset[tuple[str, int, str]] | NeveError, everything: frozenset[tuple[str, int, str]]
) -> dict[str, Any]:  # fmt: skip
    if isinstance(view, NeveError):
        return {"name_server": address, "members": None, "trouble": str(view)}
    lacking = sorted(f"{name} {number} ({member})" for name, number, member in everything - view)
    return {
        "name_server": address,
        "members": len(view),
        "trouble": f"does not know {', '.join(lacking)}" if lacking else None,
    }
