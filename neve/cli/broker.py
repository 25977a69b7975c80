"""`neve broker`: without a verb it runs one; with one it asks or changes a running one, of neve's or Apache's."""

from __future__ import annotations

import asyncio
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from neve.cli import completed
from neve.cli.aliases import AliasedGroup
from neve.cli.cluster import cluster_options
from neve.cli.failures import FAILED, NOT_FOUND, Failure
from neve.cli.output import ask, emit, emit_one, output_option, say

if TYPE_CHECKING:
    from typing_extensions import override

    from neve.cli.brokers import Brokers
    from neve.cli.drain import Left
else:

    def override(method: Any) -> Any:
        return method


class BrokerVerb(click.Group):
    """The verbs of a running broker beside the server's own command, which is there where the server is installed."""

    @override
    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args and args[0] in self.commands:
            return super().make_context(info_name, args, parent, **extra)
        from neve.cli.main import joined

        server = joined("broker")
        server.epilog = f"A running broker: neve broker {' | '.join(sorted(self.commands))}."
        return server.make_context(info_name, args, parent, **extra)


@click.group(cls=BrokerVerb)
def broker() -> None:
    """Run a broker; describe and change a running one."""


@broker.command()
@click.argument("name", required=False, shell_complete=completed.brokers)
@cluster_options
@output_option
def describe(name: str | None, namesrv: str, output: str) -> None:
    """Show the brokers that the name server knows, or all that one says of itself."""
    if name is None:
        rows = asyncio.run(_all(namesrv))
        emit(rows, ["broker", "cluster", "id", "address", "version", "role", "put_tps", "get_tps", "disk"], output)
        return
    emit_one(asyncio.run(_one(namesrv, name)), output)


async def _all(namesrv: str) -> list[dict[str, Any]]:
    from neve.cli.brokers import brokers

    async with brokers(namesrv) as asked:
        return [row for name in asked.named(None) for row in await member_rows(asked, name)]


async def member_rows(asked: Brokers, name: str) -> list[dict[str, Any]]:
    """A row for each member of a broker; of slaves only that they are there."""
    info = asked.known[name]
    told = await asked.runtime(name) if info.master is not None else {}
    rows = []
    for number, address in sorted(info.addresses.items()):
        is_master = address == info.master
        rows.append(
            {
                "broker": name,
                "cluster": info.cluster,
                "id": number,
                "address": address,
                "version": _version(told) if is_master else None,
                "role": "master" if is_master else "slave",
                "put_tps": first_rate(told.get("putTps")) if is_master else None,
                "get_tps": first_rate(told.get("getTotalTps")) if is_master else None,
                "disk": told.get("commitLogDiskRatio") if is_master else None,
                "conditions": told.get("conditions") if is_master else None,
            }
        )
    return rows


async def _one(namesrv: str, name: str) -> dict[str, Any]:
    from neve.cli.brokers import brokers

    async with brokers(namesrv) as asked:
        asked.named(name)
        info = asked.known[name]
        members = {str(number): address for number, address in sorted(info.addresses.items())}
        return {
            "broker": name,
            "cluster": info.cluster,
            "members": members,
            **dict(sorted((await asked.runtime(name)).items())),
        }


def _version(told: Mapping[str, str]) -> str | None:
    """neve's own version, or the version of Apache RocketMQ."""
    own = told.get("neveVersion")
    return told.get("brokerVersionDesc") if own is None else f"neve {own}"


def first_rate(rates: str | None) -> float | None:
    """Of the last ten seconds; a minute and ten are behind it. A broker that has just begun has none yet."""
    words = (rates or "").split()
    return round(float(words[0]), 1) if words else None


@broker.group(cls=AliasedGroup)
def config() -> None:
    """The configuration of a running broker."""


