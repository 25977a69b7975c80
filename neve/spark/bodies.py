"""Message bodies in Spark: inflated, as text or values, with the reason for those that cannot be decoded.

All functions take any DataFrame with neve's columns, of a batch or a stream.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from neve.record import bodies as record_bodies
from neve.record.bodies import INFLATED_LENGTH_MAX
from neve.record.layout import COMPRESSED
from neve.spark.registry import Registry, registry_at

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

KINDS = ("bytes", "text", "json", "avro", "protobuf")
_BY_FILE = ("avro", "protobuf")
SAMPLE_BYTES = 4 << 20
ARRAY_BYTES = (1 << 31) - 1  # the maximum of an Arrow array of bytes

_UNFIT = "the JSON does not fit the schema"
_NO_VARIANT = "the JSON does not fit a VARIANT: a name occurs twice in an object, or a value is NaN or infinite"
_JSON_OPTIONS = {"allowSingleQuotes": "false"}
_NAMED_FIELDS_MAX = 100  # each is one more expression in the query's plan
_TINYINT_MAX = 127
_FLOAT_MAX = 3.4028234663852886e38
_TIMESTAMP_SECONDS_MAX = 253_402_300_799  # the last second of the year 9999; Spark reads a number as seconds
_ID_END = 5  # a 0 and the four bytes of a schema's id
_NO_ID = "the body does not begin with 0 and four bytes, so it has no schema id"
_CORRUPT = "__neve_corrupt"  # in which from_json puts a text that does not fit its schema
_PLACE = ("broker", "topic", "queue_id", "queue_offset")
_DEAD = (*_PLACE, "store_timestamp", "msg_id", "body_error", "body", "body_codec")

Inflated = tuple[bytes | None, str | None]


class Bodies(NamedTuple):
    """The rows of `decode_bodies`: decoded ones, and dead letters."""

    good: DataFrame
    dead: DataFrame


def decode_bodies(
    frame: DataFrame,
    kind: str,
    *,
    schema: StructType | str | None = None,
    schema_file: str | Path | None = None,
    message: str | None = None,
    registry: str | None = None,
    registry_credentials: str | None = None,
    on_error: str = "null",
    max_body: int = INFLATED_LENGTH_MAX,
) -> DataFrame:
    """Return the frame with its bodies inflated and decoded.

    Args:
        frame: any with neve's columns.
        kind: `bytes` inflates `body`; `text` adds `text`; `json`, `avro` and `protobuf` add `value`.
        schema: the type of `value` (StructType or DDL); without it `value` is a VARIANT.
        schema_file: an Avro schema (.avsc), or a Protobuf descriptor set (`protoc --include_imports -o FILE`).
        message: the full name of the Protobuf message.
        registry: instead of a schema_file, http(s)://HOST:PORT of the schema registry whose ids bodies begin with. The
            id is removed from bodies of `json`, for which the registry is not requested.
        registry_credentials: user:password; by default the driver's NEVE_REGISTRY_AUTH.
        on_error: `null` sets a body that cannot be decoded to null, with the reason in the column `body_error`; `stop`
            fails the query with the place of the message.
        max_body: the maximum size of an inflated body, bytes.

    Raises:
        ValueError: the arguments exclude each other.
    """
    _check(kind, schema, schema_file, registry, on_error)
    if registry is None and registry_credentials is not None:
        raise ValueError("registry_credentials require a registry")
    asked = None if registry is None else registry_at(registry, registry_credentials, os.environ)
    from pyspark.sql import functions as f

    result = frame.withColumn(_INFLATED, _inflated(max_body))
    body, error = f.col(f"{_INFLATED}.body"), f.col(f"{_INFLATED}.error")
    if kind == "bytes":
        decoded = _Decoded("body", body, error)
    else:
        no_body = f.when(body.isNull(), "there is no body")
        if kind in _BY_FILE:
            result = result.withColumn(_TEXT, _as_json(body, kind, schema_file, message, asked))
            text, wrong = f.col(f"{_TEXT}.text"), f.col(f"{_TEXT}.error")
        elif asked is not None:
            numbered = (f.length(body) >= _ID_END) & (f.substring(body, 1, 1) == f.lit(b"\x00"))
            result = result.withColumn(_TEXT, f.try_validate_utf8(_without_id(body).cast("string")))
            text = f.when(numbered, f.col(_TEXT))
            wrong = f.when(~numbered, _NO_ID).when(f.col(_TEXT).isNull(), "the body is not UTF-8")
        else:
            result = result.withColumn(_TEXT, f.try_validate_utf8(body.cast("string")))
            text, wrong = f.col(_TEXT), f.when(f.col(_TEXT).isNull(), "the body is not UTF-8")
        error = f.coalesce(error, no_body, wrong)
        decoded = _Decoded("text", text, error) if kind == "text" else _json(text, error, schema)
        if decoded.of is not None:
            result = result.withColumn(_VALUE, decoded.of)
    return _with_result(result, decoded, on_error).drop(_INFLATED, _TEXT, _VALUE)


def _check(
    kind: str, schema: StructType | str | None, schema_file: str | Path | None, registry: str | None, on_error: str
) -> None:
    """Raise ValueError for arguments that exclude each other."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if on_error not in ("null", "stop"):
        raise ValueError(f"on_error must be 'null' or 'stop', got {on_error!r}")
    if schema is not None and kind in ("bytes", "text"):
        raise ValueError("schema requires kind json, avro or protobuf")
    if (schema_file is not None) + (registry is not None) != 1 and kind in _BY_FILE:
        raise ValueError(f"{kind} requires either a schema_file or a registry")
    if schema_file is not None and kind not in _BY_FILE:
        raise ValueError("schema_file requires kind avro or protobuf")
    if registry is not None and kind not in (*_BY_FILE, "json"):
        raise ValueError("registry requires kind avro, protobuf or json")


