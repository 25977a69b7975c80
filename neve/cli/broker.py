"""`neve broker`: without a verb it runs a broker; with one it shows or changes a running one, of neve or Apache."""

from __future__ import annotations

import asyncio
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from neve.cli import completed
from neve.cli.aliases import VerbGroup
from neve.cli.cluster import administer, cluster_options
from neve.cli.failures import FAILED, NOT_FOUND, Failure
from neve.cli.options import DURATION, yes_option
from neve.cli.output import ask, emit, emit_one, output_option, say

if TYPE_CHECKING:
    from typing_extensions import override

    from neve.admin import ClusterAdmin
    from neve.admin.brokers import BrokerConfiguration
    from neve.admin.drain import Remaining
else:

    def override(method: Any) -> Any:
        return method


class BrokerVerb(VerbGroup):
    """The verbs for running brokers beside the command of the server, which exists if the server is installed."""

    @override
    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args and not args[0].startswith("-") and self.get_command(click.Context(self), args[0]) is not None:
            return super().make_context(info_name, args, parent, **extra)
        from neve.cli.main import joined

        server = joined("broker")
        server.epilog = f"For a running broker: neve broker {' | '.join(sorted(self.commands))}."
        return server.make_context(info_name, args, parent, **extra)


@click.group(cls=BrokerVerb)
def broker() -> None:
    """Run a broker; show and change a running one."""


broker_argument = click.argument("name", metavar="BROKER", shell_complete=completed.brokers)


# ---- read


@broker.command(name="list")
@cluster_options
@output_option
def list_brokers(namesrv: str, output: str) -> None:
    """List the members of all brokers that the name server knows."""
    rows = asyncio.run(_list(namesrv))
    emit(rows, ["broker", "cluster", "id", "address", "version", "role", "put_tps", "get_tps", "disk"], output)


async def _list(namesrv: str) -> list[dict[str, Any]]:
    async with administer(namesrv) as admin:
        return [row for name in admin.brokers.require(None) for row in await member_rows(admin, name)]


async def member_rows(admin: ClusterAdmin, name: str) -> list[dict[str, Any]]:
    """Return a row for each member of a broker; only masters report figures."""
    info = admin.brokers.known[name]
    runtime = await admin.brokers.runtime(name) if info.master is not None else {}
    rows = []
    for number, address in sorted(info.addresses.items()):
        is_master = address == info.master
        rows.append(
            {
                "broker": name,
                "cluster": info.cluster,
                "id": number,
                "address": address,
                "version": _version(runtime) if is_master else None,
                "role": "master" if is_master else "slave",
                "put_tps": latest_rate(runtime.get("putTps")) if is_master else None,
                "get_tps": latest_rate(runtime.get("getTotalTps")) if is_master else None,
                "disk": runtime.get("commitLogDiskRatio") if is_master else None,
                "conditions": runtime.get("conditions") if is_master else None,
            }
        )
    return rows


@broker.command()
@click.argument("name", metavar="BROKER", required=False, shell_complete=completed.brokers)
@cluster_options
@output_option
@click.pass_context
def show(context: click.Context, name: str | None, namesrv: str, output: str) -> None:
    """Show all figures that a broker reports of itself."""
    if name is None:  # `describe` without a broker was the list
        context.invoke(list_brokers, namesrv=namesrv, output=output)
        return
    emit_one(asyncio.run(_show(namesrv, name)), output)


async def _show(namesrv: str, name: str) -> dict[str, Any]:
    async with administer(namesrv) as admin:
        admin.brokers.require(name)
        info = admin.brokers.known[name]
        members = {str(number): address for number, address in sorted(info.addresses.items())}
        runtime = dict(sorted((await admin.brokers.runtime(name)).items()))
        return {"broker": name, "cluster": info.cluster, "members": members, **runtime}


def _version(runtime: Mapping[str, str]) -> str | None:
    """Return the version of neve, or of Apache RocketMQ."""
    own = runtime.get("neveVersion")
    return runtime.get("brokerVersionDesc") if own is None else f"neve {own}"


def latest_rate(rates: str | None) -> float | None:
    """Return the first of the rates over 10 s, 1 min and 10 min; None for a broker without a sample yet."""
    words = (rates or "").split()
    return round(float(words[0]), 1) if words else None


# ---- configuration


