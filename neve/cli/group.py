"""`neve group`: the consumer groups of the cluster behind a name server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from neve.cli import completed
from neve.cli.aliases import AliasedGroup
from neve.cli.cluster import cluster_options
from neve.cli.failures import CONFLICT, FAILED, NOT_FOUND, USAGE, Failure
from neve.cli.group_moves import Move, is_within, move
from neve.cli.lag import behind_text, row, share_text, total_cold, total_lag
from neve.cli.output import ask, emit, emit_one, output_option, say
from neve.remoting.names import is_retry_or_dlq

if TYPE_CHECKING:
    from neve.cli.consumer_groups import Connected, ConsumerGroups
    from neve.cli.lag import Standing
    from neve.remoting.body import MessageQueue

_BROADCASTING = "broadcasting"
_QUEUE_COLUMNS = ("topic", "broker", "queue", "position", "max_offset", "lag", "behind", "cold")

topic_option = click.option("--topic", help="Only in this topic; otherwise in all where the group has a position.")


@click.group(cls=AliasedGroup)
def group() -> None:
    """Consumer groups: members, lag, where they stand and go on.

    LAG is what is left to read, in messages. COLD is how many of them are in the archive alone; it is empty where no
    broker tells of an archived part, as Apache RocketMQ's never do.
    """


# ---- looking


@group.command(name="list")
@click.option("--all", "everything", is_flag=True, help="Also the servers' own groups.")
@cluster_options
@output_option
def list_groups(everything: bool, namesrv: str, output: str) -> None:
    """List the groups of all brokers."""
    rows = asyncio.run(summaries(namesrv, everything))
    emit(rows, ["group", "type", "model", "members", "lag", "cold"], output)


async def summaries(namesrv: str, everything: bool = False) -> list[dict[str, Any]]:
    """A row for each group of all brokers."""
    from neve.cli.consumer_groups import consumer_groups
    from neve.remoting.names import is_system_group

    async with consumer_groups(namesrv) as groups:
        names = [name for name in await groups.settings() if everything or not is_system_group(name)]
        return list(await asyncio.gather(*(_summary(groups, name) for name in names)))


async def _summary(groups: ConsumerGroups, name: str) -> dict[str, Any]:
    connected, standings = await asyncio.gather(groups.connected(name), groups.standings(name))
    counts = _counted(connected)
    return {
        "group": name,
        "type": connected.mode,
        "model": connected.model,
        "members": len(connected.members),
        "lag": total_lag(standings) if counts else None,
        "cold": total_cold(standings) if counts else None,
    }


def _counted(connected: Connected) -> bool:
    """Members that read everything keep their positions themselves: what brokers have is none of the group's."""
    return connected.model != _BROADCASTING


@group.command()
@click.argument("name", metavar="GROUP", shell_complete=completed.groups)
@cluster_options
@output_option
def describe(name: str, namesrv: str, output: str) -> None:
    """Show a group's settings, its members, and its position in each queue."""
    about, members, queues = asyncio.run(_describe(namesrv, name))
    if output == "json":
        emit_one({**about, "members": members, "queues": queues}, output)
        return
    emit_one(about, output)
    click.echo()
    emit(members, ["client_id", "address", "version", "language"], output)
    click.echo()
    emit(queues, ["topic", "broker", "queue", "position", "min_offset", "max_offset", "lag", "cold"], output)


async def _describe(namesrv: str, name: str) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    from neve.cli.consumer_groups import consumer_groups

    async with consumer_groups(namesrv) as groups:
        settings = await groups.settings_of(name)
        connected, standings = await asyncio.gather(groups.connected(name), groups.standings(name))
    if len({repr(sorted(one.items())) for one in settings.values()}) > 1:
        say(f"the settings differ from broker to broker: those of {min(settings)} are shown")
    about = {
        "group": name,
        "brokers": sorted(settings),
        "type": connected.mode,
        "model": connected.model,
        **{_spelled(key): value for key, value in settings[min(settings)].items() if key != "groupName"},
        "lag": total_lag(standings) if _counted(connected) else None,
        "cold": total_cold(standings) if _counted(connected) else None,
    }
    members = [
        {"client_id": one.client_id, "address": one.address, "version": one.version, "language": one.language}
        for one in connected.members
    ]
    return about, members, [row(one) for one in standings]