def split_bodies(decoded: DataFrame) -> Bodies:
    """Divide a decoded frame into decoded rows, and dead letters with place, error and stored body.

    Each of the two reads the archive; with `decoded.persist()`, or in a stream's `foreachBatch`, it is read once.

    Raises:
        ValueError: the frame has no column `body_error`.
    """
    from pyspark.sql import functions as f

    if "body_error" not in decoded.columns:
        raise ValueError("the frame has no column body_error: use decode_bodies(…, on_error='null')")
    is_dead = f.col("body_error").isNotNull()
    kept = [name for name in _DEAD if name in decoded.columns]
    return Bodies(decoded.where(~is_dead).drop("body_error"), decoded.where(is_dead).select(*kept))


def json_schema(frame: DataFrame, rows: int = 1000) -> StructType:
    """Infer the type of the JSON objects in the first bodies that Spark finds, at most 4 MiB of text.

    Args:
        rows: the maximum number of bodies.

    Raises:
        ValueError: the bodies are not JSON, or not all are objects.
    """
    from pyspark.sql import functions as f
    from pyspark.sql.types import ArrayType, DataType, StructType

    is_json = f.try_parse_json("text").isNotNull() & _is_single_value(f.col("text"))
    texts = decode_bodies(frame, "text").select("text").where(is_json)
    sample: list[str] = []
    size = 0
    for row in texts.limit(rows).toLocalIterator():
        if sample and size + len(row.text) > SAMPLE_BYTES:
            break
        size += len(row.text)
        sample.append(row.text)
    if not sample:
        if frame.isEmpty():
            raise ValueError("there are no messages to sample: nothing of the topic is archived yet")
        raise ValueError("no body of the sample is JSON")
    of_all = f.schema_of_json(f.lit(f"[{','.join(sample)}]"))
    text = str(frame.sparkSession.range(1).select(of_all).collect()[0][0])
    found = DataType.fromDDL(text)
    if not isinstance(found, ArrayType) or not isinstance(found.elementType, StructType):
        raise ValueError(f"the bodies of the sample are JSON, but not all are objects: {text[:200]}")
    return found.elementType


_INFLATED, _TEXT, _VALUE = "__neve_inflated", "__neve_text", "__neve_value"


class _Decoded(NamedTuple):
    """A column of the result; `of` is an expression that is evaluated once for the value and its error."""

    name: str
    value: Column
    error: Column
    of: Column | None = None