@broker.group(cls=VerbGroup)
def config() -> None:
    """The configuration of a running broker."""


@config.command(name="show")
@broker_argument
@click.argument("keys", nargs=-1, metavar="[KEY...]")
@cluster_options
@output_option
def show_config(name: str, keys: tuple[str, ...], namesrv: str, output: str) -> None:
    """Show the configuration in force: all keys, or those that are named. A KEY may contain *.

    INSTEAD_OF is the configured value of a key that was set on the running broker. Apache's brokers do not report it.
    """
    values, overridden = asyncio.run(_configuration(namesrv, name))
    values = without_secrets(values)
    unknown = [key for key in keys if not fnmatch.filter(values, key)]
    if keys:
        values = {key: values[key] for key in values if any(fnmatch.fnmatchcase(key, wanted) for wanted in keys)}
    if overridden is None:
        emit([{"key": key, "value": value} for key, value in values.items()], ["key", "value"], output)
    else:
        rows = [{"key": key, "value": value, "instead_of": overridden.get(key)} for key, value in values.items()]
        emit(rows, ["key", "value", *(["instead_of"] if overridden.keys() & values.keys() else [])], output)
    if unknown:
        raise Failure(NOT_FOUND, f"broker {name} has no key {', '.join(unknown)}")


# Apache's brokers report such values to every permitted reader of the configuration; neve's do not report them.
_SECRET = re.compile("credential|password|secret|initAuthenticationUser", re.IGNORECASE)


