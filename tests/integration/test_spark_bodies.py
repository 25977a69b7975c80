"""Decoding bodies in Spark: text, JSON with a given or inferred schema, VARIANT, Avro, Protobuf, and errors."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lz4.frame
import pytest
import zstandard
from pyspark.errors import PySparkException
from pyspark.sql import functions as f

from infra.objects.open import open_store
from neve import spark as neve_spark
from neve.record.layout import COMPRESSED, COMPRESSION_LZ4, COMPRESSION_ZSTD
from neve.spark import Bodies, decode_bodies, json_schema, split_bodies
from tests.kit.archive.archive_on_paper import ArchiveOnPaper
from tests.kit.server.schema_registry import SchemaRegistry
from tests.kit.wire.schema_bodies import ORDER, VALUE, avro_body, descriptors, protobuf_body

pytestmark = [
    pytest.mark.servers,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

BODIES = [
    b'{"n": 0, "q": 2, "x": {"y": [1, 2]}}',
    b'{"n": 1, "q": 2, "a b": true}',
    b'{"n": "two", "q": 2}',
    b'{"n": 3',
    b"",
    b"\xff\xfe",
    b"[6]",
    b"null",
    b'{"n": 8.5, "q": 2}',
    None,
]
PACKED = [
    (zlib.compress(BODIES[0] or b""), COMPRESSED),
    (lz4.frame.compress(BODIES[1] or b""), COMPRESSED | COMPRESSION_LZ4),
    (zstandard.compress(BODIES[2] or b""), COMPRESSED | COMPRESSION_ZSTD),
    (b"no zlib", COMPRESSED),
    (zlib.compress(bytes(2000)), COMPRESSED),
]
SCHEMA = "n INT, q INT"


@pytest.fixture(scope="module")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """Return two frames: `plain` has `BODIES` at the offsets 0…9, `packed` has compressed bodies."""
    root = tmp_path_factory.mktemp("archive")
    url = f"dir:{root}"

    def plain(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "body": BODIES[row["queue_offset"]], "body_codec": "none", "sys_flag": 0}

    def packed(row: dict[str, Any]) -> dict[str, Any]:
        body, flag = PACKED[row["queue_offset"]]
        return {**row, "body": body, "body_codec": "packed", "sys_flag": flag}

    store = open_store(url)
    ArchiveOnPaper(store, "a", "plain").write(0, 0, 0, len(BODIES), hour=0, change=plain)
    ArchiveOnPaper(store, "b", "packed").write(0, 0, 0, len(PACKED), hour=0, change=packed)
    spark = neve_spark.session(url, master="local[1]", conf={"spark.ui.enabled": "false"})
    frames = [neve_spark.read_topic(spark, topic, store=url) for topic in ("plain", "packed")]
    yield frames[0], frames[1]
    spark.stop()


def told(frame: Any, column: str) -> dict[int, tuple[Any, str | None]]:
    """Return value and error by offset."""
    rows = frame.select("queue_offset", column, "body_error").collect()
    return {row.queue_offset: (row[column], row.body_error) for row in rows}


def test_compressed_bodies_are_inflated_or_have_an_error(topics: tuple[Any, Any]) -> None:
    found = told(decode_bodies(topics[1], "bytes", max_body=1000), "body")
    assert [found[at] for at in range(3)] == [(BODIES[at], None) for at in range(3)]
    assert found[3][0] is None
    assert str(found[3][1]).startswith("the body does not match the compression in its sysFlag: Error -3")
    assert found[4] == (None, "the body is longer than 1000 bytes when inflated")
    text = told(decode_bodies(topics[1].where("queue_offset < 3"), "text"), "text")
    assert text == {at: ((BODIES[at] or b"").decode(), None) for at in range(3)}


def test_spark_without_arrow_functions_inflates_row_by_row(
    topics: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark 4.0 has no such functions; it decodes neither Avro nor Protobuf."""
    monkeypatch.delattr(f, "arrow_udf")
    found = told(decode_bodies(topics[1], "bytes", max_body=1000), "body")
    assert [value for value, _ in found.values()] == [*BODIES[:3], None, None]
    with pytest.raises(NotImplementedError, match="avro bodies need Spark"):
        decode_bodies(topics[0], "avro", schema_file=__file__)