def _spelled(key: str) -> str:
    """RocketMQ's name of a setting as the other fields are written."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in key)


@group.command()
@click.argument("name", metavar="GROUP", shell_complete=completed.groups)
@topic_option
@cluster_options
@output_option
def lag(name: str, topic: str | None, namesrv: str, output: str) -> None:
    """Show how far a group is behind: in messages, and how long the oldest that it has not read has waited.

    The time is that of the message itself, which is read for it: BEHIND is empty where it can't be read now.
    """
    rows = asyncio.run(_lag(namesrv, name, topic))
    emit(rows, _QUEUE_COLUMNS, output)


async def _lag(namesrv: str, name: str, topic: str | None) -> list[dict[str, Any]]:
    from neve.cli.consumer_groups import consumer_groups
    from neve.clock import system_now_ms

    async with consumer_groups(namesrv) as groups:
        await groups.settings_of(name)
        connected, standings = await asyncio.gather(groups.connected(name), groups.standings(name, topic))
        waiting = await groups.oldest_waiting(standings)
    if not _counted(connected):
        say(f"the members of {name} keep their positions themselves (broadcasting): brokers' are shown")
    now = system_now_ms()
    behind = {queue: None if since is None else max(0, now - since) for queue, since in waiting.items()}
    _say_total(name, standings, max((one for one in behind.values() if one is not None), default=0))
    return [row(one, behind.get(one.queue) if one.lag else 0, told=True) for one in standings]


def _say_total(name: str, standings: list[Standing], behind_ms: int) -> None:
    messages = total_lag(standings)
    cold = share_text(total_cold(standings), messages)
    what = (
        f"{messages} messages behind, the oldest for {behind_text(behind_ms)}" if messages else "nothing left to read"
    )
    say(f"{name}: {what}" + (f", {cold} cold" if cold is not None and messages else ""))


@group.command()
@click.argument("name", metavar="GROUP", shell_complete=completed.groups)
@cluster_options
@output_option
def members(name: str, namesrv: str, output: str) -> None:
    """Show who of a group is connected, and the queues that each of them reads now, as it says itself.

    QUEUES is `?` for a member that does not say.
    """
    found = asyncio.run(_members(namesrv, name))
    if output == "table":
        for member in found:
            member["queues"] = _queues_text(member["queues"])
    emit(found, ["client_id", "address", "version", "language", "queues"], output)


async def _members(namesrv: str, name: str) -> list[dict[str, Any]]:
    from neve.cli.consumer_groups import consumer_groups

    async with consumer_groups(namesrv) as groups:
        connected = await groups.connected(name)
        if not connected.members:
            await groups.settings_of(name)
        held = await asyncio.gather(*(groups.held_by(name, member) for member in connected.members))
    return [
        {
            "client_id": member.client_id,
            "address": member.address,
            "version": member.version,
            "language": member.language,
            "queues": None
            if queues is None
            else [{"topic": one.topic, "broker": one.broker_name, "queue": one.queue_id} for one in queues],
        }
        for member, queues in zip(connected.members, held, strict=True)
    ]


def _queues_text(queues: list[dict[str, Any]] | None) -> str:
    if queues is None:
        return "?"
    numbers: dict[str, list[str]] = {}
    for one in queues:
        numbers.setdefault(f"{one['topic']}@{one['broker']}", []).append(str(one["queue"]))
    return " ".join(f"{place}:{','.join(held)}" for place, held in numbers.items())


# ---- changing

yes_option = click.option("--yes", is_flag=True, help="Do not ask.")


@group.command()
@click.argument("name", metavar="GROUP", shell_complete=completed.groups)
@click.option("--earliest", is_flag=True, help="To the first message that there is.")
@click.option("--latest", is_flag=True, help="To the end: what is there now is skipped.")
@click.option("--to-time", metavar="TIME", help="To the first message stored then or later: ISO 8601.")
@click.option("--to-offset", type=click.IntRange(0), metavar="OFFSET", help="To this offset (with --topic).")
@topic_option
@click.option("--queue", type=click.IntRange(0), help="Only this queue, of each broker (with --topic).")
@click.option("--broker", help="Only the queues of this broker (with --topic).")
@click.option("--dry-run", is_flag=True, help="Show what would become of each queue, and change nothing.")
@yes_option
@cluster_options
@output_option
def reset(  # noqa: PLR0917 - the command line's own
    name: str,
    earliest: bool,
    latest: bool,
    to_time: str | None,
    to_offset: int | None,
    topic: str | None,
    queue: int | None,
    broker: str | None,
    dry_run: bool,
    yes: bool,
    namesrv: str,
    output: str,
) -> None:
    """Send a group somewhere else: what it will skip or read again is shown before, and just that is done.

    Without --topic in all topics where it has a position, but not in its retries. COLD is how many of the messages
    that are skipped or read again only the archive has.
    """
    if sum([earliest, latest, to_time is not None, to_offset is not None]) != 1:
        raise click.UsageError("where to? one of --earliest, --latest, --to-time, --to-offset")
    if topic is None and (to_offset is not None or queue is not None or broker is not None):
        raise click.UsageError("--to-offset, --queue and --broker go with --topic")
    target = _Target(earliest, None if to_time is None else _time(to_time), to_offset)
    work = _Reset(name, topic, queue, broker)
    moves, connected = asyncio.run(work.plan(namesrv, target))
    emit(
        [one.row() for one in moves],
        ["topic", "broker", "queue", "position", "target", "skipped", "again", "cold"],
        output,
    )
    _say_moves(name, moves)
    if dry_run:
        if connected:
            say(f"{connected} members are connected: it is refused until they are stopped")
        return
    _refuse_connected(name, connected)
    if not yes:
        ask(f"Set the position of {name} in {len(moves)} queues?")
    asyncio.run(work.carry_out(namesrv, moves))
    say(f"reset {name} in {len(moves)} queues")


class _Target(NamedTuple):
    """Where to; the end of each queue, unless it says otherwise."""

    earliest: bool
    time_ms: int | None
    offset: int | None

    async def within(self, groups: ConsumerGroups, one: Standing) -> int:
        if self.earliest:
            return one.min_offset
        if self.offset is not None:
            return self.offset
        if self.time_ms is None:
            return one.max_offset
        return min(max(await groups.offset_by_time(one.queue, self.time_ms), one.min_offset), one.max_offset)


class _Reset(NamedTuple):
    """Of a group, in the queues that are meant."""

    group: str
    topic: str | None
    queue: int | None
    broker: str | None

    async def plan(self, namesrv: str, target: _Target) -> tuple[list[Move], int]:
        """What would become of each queue, and how many members are connected."""
        from neve.cli.consumer_groups import consumer_groups

        async with consumer_groups(namesrv) as groups:
            await groups.settings_of(self.group)
            connected = await groups.connected(self.group)
            if not _counted(connected):
                raise Failure(CONFLICT, f"the members of {self.group} keep their positions themselves (broadcasting)")
            meant = [one for one in await groups.standings(self.group, self.topic) if self._means(one.queue)]
            if not meant:
                where = (
                    "no position anywhere: name a --topic" if self.topic is None else f"no such queue of {self.topic}"
                )
                raise Failure(NOT_FOUND, f"{self.group} has {where}")
            targets = await asyncio.gather(*(target.within(groups, one) for one in meant))
        moves = [move(one, offset) for one, offset in zip(meant, targets, strict=True)]
        outside = [one.standing for one in moves if not is_within(one.standing, one.target)]
        if outside:
            one = outside[0]
            has = f"queue {one.queue.queue_id} of {one.queue.broker_name} has {one.min_offset} to {one.max_offset}"
            raise Failure(USAGE, f"{target.offset} lies outside: {has}")
        return moves, len(connected.members)

    async def carry_out(self, namesrv: str, moves: list[Move]) -> None:
        """One queue after the other: where it ends early, it is told how far it came."""
        from neve.cli.consumer_groups import consumer_groups
        from neve.errors import NeveError

        async with consumer_groups(namesrv) as groups:
            # somebody had time to connect since it was shown
            _refuse_connected(self.group, len((await groups.connected(self.group)).members))
            for done, one in enumerate(moves):
                queue = one.standing.queue
                try:
                    await groups.reset(self.group, queue, one.target)
                except (Failure, NeveError) as error:
                    where = f"queue {queue.queue_id} of {queue.topic} at {queue.broker_name}"
                    code = error.exit_code if isinstance(error, Failure) else FAILED
                    raise Failure(code, f"{where}: {error}; {done} of {len(moves)} queues were set") from error

    def _means(self, queue: MessageQueue) -> bool:
        if self.topic is None and is_retry_or_dlq(queue.topic):
            return False
        return self.queue in {None, queue.queue_id} and self.broker in {None, queue.broker_name}


def _time(text: str) -> int:
    from neve.cli.times import to_ms

    return to_ms(text)


def _say_moves(name: str, moves: list[Move]) -> None:
    skipped, again = sum(one.skipped for one in moves), sum(one.again for one in moves)
    told = [one.cold for one in moves if one.cold is not None]
    cold = share_text(sum(told) if told else None, skipped + again)
    say(f"{name}: {skipped} messages skipped, {again} read again" + (f", {cold} of them cold" if cold else ""))


def _refuse_connected(name: str, connected: int) -> None:
    """A member that goes on with what it has at hand would commit over it."""
    if connected:
        raise Failure(CONFLICT, f"{connected} members of {name} are connected: stop them first")


@group.command()
@click.argument("name", metavar="GROUP", shell_complete=completed.groups)
@yes_option
@cluster_options
def delete(name: str, yes: bool, namesrv: str) -> None:
    """Delete a group and its positions at all brokers.

    Its retries and dead letters stay: `neve topic delete %RETRY%GROUP` and `%DLQ%GROUP` remove them.
    """
    if not yes:
        ask(f"Delete group {name} and its positions?")
    asyncio.run(_delete(namesrv, name))
    say(f"deleted {name}")


async def _delete(namesrv: str, name: str) -> None:
    from neve.cli.consumer_groups import consumer_groups

    async with consumer_groups(namesrv) as groups:
        brokers = sorted(await groups.settings_of(name))
        _refuse_connected(name, len((await groups.connected(name)).members))
        await groups.delete(name, brokers)
