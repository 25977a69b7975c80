"""`neve group`: consumer groups, their members, lag and committed offsets."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from neve.cli import completed
from neve.cli.aliases import VerbGroup, option
from neve.cli.cluster import administer, cluster_options
from neve.cli.failures import CONFLICT, FAILED, NOT_FOUND, USAGE, Failure
from neve.cli.lag import behind_text, lag_row, progress_row, share_text
from neve.cli.options import INSTANT, broker_option, queue_option, yes_option
from neve.cli.output import ask, emit, emit_one, output_option, say
from neve.errors import NeveError
from neve.remoting.names import is_retry_or_dlq, is_system_group

if TYPE_CHECKING:
    from neve.admin import ClusterAdmin, Groups
    from neve.admin.lag import QueueProgress
    from neve.admin.offset_reset import OffsetReset
    from neve.remoting.body import MessageQueue

_LAG_COLUMNS = ("topic", "broker", "queue", "committed", "max_offset", "lag", "behind", "cold")
_RESET_COLUMNS = ("topic", "broker", "queue", "committed", "target", "skipped", "repeated", "cold")

group_argument = click.argument("name", metavar="GROUP", shell_complete=completed.groups)
topic_option = click.option(
    "-t", "--topic", shell_complete=completed.topics, help="Only in this topic.  [default: all where it has an offset]"
)


@click.group(cls=VerbGroup)
def group() -> None:
    """Consumer groups: members, lag, committed offsets.

    LAG is the number of messages left to read, and COLD how many of them exist in the archive only. COLD is empty if no
    broker has an archive, as with Apache RocketMQ.
    """


# ---- read


@group.command(name="list")
@click.option("--all", "everything", is_flag=True, help="Include the groups of servers.")
@cluster_options
@output_option
def list_groups(everything: bool, namesrv: str, output: str) -> None:
    """List the groups of all brokers."""
    rows = asyncio.run(summaries(namesrv, everything))
    emit(rows, ["group", "type", "model", "members", "lag", "cold"], output)


async def summaries(namesrv: str, everything: bool = False) -> list[dict[str, Any]]:
    """Return a row for each group of all brokers."""
    async with administer(namesrv) as admin:
        names = [name for name in await admin.groups.settings() if everything or not is_system_group(name)]
        return list(await asyncio.gather(*(_summary(admin, name) for name in names)))


async def _summary(admin: ClusterAdmin, name: str) -> dict[str, Any]:
    from neve.admin.lag import total_cold, total_lag

    connections, progress = await asyncio.gather(admin.groups.connections(name), admin.groups.progress(name))
    has_offsets = not connections.is_broadcasting
    return {
        "group": name,
        "type": connections.mode,
        "model": connections.model,
        "members": len(connections.members),
        "lag": total_lag(progress) if has_offsets else None,
        "cold": total_cold(progress) if has_offsets else None,
    }


@group.command()
@group_argument
@cluster_options
@output_option
def show(name: str, namesrv: str, output: str) -> None:
    """Show the settings of a group, its members, and its committed offset in each queue."""
    about, members, queues = asyncio.run(_show(namesrv, name))
    if output == "json":
        emit_one({**about, "members": members, "queues": queues}, output)
        return
    emit_one(about, output)
    click.echo()
    emit(members, ["client_id", "address", "version", "language"], output)
    click.echo()
    emit(queues, ["topic", "broker", "queue", "committed", "min_offset", "max_offset", "lag", "cold"], output)


async def _show(namesrv: str, name: str) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    async with administer(namesrv) as admin:
        settings = await admin.groups.settings_of(name)
        summary = await _summary(admin, name)
        connections, progress = await asyncio.gather(admin.groups.connections(name), admin.groups.progress(name))
    if len({repr(sorted(one.items())) for one in settings.values()}) > 1:
        say(f"the settings differ between brokers: those of {min(settings)} are shown")
    about = {
        "group": name,
        "brokers": sorted(settings),
        "type": connections.mode,
        "model": connections.model,
        **{_snake_case(key): value for key, value in settings[min(settings)].items() if key != "groupName"},
        "lag": summary["lag"],
        "cold": summary["cold"],
    }
    members = [
        {"client_id": one.client_id, "address": one.address, "version": one.version, "language": one.language}
        for one in connections.members
    ]
    return about, members, [progress_row(one) for one in progress]


def _snake_case(key: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in key)


@group.command()
@group_argument
@topic_option
@cluster_options
@output_option
def lag(name: str, topic: str | None, namesrv: str, output: str) -> None:
    """Show how far a group is behind: in messages, and the age of the oldest unread message.

    The age is read from the message itself. BEHIND is empty if the message cannot be read now.
    """
    rows = asyncio.run(_lag(namesrv, name, topic))
    emit(rows, _LAG_COLUMNS, output)


async def _lag(namesrv: str, name: str, topic: str | None) -> list[dict[str, Any]]:
    from neve.clock import system_now_ms

    async with administer(namesrv) as admin:
        groups = admin.groups
        await groups.settings_of(name)
        connections, progress = await asyncio.gather(groups.connections(name), groups.progress(name, topic))
        oldest = await groups.oldest_unread_ms(progress)
    if connections.is_broadcasting:
        say(f"the members of {name} keep their offsets themselves (broadcasting): those of the brokers are shown")
    now = system_now_ms()
    behind = {queue: None if since is None else max(0, now - since) for queue, since in oldest.items()}
    _print_total(name, progress, max((one for one in behind.values() if one is not None), default=0))
    return [lag_row(one, behind.get(one.queue) if one.lag else 0) for one in progress]


def _print_total(name: str, progress: list[QueueProgress], behind_ms: int) -> None:
    from neve.admin.lag import total_cold, total_lag

    messages = total_lag(progress)
    if not messages:
        say(f"{name}: no lag")
        return
    cold = share_text(total_cold(progress), messages)
    share = "" if cold is None else f", {cold} cold"
    say(f"{name}: {messages} messages behind, the oldest for {behind_text(behind_ms)}{share}")


@group.command()
@group_argument
@cluster_options
@output_option
def members(name: str, namesrv: str, output: str) -> None:
    """Show the connected members of a group, and the queues that each member reads now.

    QUEUES is `?` for a member that does not report them.
    """
    found = asyncio.run(_members(namesrv, name))
    if output == "table":
        for member in found:
            member["queues"] = _queues_text(member["queues"])
    emit(found, ["client_id", "address", "version", "language", "queues"], output)


async def _members(namesrv: str, name: str) -> list[dict[str, Any]]:
    async with administer(namesrv) as admin:
        connections = await admin.groups.connections(name)
        if not connections.members:
            await admin.groups.settings_of(name)
        queues = await asyncio.gather(*(admin.groups.queues_of_member(name, member) for member in connections.members))
    return [
        {
            "client_id": member.client_id,
            "address": member.address,
            "version": member.version,
            "language": member.language,
            "queues": None
            if of_member is None
            else [{"topic": one.topic, "broker": one.broker_name, "queue": one.queue_id} for one in of_member],
        }
        for member, of_member in zip(connections.members, queues, strict=True)
    ]


def _queues_text(queues: list[dict[str, Any]] | None) -> str:
    if queues is None:
        return "?"
    numbers: dict[str, list[str]] = {}
    for one in queues:
        numbers.setdefault(f"{one['topic']}@{one['broker']}", []).append(str(one["queue"]))
    return " ".join(f"{place}:{','.join(of_place)}" for place, of_place in numbers.items())


# ---- change


@group.command()
@group_argument
@option("--to-earliest", "earliest", former=["--earliest"], is_flag=True, help="To the first message of each queue.")
@option(
    "--to-latest", "latest", former=["--latest"], is_flag=True, help="To the end: all present messages are skipped."
)
@click.option(
    "--to-time", type=INSTANT, metavar="TIME", help="To the first message stored at this time or later: ISO 8601, -90m."
)
@click.option("--to-offset", type=click.IntRange(0), metavar="OFFSET", help="To this offset (with --topic).")
@topic_option
@queue_option
@broker_option
@click.option("--dry-run", is_flag=True, help="Show the effect on each queue, and change nothing.")
@yes_option
@cluster_options
@output_option
def reset(
    *,
    name: str,
    earliest: bool,
    latest: bool,
    to_time: int | None,
    to_offset: int | None,
    topic: str | None,
    queue: int | None,
    broker: str | None,
    dry_run: bool,
    yes: bool,
    namesrv: str,
    output: str,
) -> None:
    """Reset the committed offsets of a group. Shows the effect, and asks, before it changes anything.

    Without --topic it resets all topics where the group has an offset, except its retry topic. COLD is the number of
    skipped or repeated messages that exist in the archive only. --queue and --broker need --topic.
    """
    if sum([earliest, latest, to_time is not None, to_offset is not None]) != 1:
        raise click.UsageError("give one target: --to-earliest, --to-latest, --to-time or --to-offset")
    if topic is None and (to_offset is not None or queue is not None or broker is not None):
        raise click.UsageError("--to-offset, --queue and --broker need --topic")
    target = _Target(earliest, to_time, to_offset)
    work = _Reset(name, topic, queue, broker)
    resets, connected = asyncio.run(work.plan(namesrv, target))
    emit([_reset_row(one) for one in resets], _RESET_COLUMNS, output)
    _print_effect(name, resets)
    if dry_run:
        if connected:
            say(f"{connected} members are connected: the reset is refused until they are stopped")
        return
    _refuse_connected(name, connected)
    if not yes:
        ask(f"Reset the committed offset of {name} in {len(resets)} queues?")
    asyncio.run(work.carry_out(namesrv, resets))
    say(f"reset {name} in {len(resets)} queues")


def _reset_row(one: OffsetReset) -> dict[str, Any]:
    queue = one.progress.queue
    return {
        "topic": queue.topic,
        "broker": queue.broker_name,
        "queue": queue.queue_id,
        "committed": one.progress.committed,
        "target": one.target,
        "skipped": one.skipped,
        "repeated": one.repeated,
        "cold": one.cold,
    }


class _Target(NamedTuple):
    """The target of a reset: the earliest message, a time or an offset; without any of these the end of each queue."""

    earliest: bool
    time_ms: int | None
    offset: int | None

    async def within(self, groups: Groups, one: QueueProgress) -> int:
        if self.earliest:
            return one.min_offset
        if self.offset is not None:
            return self.offset
        if self.time_ms is None:
            return one.max_offset
        return min(max(await groups.offset_by_time(one.queue, self.time_ms), one.min_offset), one.max_offset)


class _Reset(NamedTuple):
    """A group, and the queues to reset."""

    group: str
    topic: str | None
    queue: int | None
    broker: str | None

    async def plan(self, namesrv: str, target: _Target) -> tuple[list[OffsetReset], int]:
        """Return the effect on each queue, and the number of connected members."""
        from neve.admin.offset_reset import is_within, plan_reset

        async with administer(namesrv) as admin:
            groups = admin.groups
            await groups.settings_of(self.group)
            connections = await groups.connections(self.group)
            if connections.is_broadcasting:
                raise Failure(
                    CONFLICT,
                    f"the members of {self.group} keep their offsets themselves (broadcasting): reset them there",
                )
            chosen = [one for one in await groups.progress(self.group, self.topic) if self._includes(one.queue)]
            if not chosen:
                what = "committed offset: name a --topic" if self.topic is None else f"such queue of {self.topic}"
                raise Failure(NOT_FOUND, f"{self.group} has no {what}")
            targets = await asyncio.gather(*(target.within(groups, one) for one in chosen))
        resets = [plan_reset(one, offset) for one, offset in zip(chosen, targets, strict=True)]
        if outside := [one.progress for one in resets if not is_within(one.progress, one.target)]:
            queue = outside[0].queue
            bounds = f"{outside[0].min_offset} to {outside[0].max_offset}"
            raise Failure(
                USAGE,
                f"offset {target.offset} is outside queue {queue.queue_id} of {queue.broker_name}, which has {bounds}",
            )
        return resets, len(connections.members)

    async def carry_out(self, namesrv: str, resets: list[OffsetReset]) -> None:
        """Reset one queue after the other; an error reports how many are done."""
        from neve.cli.failures import explain

        async with administer(namesrv) as admin:
            # a member may have connected since the plan was shown
            _refuse_connected(self.group, len((await admin.groups.connections(self.group)).members))
            for done, one in enumerate(resets):
                queue = one.progress.queue
                try:
                    await admin.groups.reset(self.group, queue, one.target)
                except NeveError as error:
                    explained = explain(error)
                    where = f"queue {queue.queue_id} of {queue.topic} at {queue.broker_name}"
                    raise Failure(
                        FAILED if explained is None else explained.exit_code,
                        f"{where}: {error}; {done} of {len(resets)} queues are reset: repeat the command",
                    ) from error

    def _includes(self, queue: MessageQueue) -> bool:
        if self.topic is None and is_retry_or_dlq(queue.topic):
            return False
        return self.queue in {None, queue.queue_id} and self.broker in {None, queue.broker_name}


def _print_effect(name: str, resets: list[OffsetReset]) -> None:
    skipped, repeated = sum(one.skipped for one in resets), sum(one.repeated for one in resets)
    reported = [one.cold for one in resets if one.cold is not None]
    cold = share_text(sum(reported) if reported else None, skipped + repeated)
    say(f"{name}: {skipped} messages skipped, {repeated} read again" + (f", {cold} of them cold" if cold else ""))


def _refuse_connected(name: str, connected: int) -> None:
    """Refuse while members are connected: a member would commit its own offset over the new one."""
    if connected:
        raise Failure(CONFLICT, f"{connected} members of {name} are connected: stop them first")


@group.command()
@group_argument
@yes_option
@cluster_options
def delete(name: str, yes: bool, namesrv: str) -> None:
    """Delete a group and its committed offsets at all brokers.

    Its retry and dead-letter topics stay: `neve topic delete %RETRY%GROUP` and `%DLQ%GROUP` delete them.
    """
    if not yes:
        ask(f"Delete group {name} and its committed offsets?")
    asyncio.run(_delete(namesrv, name))
    say(f"deleted {name}")


async def _delete(namesrv: str, name: str) -> None:
    async with administer(namesrv) as admin:
        brokers = sorted(await admin.groups.settings_of(name))
        _refuse_connected(name, len((await admin.groups.connections(name)).members))
        await admin.groups.delete(name, brokers)