def _with_result(frame: DataFrame, decoded: _Decoded, on_error: str) -> DataFrame:
    from pyspark.sql import functions as f

    name, value, error, _ = decoded
    if on_error == "null":
        is_whole = f.when(error.isNull(), value)
        return frame.withColumn("body_error", error).withColumn(name, is_whole if name == "value" else value)
    place = [f.concat(f.lit(f"{part} "), f.col(part).cast("string")) for part in _PLACE]
    stop = f.raise_error(f.concat_ws(", ", *place, error))  # a part that is null is left out
    return frame.withColumn(name, f.when(error.isNotNull(), stop).otherwise(value))


def _without_id(body: Column) -> Column:
    """Return the body behind its schema id; an empty body remains empty."""
    from pyspark.sql import functions as f

    return f.substring(body, f.lit(_ID_END + 1), f.length(body))


def _as_json(
    body: Column, kind: str, schema_file: str | Path | None, message: str | None, registry: Registry | None
) -> Column:
    """Return a struct of `text` and `error`."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import StringType

    from neve.spark import registry as by_registry
    from neve.spark import schema_files as by_file

    arrow_udf = getattr(f, "arrow_udf", None)
    if arrow_udf is None:
        raise NotImplementedError(f"{kind} bodies need Spark 4.1 or newer")
    if registry is not None:
        writer = by_registry.json_writer(kind, registry)
    else:
        assert schema_file is not None
        writer = by_file.json_writer(kind, schema_file, message)
    written: Column = arrow_udf(writer, _struct_of("text", StringType()))(body)
    return written


def _json(text: Column, error: Column, schema: StructType | str | None) -> _Decoded:
    """Return the column `value` of a JSON text that is exactly one JSON value, and the reason where it is null."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import DataType, StringType, StructField, StructType

    variant, value, single = f.try_parse_json(text), f.col(_VALUE), _is_single_value(text)
    not_json = (
        f.when(text.startswith("\ufeff"), "the body begins with a byte order mark")
        .when(variant.isNotNull(), "the body has more after its first JSON value")
        .otherwise("the body is not JSON")
    )
    if schema is None:
        no_variant = f.when(_is_json(text), f.lit(_NO_VARIANT)).otherwise(not_json)
        wrong = f.when(value.isNull() | ~single, no_variant)
        return _Decoded("value", value, f.coalesce(error, wrong), variant)
    kind = DataType.fromDDL(schema) if isinstance(schema, str) else schema
    broken = f.when(~single, not_json)
    if not isinstance(kind, StructType):
        is_wrong = value.isNull() | _out_of_range(text, kind)
        misfit = f.when(is_wrong, f.when(_is_json(text), f.lit(_UNFIT)).otherwise(not_json))
        return _Decoded("value", value, f.coalesce(error, broken, misfit), f.from_json(text, kind, _JSON_OPTIONS))
    with_corrupt = StructType([*kind.fields, StructField(_CORRUPT, StringType())])
    options = {**_JSON_OPTIONS, "columnNameOfCorruptRecord": _CORRUPT, "mode": "PERMISSIVE"}
    parsed = f.from_json(text, with_corrupt, options)
    is_wrong = value.isNull() | value.getField(_CORRUPT).isNotNull() | _out_of_range(text, kind)
    misfit = f.when(is_wrong, f.when(_is_json(text), _misfit(text, kind)).otherwise(not_json))
    return _Decoded("value", value.dropFields(_CORRUPT), f.coalesce(error, broken, misfit), parsed)


def _is_single_value(text: Column) -> Column:
    """Return whether nothing but white space follows the first JSON value of the text. Never null.

    Spark's JSON functions parse the first value and ignore the rest of the text. This check is cheaper than `_is_json`
    and leaves it to the parser of the value to reject a text that is not JSON.
    """
    from pyspark.sql import functions as f

    # Nothing can follow an object whose only `}` is its last character.
    flat = text.startswith("{") & (f.instr(text, "}") == f.length(f.rtrim(text, f.lit(" \t\r\n"))))
    alone, followed = _in_brackets(text)
    strict = (f.json_array_length(alone) == 1) & (f.json_array_length(followed) == 2)
    return f.when(flat | strict, True).otherwise(_is_json(text))


