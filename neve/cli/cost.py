"""`neve archive cost`: the cost of archive settings, at the rates in a journal or at given rates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from neve.cli.options import POSITIVE_DURATION, SIZE
from neve.cli.output import emit, output_option, say, size_text, store_option
from neve.units import duration_text

if TYPE_CHECKING:
    from neve.archive.policy.cost import DailyTraffic, MonthlyCost, Prices, Setting

COLUMNS = (
    "topic", "archiveMaxAge", "compaction", "replicas", "objects_a_day", "objects", "puts", "gets", "stored", "local",
    "unarchived", "money",
)  # fmt: skip
_DAY_S = 86_400


@click.command()
@click.argument("topic", required=False)
@click.option("--broker", help="Only the archive of this broker.")
@click.option(
    "--days",
    type=click.FloatRange(0, min_open=True),
    default=7,
    show_default=True,
    help="Use the rates of the newest days.",
)
@click.option(
    "--messages", type=click.FloatRange(0, min_open=True), help="Without an archive: messages per topic and day."
)
@click.option("--message-bytes", type=SIZE, help="With --messages: bytes per message in the log.")
@click.option(
    "--ratio",
    type=click.FloatRange(0, 1),
    default=0.45,
    show_default=True,
    help="With --messages: archived bytes per byte in the log.",
)
@click.option(
    "--topics", type=click.IntRange(1), default=1, show_default=True, help="With --messages: number of such topics."
)
@click.option(
    "--max-age",
    "ages",
    type=POSITIVE_DURATION,
    multiple=True,
    help="archiveMaxAge; may be repeated to compare.  [default: 1h, 6h, 1d]",
)
@click.option("--min-bytes", type=SIZE, default="8m", show_default=True, help="archiveMinBytes.")
@click.option(
    "--replicas",
    type=click.IntRange(1),
    multiple=True,
    help="Brokers with a copy; may be repeated to compare.  [default: 1]",
)
@click.option(
    "--compaction/--no-compaction", default=None, help="Only with or only without compaction.  [default: both]"
)
@click.option("--keep", type=POSITIVE_DURATION, default="30d", show_default=True, help="TTL of messages.")
@click.option("--local", "reserved", type=POSITIVE_DURATION, default="3d", show_default=True, help="fileReservedTime.")
@click.option("--prices", type=click.File("rb"), help="A price table such as conf/prices.toml.")
@click.option("--total", is_flag=True, help="Print only the totals.")
@store_option()
@output_option
def cost(
    *,
    topic: str | None,
    store: str | None,
    broker: str | None,
    days: float,
    total: bool,
    output: str,
    prices: BinaryIO | None,
    **given: Any,
) -> None:
    """Show what a month of the archive costs for each topic and setting: requests, objects, bytes and money.

    The rates are those in the journal of the archive, or --messages. The model uses averages; docs/deploy/cost.md
    has examples.
    """
    from neve.archive.policy.cost import TOTAL, costs_of

    table = _prices(prices)
    traffic = _given(topic, given) if given["messages"] is not None else _seen(store, broker, topic, days)
    rows = [
        _row(one, setting, table)
        for setting in _settings(given)
        for one in costs_of(traffic, setting, table)
        if not total or one.topic == TOTAL
    ]
    if output == "table":
        say(_header(traffic, table))
        rows = [_as_text(row, table) for row in rows]
    emit(rows, COLUMNS, output)


def _prices(file: BinaryIO | None) -> Prices:
    import msgspec

    from neve.archive.policy.cost import Prices

    if file is None:
        return Prices()
    try:
        return msgspec.toml.decode(file.read(), type=Prices)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{file.name}: {error}", param_hint="--prices") from error


def _given(topic: str | None, given: dict[str, Any]) -> list[DailyTraffic]:
    from neve.archive.policy.cost import DailyTraffic

    if given["message_bytes"] is None:
        raise click.UsageError("--messages needs --message-bytes")
    count, messages = given["topics"], given["messages"]
    names = [topic or "topic"] if count == 1 else [f"{topic or 'topic'}-{number}" for number in range(1, count + 1)]
    return [DailyTraffic(name, messages, messages * given["message_bytes"], given["ratio"]) for name in names]


def _seen(store: str | None, broker: str | None, topic: str | None, days: float) -> list[DailyTraffic]:
    from neve.archive.catalog.journal_reader import catalogs
    from neve.archive.policy.cost import traffic_seen
    from neve.cli.store import open_source

    if store is None:
        raise click.UsageError("give --store of an archive, or --messages and --message-bytes")
    # Read all topics, so that the rates of a quiet topic refer to the same days.
    found = catalogs(open_source(store), broker)
    traffic = traffic_seen((one for catalog in found.values() for one in catalog.each_object()), days)
    chosen = [one for one in traffic if topic in {None, one.topic}]
    if topic is not None and not chosen:
        raise FileNotFoundError(f"topic {topic} has no messages in this archive from the newest {days:g} days")
    return chosen


def _settings(given: dict[str, Any]) -> Iterator[Setting]:
    from neve.archive.policy.cost import Setting

    compaction = [False, True] if given["compaction"] is None else [given["compaction"]]
    for replicas in given["replicas"] or (1,):
        for age in given["ages"] or (3600.0, 6 * 3600.0, float(_DAY_S)):
            for compacts in compaction:
                yield Setting(
                    max_age_s=age,
                    min_bytes=given["min_bytes"],
                    compaction=compacts,
                    keep_days=given["keep"] / _DAY_S,
                    replicas=replicas,
                    reserved_days=given["reserved"] / _DAY_S,
                )


def _row(one: MonthlyCost, setting: Setting, prices: Prices) -> dict[str, Any]:
    import msgspec

    return {
        **msgspec.to_builtins(one),
        "archiveMaxAge": duration_text(round(setting.max_age_s * 1000)),
        "compaction": setting.compaction,
        "replicas": setting.replicas,
        "money": one.money(prices),
        "currency": prices.currency,
    }


def _as_text(row: dict[str, Any], prices: Prices) -> dict[str, Any]:
    from neve.archive.policy.cost import Prices

    sizes = {name: size_text(round(row[f"{name}_bytes"])) for name in ("stored", "local", "unarchived")}
    counts = {name: f"{row[name]:.0f}" for name in ("objects", "puts", "gets")}
    money = "" if prices == Prices() else f"{row['money']:.2f} {prices.currency}".strip()
    compaction = "yes" if row["compaction"] else "no"
    return {
        **row,
        **sizes,
        **counts,
        "objects_a_day": f"{row['objects_a_day']:.1f}",
        "compaction": compaction,
        "money": money,
    }


def _header(traffic: Sequence[DailyTraffic], prices: Prices) -> str:
    from neve.archive.policy.cost import Prices

    messages, wire = sum(one.messages for one in traffic), sum(one.wire_bytes for one in traffic)
    text = f"a month of {len(traffic)} topics with {messages:.0f} messages a day, {size_text(round(wire))} in the log"
    return text if prices != Prices() else f"{text}; --prices FILE adds the money (conf/prices.toml)"
