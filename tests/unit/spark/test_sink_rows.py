"""Tests of the checks of sink options, columns and rows before a message is sent."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from neve.client.validators import RESERVED_PROPERTIES
from neve.spark.planning.options import BadOption
from neve.spark.sink.options import options_of_sink
from neve.spark.sink.rows import IDENTITY, BadColumn, BadRow, Partition, PartitionMessages, check_columns

NAMESRV = {"namesrv": "a:1"}


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({}, "namesrv is missing"),
        ({"exactlyOnce": "true"}, "exactlyonce: rows are written at least once"),
        ({"store": "dir:x"}, "written to brokers, which archive them"),
        ({"topicc": "x"}, "topicc: unknown; options are accessKey"),
        ({"topic": "a,b"}, "has several topics"),
        ({"topic": "a b"}, "has other characters"),
        ({"topic": "RMQ_SYS_TRANS_HALF_TOPIC"}, "only brokers write"),
        ({"topic": "a", "path": "b"}, "exclude each other"),
        ({"accessKey": "a"}, "require each other"),
        ({"accessKey": "a", "secretKey": "b", "credentials": "f"}, "exclude each other"),
        ({"credentials": "/nowhere/tools.yml"}, "option credentials"),
        ({"tlsCert": "x"}, "require each other"),
        ({"tls": "yes"}, "true or false"),
        ({"inFlight": "0"}, "a number from 1"),
        ({"batchBytes": "1e6"}, "a number from 1"),
        ({"reservedProperties": "keep"}, "refuse or drop"),
    ],
)
def test_invalid_option_is_named(told: dict[str, str], why: str) -> None:
    given = told if not told else NAMESRV | told
    with pytest.raises(BadOption, match=why):
        options_of_sink(given, {})


def test_credentials_of_options_file_and_environment_are_hidden(tmp_path: Path) -> None:
    file = tmp_path / "tools.yml"
    file.write_text("accessKey: f\nsecretKey: fff\n")
    environment = {"NEVE_ACCESS_KEY": "e", "NEVE_SECRET_KEY": "eee"}
    by_option = options_of_sink({**NAMESRV, "accesskey": "o", "secretKey": "ooo"}, environment)
    by_file = options_of_sink({**NAMESRV, "credentials": str(file)}, environment)
    assert [one.credentials for one in (by_option, by_file, options_of_sink(NAMESRV, environment))] == [
        ("o", "ooo"),
        ("f", "fff"),
        ("e", "eee"),
    ]
    assert "ooo" not in repr(by_option)
    assert options_of_sink({**NAMESRV, "exactlyOnce": "false", "tlsCa": "x"}, {}).tls
    with pytest.raises(BadOption, match="option credentials: NEVE_ACCESS_KEY and NEVE_SECRET_KEY"):
        options_of_sink(NAMESRV, {"NEVE_ACCESS_KEY": "e"})


class SparkType:
    """A Spark data type, by its name."""

    def __init__(self, name: str, spelt: str) -> None:
        self.name, self.dataType, self._spelt = name, self, spelt

    def simpleString(self) -> str:  # noqa: N802 - Spark's name
        return self._spelt


class Columns:
    """The used part of a Spark StructType."""

    def __init__(self, **kinds: str) -> None:
        self.fields = [SparkType(name, kind) for name, kind in kinds.items()]


@pytest.mark.parametrize(
    ("columns", "has_topic", "why"),
    [
        ({"tags": "string"}, True, "the column body is missing"),
        ({"body": "struct<a:int>"}, True, r"column body has type struct<a:int>: cast it to binary or string"),
        ({"body": "string", "properties": "map<string,int>"}, True, "column properties has type map<string,int>"),
        ({"body": "string", "colour": "string"}, True, "column colour is unknown"),
        ({"body": "string"}, False, "the option topic or the column topic is required"),
        ({"body": "string", "key": "string", "keys": "string"}, True, "column keys occurs twice"),
        ({"body": "string", "queue_id": "int", "order_key": "string"}, True, "queue_id and order_key exclude"),
        ({"body": "string", "delay": "int", "deliver_at": "timestamp"}, True, "delay and deliver_at exclude"),
    ],
)
def test_invalid_column_is_named(columns: dict[str, str], has_topic: bool, why: str) -> None:
    schema: Any = Columns(**columns)
    with pytest.raises(BadColumn, match=why):
        check_columns(schema, has_topic=has_topic)


def messages(*, topic: str | None = "orders", drops: bool = False) -> PartitionMessages:
    return PartitionMessages(Partition("q", 7, 3), topic=topic, message_max=100, drops_reserved=drops)


def test_row_becomes_a_message_with_all_its_columns() -> None:
    made = messages(topic=None)
    rows = [
        {"topic": "a", "body": b"\x00\xff", "tag": "T", "keys": ["k", "l"], "properties": [("c", "red")], "flag": 3},
        {"topic": "b", "body": b"x", "tag": None, "keys": None, "properties": None, "flag": None},
    ]
    types = {
        "topic": pa.string(),
        "body": pa.binary(),
        "tag": pa.string(),
        "keys": pa.list_(pa.string()),
        "properties": pa.map_(pa.string(), pa.string()),
        "flag": pa.int32(),
    }
    batch = pa.RecordBatch.from_pylist(rows, pa.schema(list(types.items())))
    first, second = (one.message for one in made.of(batch))
    assert (first.topic, first.body, first.tags, first.keys, first.flag) == ("a", b"\x00\xff", "T", ("k", "l"), 3)
    assert first.properties == {"c": "red", IDENTITY: "q/7/3/0"}
    assert (second.topic, second.tags, second.keys, second.properties) == ("b", None, (), {IDENTITY: "q/7/3/1"})
    (third,) = made.of(batch.slice(0, 1))
    assert third.message.properties[IDENTITY] == "q/7/3/2", "rows are numbered over all batches of a partition"
    assert made.topics == {"a", "b"}


def test_row_sets_order_key_delivery_time_and_identity() -> None:
    when = datetime(2026, 1, 2, tzinfo=UTC)
    batch = pa.RecordBatch.from_pydict(
        {
            "body": ["1", "2", "3"],
            "order_key": pa.array([5, None, 6], pa.int64()),
            "deliver_at": pa.array([when, None, None], pa.timestamp("us", tz="UTC")),
            "id": ["one", None, "three"],
        }
    )
    first, second, third = messages().of(batch)
    assert (first.order_key, second.order_key, third.order_key) == (5, None, 6)
    assert (first.timing, second.timing) == ({"TIMER_DELIVER_MS": str(int(when.timestamp() * 1000))}, {})
    assert [one.message.properties[IDENTITY] for one in (first, second, third)] == ["id/one", "q/7/3/1", "id/three"]
    for name, values, told in (("delay", [1.5], {"TIMER_DELAY_MS": "1500"}), ("delay_level", [4], {"DELAY": "4"})):
        (one,) = messages().of(pa.RecordBatch.from_pydict({"body": ["x"], name: values}))
        assert one.timing == told


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"body": None}, "row 1: column body is null"),
        ({"body": ""}, "row 1: the message body is empty"),
        ({"body": "x" * 101}, "row 1: 101 bytes are more than 100"),
        ({"body": "x", "delay": -1.0}, "a delay cannot be negative"),
        ({"body": "x", "properties": [("UNIQ_KEY", "1")]}, "UNIQ_KEY is used by the system.*reservedProperties=drop"),
        (
            {"body": "x", "properties": [(IDENTITY, "1")]},
            "is reserved for the sink; the option reservedProperties=drop",
        ),
        ({"body": "x", "properties": [("a", "")]}, "'a' is empty or holds a separator$"),
    ],
)
def test_invalid_row_is_reported_by_its_number(row: dict[str, object], why: str) -> None:
    schema = pa.schema(
        {"body": pa.string(), "delay": pa.float64(), "properties": pa.map_(pa.string(), pa.string())}.items()
    )
    batch = pa.RecordBatch.from_pylist([{"body": "good"}, row], schema)
    with pytest.raises(BadRow, match=f"partition 3, .*{why}"):
        list(messages().of(batch))


def test_copied_rows_are_written_without_reserved_properties() -> None:
    pairs = [(name, "x") for name in sorted(RESERVED_PROPERTIES)] + [("colour", "red"), (IDENTITY, "other/0/0/0")]
    schema = pa.schema({"body": pa.string(), "properties": pa.map_(pa.string(), pa.string())}.items())
    batch = pa.RecordBatch.from_pylist([{"body": "x", "properties": pairs}], schema)
    (one,) = messages(drops=True).of(batch)
    assert one.message.properties == {"colour": "red", IDENTITY: "q/7/3/0"}