def _is_json(text: Column) -> Column:
    """Return whether the text is exactly one JSON value, as `from_json` with `_JSON_OPTIONS` reads it. Never null."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import ArrayType, StringType

    alone, followed = (f.from_json(one, ArrayType(StringType()), _JSON_OPTIONS) for one in _in_brackets(text))
    return f.coalesce((f.size(alone) == 1) & (f.size(followed) == 2), f.lit(False))


def _in_brackets(text: Column) -> tuple[Column, Column]:
    """Return `[text]` and `[text,0]`, which have one and two elements if and only if the text is one JSON value.

    A text that closes the brackets itself has the same number of elements in both, so one of the two differs.
    """
    from pyspark.sql import functions as f

    return f.concat(f.lit("["), text, f.lit("]")), f.concat(f.lit("["), text, f.lit(",0]"))


def _misfit(text: Column, kind: StructType) -> Column:
    """Return an error that names the fields which have a value of another type; evaluated for wrong bodies only."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import StringType, StructField, StructType

    named = list(_leaves(kind))
    if len(named) > _NAMED_FIELDS_MAX:
        named = [(field.name, StructType([field])) for field in kind.fields][:_NAMED_FIELDS_MAX]
    options = {**_JSON_OPTIONS, "columnNameOfCorruptRecord": _CORRUPT, "mode": "PERMISSIVE"}

    def is_wrong(alone: StructType) -> Column:
        parsed = f.from_json(text, StructType([*alone.fields, StructField(_CORRUPT, StringType())]), options)
        return parsed.getField(_CORRUPT).isNotNull() | _out_of_range(text, alone)

    names = f.concat_ws(", ", *[f.when(is_wrong(alone), f.lit(name)) for name, alone in named])
    is_object = text.rlike(r"^\s*\{")  # lists and numbers have no fields to name
    return f.concat_ws(": ", f.lit(_UNFIT), f.when(is_object, f.nullif(names, f.lit(""))))


def _leaves(kind: StructType) -> Iterator[tuple[str, StructType]]:
    """Yield `a.b` for each field that is no struct, and the schema that has this field alone."""
    from pyspark.sql.types import StructField, StructType

    for field in kind.fields:
        if not isinstance(field.dataType, StructType):
            yield field.name, StructType([field])
            continue
        for name, inner in _leaves(field.dataType):
            yield f"{field.name}.{name}", StructType([StructField(field.name, inner)])


def _out_of_range(text: Column, kind: DataType) -> Column:
    """Return whether a number of the text exceeds the type that the schema gives it. Never null.

    Spark's JSON parser wraps such numbers around in TINYINT and TIMESTAMP and makes FLOAT infinite, without an error.
    The fields of these types are parsed once more as wider types; a schema without them costs nothing.
    """
    from pyspark.sql import functions as f

    wider = _wider(kind)
    if wider is None:
        return f.lit(False)
    parsed = f.from_json(text, wider, _JSON_OPTIONS)
    return f.coalesce(_exceeds(parsed, wider, kind), f.lit(False))


def _wider(kind: DataType) -> DataType | None:
    """Return the type with only its TINYINT, FLOAT and TIMESTAMP parts, widened; None where it has none."""
    from pyspark.sql import types as t

    if isinstance(kind, t.ByteType | t.TimestampType):
        return t.StringType()  # digits as they stand in the text
    if isinstance(kind, t.FloatType):
        return t.DoubleType()
    if isinstance(kind, t.ArrayType):
        element = _wider(kind.elementType)
        return None if element is None else t.ArrayType(element)
    if isinstance(kind, t.MapType):
        held = _wider(kind.valueType)
        return None if held is None else t.MapType(t.StringType(), held)
    if isinstance(kind, t.StructType):
        fields = [(field.name, _wider(field.dataType)) for field in kind.fields]
        wide = [t.StructField(name, inner) for name, inner in fields if inner is not None]
        return t.StructType(wide) if wide else None
    return None