def without_secrets(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings with secret values replaced."""
    return {key: "(set, not shown)" if value and _SECRET.search(key) else value for key, value in settings.items()}


async def _configuration(namesrv: str, name: str) -> BrokerConfiguration:
    async with administer(namesrv) as admin:
        admin.brokers.require(name)
        return await admin.brokers.configuration(name)


@config.command(name="set")
@broker_argument
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...")
@cluster_options
def set_config(name: str, settings: tuple[str, ...], namesrv: str) -> None:
    """Change keys of a running broker, all of them or none.

    neve's brokers accept the keys that docs/reference/configuration.md marks as live. The change is durable. Apache's
    brokers write it to their file; neve's store it beside their data, where it overrides file and command line until
    `config unset`.
    """
    changes = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise click.BadParameter(f"{text!r} is not KEY=VALUE")
        changes[key.strip()] = value.strip()
    before, after, slaves = asyncio.run(_set_config(namesrv, name, changes))
    _print_changes(name, changes, before, after)
    if slaves:
        say(f"only the master was changed; each member has its own configuration: {', '.join(slaves)}")


@config.command(name="unset")
@broker_argument
@click.argument("keys", nargs=-1, metavar="[KEY...]")
@click.option("--all", "everything", is_flag=True, help="All keys that were set on the running broker.")
@cluster_options
def unset_config(name: str, keys: tuple[str, ...], everything: bool, namesrv: str) -> None:
    """Restore the configured values of keys that `config set` changed."""
    if bool(keys) is everything:
        raise click.UsageError("give the keys, or --all")
    restored, before, after = asyncio.run(_unset_config(namesrv, name, keys))
    _print_changes(name, restored, before, after)


def _print_changes(name: str, keys: Iterable[str], before: Mapping[str, str], after: Mapping[str, str]) -> None:
    before, after = without_secrets(before), without_secrets(after)
    for key in keys:
        say(f"{name}: {key} {before.get(key, '')} → {after.get(key, '')}")


async def _set_config(
    namesrv: str, name: str, changes: dict[str, str]
) -> tuple[dict[str, str], dict[str, str], list[str]]:
    async with administer(namesrv) as admin:
        admin.brokers.require(name)
        before = (await admin.brokers.configuration(name)).values
        if unknown := sorted(changes.keys() - before.keys()):
            raise Failure(NOT_FOUND, f"broker {name} has no key {', '.join(unknown)}")
        await admin.brokers.configure(name, changes)
        info = admin.brokers.known[name]
        slaves = [address for _, address in sorted(info.addresses.items()) if address != info.master]
        return before, (await admin.brokers.configuration(name)).values, slaves


async def _unset_config(
    namesrv: str, name: str, keys: Sequence[str]
) -> tuple[list[str], dict[str, str], dict[str, str]]:
    async with administer(namesrv) as admin:
        admin.brokers.require(name)
        before, overridden = await admin.brokers.configuration(name)
        if overridden is None:
            raise Failure(
                FAILED,
                f"broker {name} does not report its configured values: Apache's brokers write changes to their file. "
                "Use `neve broker config set` with the former value",
            )
        if unknown := sorted({*keys} - overridden.keys()):
            raise Failure(NOT_FOUND, f"not set on the running broker {name}: {', '.join(unknown)}")
        restored = [*keys] or sorted(overridden)
        if restored:
            await admin.brokers.configure(name, {}, restored)
        return restored, before, (await admin.brokers.configuration(name)).values


# ---- write permission


@broker.command(name="set")
@broker_argument
@click.option("--writes/--no-writes", "writes", default=None, help="Whether producers send to the broker.")
@yes_option
@cluster_options
def set_broker(name: str, writes: bool | None, yes: bool, namesrv: str) -> None:
    """Let producers send to a broker, or not; consumers read from it in either case.

    The name servers keep it until the next `broker set`, or until they restart. Producers follow within 30 s.
    """
    if writes is None:
        raise click.UsageError("nothing to change: give --writes or --no-writes")
    _set_writes(namesrv, name, writes=writes, yes=yes)


def _set_writes(namesrv: str, name: str, *, writes: bool, yes: bool) -> None:
    if not writes and not yes:
        ask(f"Stop producers from sending to broker {name}?")
    for address, topics in asyncio.run(_write_permission(namesrv, name, writes=writes)).items():
        say(_write_permission_text(address, name, topics, writes=writes))


def _write_permission_text(address: str, name: str, topics: int, *, writes: bool) -> str:
    return f"name server {address}: producers {'send' if writes else 'no longer send'} to {topics} topics of {name}"


async def _write_permission(namesrv: str, name: str, *, writes: bool) -> dict[str, int]:
    async with administer(namesrv) as admin:
        admin.brokers.require(name)
        brokers = admin.brokers
        return await (brokers.restore_write_permission(name) if writes else brokers.withdraw_write_permission(name))


@click.command()
@broker_argument
@yes_option
@cluster_options
def wipe_write(name: str, yes: bool, namesrv: str) -> None:
    """Same as `broker set --no-writes`; the word of mqadmin."""
    _set_writes(namesrv, name, writes=False, yes=yes)


@click.command()
@broker_argument
@cluster_options
def add_write(name: str, namesrv: str) -> None:
    """Same as `broker set --writes`; the word of mqadmin."""
    _set_writes(namesrv, name, writes=True, yes=True)


assert isinstance(broker, BrokerVerb)
broker.former |= {"wipe-write": wipe_write, "add-write": add_write}


@broker.command()
@broker_argument
@click.option(
    "--within", type=DURATION, default="1h", show_default=True, metavar="DURATION", help="Fail if it takes longer."
)
@click.option(
    "--ignore", "ignored", multiple=True, metavar="GROUP", help="Do not wait for this group; may be repeated."
)
@yes_option
@cluster_options
def drain(name: str, within: float, ignored: tuple[str, ...], yes: bool, namesrv: str) -> None:
    """Stop producers from sending to a broker, and wait until all its messages are delivered.

    It waits for messages that consumer groups have not read, for delayed messages, timers and transactions. Apache's
    brokers do not report the last two. Exit code 1: messages remain. Producers do not send to the broker until
    `broker set --writes`. Another broker must have the topics. Producers follow within 30 s.
    """
    if not yes:
        ask(f"Stop producers from sending to broker {name}?")
    remaining = asyncio.run(_drain(namesrv, name, within, frozenset(ignored)))
    if remaining.timers is None:
        say(f"broker {name} does not report timers and transactions")
    say(f"broker {name} holds no undelivered message: it may be stopped")


async def _drain(namesrv: str, name: str, within: float, ignored: frozenset[str]) -> Remaining:
    from neve.admin.drain import wait_until_drained

    async with administer(namesrv) as admin:
        admin.brokers.require(name)
        for address, topics in (await admin.brokers.withdraw_write_permission(name)).items():
            say(_write_permission_text(address, name, topics, writes=False))
        return await wait_until_drained(
            admin, name, ignored=ignored, seconds=within, report=lambda remaining: say(f"remaining: {remaining}")
        )