@config.command(name="get")
@click.argument("name", metavar="BROKER", shell_complete=completed.brokers)
@click.argument("keys", nargs=-1, metavar="[KEY...]")
@cluster_options
@output_option
def get_config(name: str, keys: tuple[str, ...], namesrv: str, output: str) -> None:
    """Show what is in force: all, or the keys that are named; a KEY may have * in it.

    INSTEAD_OF is what a key would be, had it not been set on the running broker; Apache's brokers do not tell that.
    """
    found, kept = asyncio.run(_config(namesrv, name))
    found = shown(found)
    unknown = [key for key in keys if not fnmatch.filter(found, key)]
    if keys:
        found = {key: found[key] for key in found if any(fnmatch.fnmatchcase(key, wanted) for wanted in keys)}
    if kept is None:
        emit([{"key": key, "value": value} for key, value in found.items()], ["key", "value"], output)
    else:
        rows = [{"key": key, "value": value, "instead_of": kept.get(key)} for key, value in found.items()]
        emit(rows, ["key", "value", *(["instead_of"] if kept.keys() & found.keys() else [])], output)
    if unknown:
        raise Failure(NOT_FOUND, f"{name} has no {', '.join(unknown)}")


#: Of Apache's brokers, which tell them to whoever may ask; neve's do not tell them.
_SECRET = re.compile("credential|password|secret|initAuthenticationUser", re.IGNORECASE)


def shown(settings: Mapping[str, str]) -> dict[str, str]:
    """Without what is nobody's to read on a terminal or in a log."""
    return {key: "(set, not shown)" if value and _SECRET.search(key) else value for key, value in settings.items()}


async def _config(namesrv: str, name: str) -> tuple[dict[str, str], dict[str, str] | None]:
    from neve.cli.brokers import brokers

    async with brokers(namesrv) as asked:
        asked.named(name)
        return await asked.config_and_kept(name)


@config.command(name="set")
@click.argument("name", metavar="BROKER", shell_complete=completed.brokers)
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...")
@cluster_options
def set_config(name: str, settings: tuple[str, ...], namesrv: str) -> None:
    """Change keys while the broker runs: all of them or none.

    Of neve's brokers the keys that docs/reference.md marks live. A broker keeps what was set: Apache's in its file,
    neve's beside its data, where it holds over the file and the command line until `config unset`.
    """
    changes = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise click.BadParameter(f"{text!r} is not KEY=VALUE")
        changes[key.strip()] = value.strip()
    before, after, others = asyncio.run(_set_config(namesrv, name, changes))
    _tell_changes(name, changes, (before, after))
    if others:
        say(f"that is its master; each member keeps its own configuration, {', '.join(others)} as they were")


@config.command(name="unset")
@click.argument("name", metavar="BROKER", shell_complete=completed.brokers)
@click.argument("keys", nargs=-1, metavar="[KEY...]")
@click.option("--all", "everything", is_flag=True, help="All that was set while it ran.")
@cluster_options
def unset_config(name: str, keys: tuple[str, ...], everything: bool, namesrv: str) -> None:
    """Take back what `config set` changed: the keys are again as the broker's file and command line have them."""
    if bool(keys) is everything:
        raise click.UsageError("which keys, or --all")
    gone, told = asyncio.run(_unset_config(namesrv, name, keys))
    _tell_changes(name, gone, told)


def _tell_changes(name: str, keys: Iterable[str], told: tuple[dict[str, str], dict[str, str]]) -> None:
    before, after = map(shown, told)
    for key in keys:
        say(f"{name}: {key} {before.get(key, '')} → {after.get(key, '')}")


async def _set_config(
    namesrv: str, name: str, changes: dict[str, str]
) -> tuple[dict[str, str], dict[str, str], list[str]]:
    from neve.cli.brokers import brokers

    async with brokers(namesrv) as asked:
        asked.named(name)
        before = await asked.config(name)
        if unknown := sorted(changes.keys() - before.keys()):
            raise Failure(NOT_FOUND, f"{name} has no {', '.join(unknown)}")
        await asked.set_config(name, changes)
        info = asked.known[name]
        others = [address for _, address in sorted(info.addresses.items()) if address != info.master]
        return before, await asked.config(name), others