def test_avro_and_protobuf_are_decoded_by_their_schema_files(topics: tuple[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "order.avsc").write_text(json.dumps(ORDER))
    (tmp_path / "order.desc").write_bytes(descriptors())
    not_finite = avro_body({**VALUE, "prices": [float("nan"), float("-inf")]})
    bodies = [avro_body(), protobuf_body(), b"\xff\xff", not_finite]
    frame = (
        topics[0]
        .where("queue_offset < 4")
        .withColumn("body", f.element_at(f.array(*map(f.lit, bodies)), f.col("queue_offset").cast("int") + 1))
    )
    typed = "id BIGINT, name STRING, prices ARRAY<DOUBLE>, at TIMESTAMP, paid DECIMAL(9, 2)"
    found = told(decode_bodies(frame, "avro", schema_file=tmp_path / "order.avsc", schema=typed), "value")
    assert found[0][1] is None
    assert (found[0][0].id, found[0][0].name, found[0][0].prices, str(found[0][0].paid)) == (
        1 << 40, "Zürich", [1.5, 2.0], "12.50"
    )  # fmt: skip
    assert found[2][0] is None
    assert str(found[2][1]).startswith("the body is not avro of the schema")
    assert [str(price) for price in found[3][0].prices] == ["nan", "-inf"]
    variant = decode_bodies(frame, "protobuf", schema_file=tmp_path / "order.desc", message="shop.Order")
    texts = told(variant.withColumn("json", f.to_json("value")), "json")
    assert texts[1] == ('{"order_name":"Zürich","prices":[{"cents":"150"}]}', None)
    assert str(texts[2][1]).startswith("the body is not protobuf of the schema")


def test_bodies_are_decoded_by_their_schema_id_in_the_registry(topics: tuple[Any, Any], tmp_path: Path) -> None:
    """Two versions of a schema in one topic, in a batch and in a stream that splits off undecodable bodies."""
    newer = {**ORDER, "fields": [*ORDER["fields"], {"name": "more", "type": ["null", "int"], "default": None}]}
    with SchemaRegistry() as registry:
        registry.put(7, json.dumps(ORDER), "orders-value")
        registry.put(8, json.dumps(newer), "orders-value", 2)
        bodies = [
            b"\0\0\0\0\7" + avro_body(),
            b"\0\0\0\0\x08" + avro_body({**VALUE, "more": 5}, newer),
            b"\0\0\0\0\x09x",
        ]
        frame = (
            topics[0]
            .where("queue_offset < 3")
            .withColumn("body", f.element_at(f.array(*map(f.lit, bodies)), f.col("queue_offset").cast("int") + 1))
        )
        typed = "id BIGINT, name STRING, more INT"
        found = told(decode_bodies(frame, "avro", registry=registry.url, schema=typed), "value")
        assert [(found[at][0].id, found[at][0].name, found[at][0].more) for at in (0, 1)] == [
            (1 << 40, "Zürich", None), (1 << 40, "Zürich", 5)
        ]  # fmt: skip
        assert found[2] == (None, "the registry has no schema 9")

        frame.write.parquet(f"{tmp_path}/rows")
        rows = topics[0].sparkSession.readStream.schema(frame.schema).parquet(f"{tmp_path}/rows")
        halves = split_bodies(decode_bodies(rows, "avro", registry=registry.url, schema=typed))
        for name, half in halves._asdict().items():
            query = half.writeStream.format("parquet").option("checkpointLocation", f"{tmp_path}/{name}.checkpoint")
            query.trigger(availableNow=True).start(f"{tmp_path}/{name}").awaitTermination()
    read = topics[0].sparkSession.read
    assert sorted(row.queue_offset for row in read.parquet(f"{tmp_path}/good").collect()) == [0, 1]
    (dead,) = read.parquet(f"{tmp_path}/dead").collect()
    assert (dead.queue_offset, dead.body_error, dead.body) == (2, "the registry has no schema 9", bodies[2])


def test_json_with_a_registry_has_its_schema_id_removed(topics: tuple[Any, Any]) -> None:
    bodies = [b'\0\0\0\0\7{"n": 1, "q": 2}', b'{"n": 1}', b"\0\0\0\0\7", b"\0\0\0\0\7\xff"]
    frame = (
        topics[0]
        .where("queue_offset < 4")
        .withColumn("body", f.element_at(f.array(*map(f.lit, bodies)), f.col("queue_offset").cast("int") + 1))
    )
    found = told(decode_bodies(frame, "json", registry="http://127.0.0.1:9", schema=SCHEMA), "value")
    assert (tuple(found[0][0]), found[0][1]) == ((1, 2), None)
    assert [found[at][1] for at in (1, 2, 3)] == [
        "the body does not begin with 0 and four bytes, so it has no schema id",
        "the body is not JSON",
        "the body is not UTF-8",
    ]


def test_invalid_text_is_null_with_its_error(topics: tuple[Any, Any]) -> None:
    found = told(decode_bodies(topics[0], "text"), "text")
    assert found[3] == ('{"n": 3', None)
    assert found[4] == ("", None)
    assert found[5] == (None, "the body is not UTF-8")
    assert found[9] == (None, "there is no body")


def test_json_with_a_schema_names_mismatched_fields(topics: tuple[Any, Any]) -> None:
    found = told(decode_bodies(topics[0], "json", schema=SCHEMA), "value")
    assert [tuple(found[at][0]) for at in (0, 1)] == [(0, 2), (1, 2)]
    assert [found[at][1] for at in (0, 1)] == [None, None]
    assert all(found[at][0] is None for at in range(2, 10))
    assert [found[at][1] for at in range(2, 10)] == [
        "the JSON does not fit the schema: n",
        "the body is not JSON",
        "the body is not JSON",
        "the body is not UTF-8",
        "the JSON does not fit the schema",
        "the JSON does not fit the schema",
        "the JSON does not fit the schema: n",
        "there is no body",
    ]
    lists = told(decode_bodies(topics[0], "json", schema="ARRAY<INT>"), "value")
    assert lists[6] == ([6], None)
    assert lists[3] == (None, "the body is not JSON")


def with_bodies(frame: Any, *bodies: bytes) -> Any:
    """Return the first rows of the topic `plain` with these bodies."""
    values = f.array(*map(f.lit, bodies))
    body = f.element_at(values, f.col("queue_offset").cast("int") + 1)
    return frame.where(f"queue_offset < {len(bodies)}").withColumn("body", body)


TRAILING = (
    b'{"n": 1}\n{"n": 2}',
    b'{"n": 1}garbage',
    b'{"n": 1} {"n":',
    b'{"n": 1},{"n": 2}',
    b'{"n": 1}],[{"n": 2}',
    b'{"n": 1}]',
    b'{"n": {"a": 1}} }',
    b"[1],[2]",
)


@pytest.mark.parametrize("schema", [SCHEMA, None, "ARRAY<INT>"])
def test_json_bodies_with_trailing_content_are_errors(topics: tuple[Any, Any], schema: str | None) -> None:
    frame = with_bodies(topics[0], *TRAILING)
    found = told(decode_bodies(frame, "json", schema=schema), "value")
    assert found == dict.fromkeys(range(len(TRAILING)), (None, "the body has more after its first JSON value"))
    with pytest.raises(PySparkException, match="more after its first JSON value"):
        decode_bodies(frame, "json", schema=schema, on_error="stop").select("value").collect()


def test_json_bodies_within_white_space_are_decoded(topics: tuple[Any, Any]) -> None:
    frame = with_bodies(topics[0], b' {"n": 1, "q": 2}\n', b'\t{"n": 1, "q": 2, "x": {"y": [{}, "}]"]}} ')
    for schema in (SCHEMA, None):
        values = decode_bodies(frame, "json", schema=schema)
        found = told(values.withColumn("json", f.to_json("value")), "json")
        assert [error for _, error in found.values()] == [None, None]
        assert all(str(json).startswith('{"n":1,"q":2') for json, _ in found.values())


def test_json_nan_is_a_double_but_not_a_variant(topics: tuple[Any, Any]) -> None:
    frame = with_bodies(topics[0], b'{"n": NaN, "q": [{}]}', b'{"n": 1, "n": 2}', b"{'n': 1}", b'\xef\xbb\xbf{"n": 1}')
    typed = told(decode_bodies(frame, "json", schema="n DOUBLE"), "value")
    assert str(typed[0][0].n) == "nan"
    assert typed[1][0].n == 2
    variant = told(decode_bodies(frame, "json").withColumn("json", f.to_json("value")), "json")
    assert {str(error)[:35] for _, error in (variant[0], variant[1])} == {"the JSON does not fit a VARIANT: a "}
    for found in (typed, variant):
        assert [found[at] for at in (2, 3)] == [
            (None, "the body is not JSON"), (None, "the body begins with a byte order mark")
        ]  # fmt: skip


RANGES = [
    ("TINYINT", [b"127", b"-128"], [b"128", b"200", b"255", b"-129"]),
    ("FLOAT", [b"3.4e38", b"NaN"], [b"1e39", b"-1e39"]),
    (
        "TIMESTAMP",
        [b"1767225600", b"253402300799", b'"2026-01-01 00:00:00"'],
        [b"1767225600000", b"1767225600000000", b"9223372036854775807", b"-9223372036854775807"],
    ),
]


@pytest.mark.parametrize(("kind", "within", "beyond"), RANGES)
def test_json_numbers_beyond_their_type_are_errors(
    topics: tuple[Any, Any], kind: str, within: list[bytes], beyond: list[bytes]
) -> None:
    schema = f"t {kind}, deep STRUCT<list: ARRAY<{kind}>, map: MAP<STRING, {kind}>>"
    shapes = (
        (b'{"t": %s}', "t"),
        (b'{"deep": {"list": [%s]}}', "deep.list"),
        (b'{"deep": {"map": {"k": %s}}}', "deep.map"),
    )
    for shape, name in shapes:
        frame = with_bodies(topics[0], *[shape % number for number in (*within, *beyond)])
        found = told(decode_bodies(frame, "json", schema=schema), "value")
        errors = [found[at][1] for at in range(len(within) + len(beyond))]
        assert errors == [None] * len(within) + [f"the JSON does not fit the schema: {name}"] * len(beyond)


def test_json_errors_name_nested_fields(topics: tuple[Any, Any]) -> None:
    frame = with_bodies(topics[0], b'{"a": {"b": "x", "c": 1}, "d": [1, "x"]}', b'{"a": 5, "d": []}')
    found = told(decode_bodies(frame, "json", schema="a STRUCT<b: INT, c: INT>, d ARRAY<INT>, e INT"), "value")
    assert [found[at][1] for at in (0, 1)] == [
        "the JSON does not fit the schema: a.b, d", "the JSON does not fit the schema: a.b, a.c"
    ]  # fmt: skip


def test_json_schema_ignores_bodies_with_trailing_content(topics: tuple[Any, Any]) -> None:
    frame = with_bodies(topics[0], b'{"a": 1}', b'{"b": 1}x', b'{"c": 1}, {"d": 2}', b'{"e": 1}\n{"e": 2}')
    assert json_schema(frame).simpleString() == "struct<a:bigint>"


def test_json_without_a_schema_is_a_variant(topics: tuple[Any, Any]) -> None:
    values = decode_bodies(topics[0], "json").withColumn("json", f.to_json("value"))
    found = told(values, "json")
    assert found[0] == ('{"n":0,"q":2,"x":{"y":[1,2]}}', None)
    assert found[6] == ("[6]", None)
    assert found[7] == ("null", None)
    assert {at for at, (_, error) in found.items() if error == "the body is not JSON"} == {3, 4}


def test_schema_inferred_from_a_sample_decodes_the_sample(topics: tuple[Any, Any]) -> None:
    objects = topics[0].where("queue_offset IN (0, 1, 3, 5, 8)")
    found = json_schema(objects)
    assert found.simpleString() == "struct<a b:boolean,n:double,q:bigint,x:struct<y:array<bigint>>>"
    values = told(decode_bodies(objects, "json", schema=found), "value")
    assert {at for at, (value, _) in values.items() if value is not None} == {0, 1, 8}
    assert json_schema(objects, rows=1).names in (["n", "q", "x"], ["a b", "n", "q"], ["n", "q"])
    with pytest.raises(ValueError, match="not all are objects"):
        json_schema(topics[0])
    with pytest.raises(ValueError, match="no body of the sample is JSON"):
        json_schema(topics[0].where("queue_offset = 3"))
    with pytest.raises(ValueError, match="no messages to sample"):
        json_schema(topics[0].where("queue_offset < 0"))


def test_on_error_stop_ends_the_query_and_names_topic_queue_and_offset(topics: tuple[Any, Any]) -> None:
    for column, frame in (
        ("value", decode_bodies(topics[0].where("queue_offset <= 2"), "json", schema=SCHEMA, on_error="stop")),
        ("body", decode_bodies(topics[1].where("queue_offset = 3"), "bytes", on_error="stop")),
    ):
        assert "body_error" not in frame.columns
        with pytest.raises(
            PySparkException, match=r"topic (plain|packed), queue_id 0, queue_offset [23], the (JSON|body) does not"
        ):
            frame.select(column).collect()
    whole = decode_bodies(topics[0].where("queue_offset < 2"), "json", schema=SCHEMA, on_error="stop")
    assert [row.value.n for row in whole.select("value").collect()] == [0, 1]


def assert_split(good: Any, dead: Any) -> None:
    assert sorted(row.n for row in good.select("value.n").collect()) == [0, 1]
    rows = dead.select("broker", "topic", "queue_offset", "body_error", "body").collect()
    assert sorted(row.queue_offset for row in rows) == list(range(2, 10))
    assert {(row.broker, row.topic) for row in rows} == {("a", "plain")}
    assert {row.queue_offset: row.body for row in rows} == dict(enumerate(BODIES[2:], 2)), "as they are stored"
    assert all(row.body_error for row in rows)


def test_split_bodies_returns_dead_letters_as_a_separate_frame(topics: tuple[Any, Any]) -> None:
    bodies = split_bodies(decode_bodies(topics[0], "json", schema=SCHEMA))
    assert isinstance(bodies, Bodies)
    assert_split(*bodies)
    with pytest.raises(ValueError, match="body_error"):
        split_bodies(topics[0])


def test_stream_writes_its_dead_letters_to_a_separate_table(topics: tuple[Any, Any], tmp_path: Path) -> None:
    spark = topics[0].sparkSession
    topics[0].write.parquet(f"{tmp_path}/rows")
    rows = spark.readStream.schema(topics[0].schema).parquet(f"{tmp_path}/rows")

    def put(batch: Any, _: int) -> None:
        good, dead = split_bodies(batch)
        good.write.mode("append").parquet(f"{tmp_path}/good")
        dead.write.mode("append").parquet(f"{tmp_path}/dead")

    stream = decode_bodies(rows, "json", schema=SCHEMA).writeStream.foreachBatch(put)
    stream.option("checkpointLocation", f"{tmp_path}/c").trigger(availableNow=True).start().awaitTermination()
    assert_split(spark.read.parquet(f"{tmp_path}/good"), spark.read.parquet(f"{tmp_path}/dead"))


def test_conflicting_arguments_are_rejected(topics: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="bytes, text, json"):
        decode_bodies(topics[0], "xml")
    with pytest.raises(ValueError, match="'null' or 'stop'"):
        decode_bodies(topics[0], "text", on_error="skip")
    with pytest.raises(ValueError, match="schema_file or a registry"):
        decode_bodies(topics[0], "avro")
    with pytest.raises(ValueError, match="schema_file or a registry"):
        decode_bodies(topics[0], "avro", schema_file=__file__, registry="http://h")
    with pytest.raises(ValueError, match="registry requires kind"):
        decode_bodies(topics[0], "text", registry="http://h")
    with pytest.raises(ValueError, match="schema requires kind json"):
        decode_bodies(topics[0], "text", schema=SCHEMA)