def _exceeds(value: Column, wider: DataType, kind: DataType) -> Column:
    """Return whether a value of the type that `_wider` made of `kind` is beyond what `kind` holds; null may mean no."""
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    if isinstance(wider, t.StructType) and isinstance(kind, t.StructType):
        inner = [_exceeds(value.getField(one.name), one.dataType, kind[one.name].dataType) for one in wider.fields]
        return f.coalesce(*[f.when(one, True) for one in inner], f.lit(False))
    if isinstance(wider, t.ArrayType) and isinstance(kind, t.ArrayType):
        return f.exists(value, lambda one: f.coalesce(_exceeds(one, wider.elementType, kind.elementType), f.lit(False)))
    if isinstance(wider, t.MapType) and isinstance(kind, t.MapType):
        held = f.map_values(value)
        return f.exists(held, lambda one: f.coalesce(_exceeds(one, wider.valueType, kind.valueType), f.lit(False)))
    if isinstance(kind, t.FloatType):
        return (f.abs(value) > f.lit(_FLOAT_MAX)) & (f.abs(value) < f.lit(float("inf")))  # NaN is above infinity
    number = f.when(value.rlike("^-?[0-9]+$"), value.try_cast("decimal(38, 0)"))
    most = f.lit(_TIMESTAMP_SECONDS_MAX) if isinstance(kind, t.TimestampType) else f.lit(_TINYINT_MAX)
    least = f.lit(-_TIMESTAMP_SECONDS_MAX) if isinstance(kind, t.TimestampType) else f.lit(-_TINYINT_MAX - 1)
    too_long = value.rlike("^-?[0-9]{38,}$")
    return too_long | (number > most) | (number < least)


def _inflated(limit: int) -> Column:
    """Return a struct of `body` and `error`; only compressed bodies pass through Python."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import BinaryType

    kind = _struct_of("body", BinaryType())
    arrow_udf = getattr(f, "arrow_udf", None)  # from Spark 4.1 on
    run = arrow_udf(batch_inflater(limit), kind) if arrow_udf else f.udf(inflater(limit), kind, useArrow=False)
    packed = f.col("sys_flag").bitwiseAND(COMPRESSED) != 0
    inflated = run(f.when(packed, f.col("body")), f.when(packed, f.col("sys_flag")))
    as_it_is = f.struct(f.col("body").alias("body"), f.lit(None).cast("string").alias("error"))
    return f.when(packed, inflated).otherwise(as_it_is)


def _struct_of(name: str, kind: DataType) -> StructType:
    """Return the type without DDL, which a Connect server would parse: declared pipelines allow no such request."""
    from pyspark.sql.types import StringType, StructField, StructType

    return StructType([StructField(name, kind), StructField("error", StringType())])


def batch_inflater(limit: int = INFLATED_LENGTH_MAX, most: int = ARRAY_BYTES) -> Callable[[Any, Any], Any]:
    """Return `inflater` as a function of Arrow arrays for Spark's workers.

    Args:
        limit: the maximum size of an inflated body, bytes.
        most: the maximum size of the bodies of one array, bytes.
    """
    import pyarrow as pa

    one = inflater(limit)

    def inflate_all(bodies: Any, flags: Any) -> Any:
        found: list[Inflated] = []
        size = 0
        for body, flag in zip(bodies.to_pylist(), flags.to_pylist(), strict=True):
            found.append(one(body, flag))
            size += len(found[-1][0] or b"")
            if size > most:  # checked per body: a few bytes may inflate to any size
                raise ValueError(
                    f"the first {len(found)} of {len(bodies)} bodies are more than {most} bytes when inflated, which "
                    "exceeds one Arrow array: decrease spark.sql.execution.arrow.maxRecordsPerBatch"
                )
        inflated = pa.array([body for body, _ in found], pa.binary())
        errors = pa.array([error for _, error in found], pa.string())
        return pa.StructArray.from_arrays([inflated, errors], ["body", "error"])

    inflate_all.__annotations__ = dict.fromkeys(("bodies", "flags", "return"), pa.Array)  # Spark reads the annotations
    return inflate_all


def inflater(limit: int = INFLATED_LENGTH_MAX) -> Callable[[bytes | None, int | None], Inflated]:
    """Return a function for Spark's workers that returns the inflated body, or the reason why there is none.

    It is pickled by value with everything that it calls, so workers need no neve.
    """
    from pyspark.cloudpickle import register_pickle_by_value

    register_pickle_by_value(record_bodies)
    inflate = record_bodies.inflate

    def inflate_one(body: bytes | None, sys_flag: int | None) -> Inflated:
        if body is None or sys_flag is None:
            return body, None
        try:
            return inflate(bytes(body), sys_flag, limit), None
        except ValueError as error:
            return None, str(error)

    return inflate_one