async def _unset_config(
    namesrv: str, name: str, keys: Sequence[str]
) -> tuple[list[str], tuple[dict[str, str], dict[str, str]]]:
    from neve.cli.brokers import brokers

    async with brokers(namesrv) as asked:
        asked.named(name)
        before, kept = await asked.config_and_kept(name)
        if kept is None:
            raise Failure(
                FAILED, f"{name} does not say what it had before: an Apache broker writes changes to its file"
            )
        if unknown := sorted({*keys} - kept.keys()):
            raise Failure(NOT_FOUND, f"not set on the running broker: {', '.join(unknown)}")
        gone = [*keys] or sorted(kept)
        if gone:
            await asked.set_config(name, {}, gone)
        return gone, (before, await asked.config(name))


@broker.command(name="wipe-write")
@click.argument("name", metavar="BROKER", shell_complete=completed.brokers)
@click.option("--yes", is_flag=True, help="Do not ask.")
@cluster_options
def wipe_write(name: str, yes: bool, namesrv: str) -> None:
    """Send nothing more to a broker: name servers tell producers of it no more. It is read from as before.

    It holds at these name servers until `add-write`, or until they start anew. Clients ask for routes every 30 s.
    """
    if not yes:
        ask(f"Shall producers send nothing more to {name}?")
    for address, topics in asyncio.run(_write(namesrv, name, wiped=True)).items():
        say(f"{address}: {topics} topics of {name} are written no more")


@broker.command(name="add-write")
@click.argument("name", metavar="BROKER", shell_complete=completed.brokers)
@cluster_options
def add_write(name: str, namesrv: str) -> None:
    """Let producers send to a broker again, after `wipe-write`."""
    for address, topics in asyncio.run(_write(namesrv, name, wiped=False)).items():
        say(f"{address}: {topics} topics of {name} are written again")


async def _write(namesrv: str, name: str, *, wiped: bool) -> dict[str, int]:
    from neve.cli.brokers import brokers

    async with brokers(namesrv) as asked:
        asked.named(name)
        return await (asked.wipe_write_permission(name) if wiped else asked.add_write_permission(name))


@broker.command()
@click.argument("name", metavar="BROKER", shell_complete=completed.brokers)
@click.option(
    "--within", type=click.FloatRange(0), default=3600.0, show_default=True, metavar="SECONDS", help="Wait so long."
)
@click.option(
    "--ignore", "ignored", multiple=True, metavar="GROUP", help="Do not wait for this group; may be repeated."
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@cluster_options
def drain(name: str, within: float, ignored: tuple[str, ...], yes: bool, namesrv: str) -> None:
    """Take a broker out of producers' routes, and wait until nothing that is on it is waited for.

    That is what consumer groups have still to read there, delayed messages, timers and transactions that wait (the
    last two an Apache broker does not tell). Exit code 1 when something is left; the broker stays out of the routes
    until `add-write`. Another broker has to have the topics. Clients ask for routes every 30 s, and send until then.
    """
    if not yes:
        ask(f"Shall producers send nothing more to {name}?")
    left = asyncio.run(_drain(namesrv, name, within, frozenset(ignored)))
    if left.timers is None:
        say(f"{name} does not tell what timers and transactions it has")
    say(f"nothing is left at {name}: it may be stopped")


async def _drain(namesrv: str, name: str, within: float, ignored: frozenset[str]) -> Left:
    from neve.cli.brokers import brokers
    from neve.cli.consumer_groups import consumer_groups
    from neve.cli.drain import until_nothing_is_left

    async with brokers(namesrv) as asked, consumer_groups(namesrv, name) as groups:
        asked.named(name)
        for address, topics in (await asked.wipe_write_permission(name)).items():
            say(f"{address}: {topics} topics of {name} are written no more")
        return await until_nothing_is_left(asked, groups, name, ignored, within, lambda left: say(f"left: {left}"))
