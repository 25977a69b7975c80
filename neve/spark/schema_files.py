"""Avro and Protobuf bodies as JSON text, by a schema file: functions of Arrow arrays for Spark's workers.

The result is JSON, so that schemas, VARIANTs and errors work in the same way for all kinds of bodies. Bytes are base64,
times ISO 8601, decimals text; Protobuf's library writes its JSON, with the names of the fields. The functions are
pickled by value: workers need `fastavro` or `protobuf` and no neve. Functions and imports are nested for this reason.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Text = tuple[str | None, str | None]
OneBody = Callable[[bytes], str]


def json_writer(kind: str, schema_file: str | Path, message: str | None) -> Callable[[Any], Any]:
    """Return a function from an array of bodies to a struct of their JSON (`text`) or the reason without (`error`).

    Args:
        kind: `avro`, one value per body without the header of a file; or `protobuf`.
        schema_file: an Avro schema (.avsc), or a descriptor set (`protoc --include_imports -o FILE`).
        message: the full name of the Protobuf message.

    Raises:
        FileNotFoundError: the file does not exist.
        ImportError: `fastavro` or `protobuf` is not installed.
        ValueError: the file is not a schema, or does not contain the message.
    """
    data = Path(schema_file).read_bytes()
    try:
        one, errors = _avro(data) if kind == "avro" else _protobuf(data, message)
    except ModuleNotFoundError as missing:
        package = {"avro": "fastavro"}.get(kind, kind)
        raise ImportError(f"{kind} bodies need {package}, here and on the workers: pip install {package}") from missing
    import pyarrow as pa

    def write(body: bytes | None) -> Text:
        if body is None:
            return None, None
        try:
            return one(body), None
        except errors as error:
            return None, f"the body is not {kind} of the schema: {type(error).__name__} {error}".strip()

    def write_all(bodies: Any) -> Any:
        found = [write(body) for body in bodies.to_pylist()]
        texts = pa.array([text for text, _ in found], pa.string())
        reasons = pa.array([error for _, error in found], pa.string())
        return pa.StructArray.from_arrays([texts, reasons], ["text", "error"])

    write_all.__annotations__ = dict.fromkeys(("bodies", "return"), pa.Array)  # Spark reads the annotations
    return write_all


#: The exceptions that an invalid body raises.
AVRO_ERRORS = (ValueError, EOFError, LookupError, TypeError, ArithmeticError, MemoryError, RecursionError)


def _avro(data: bytes) -> tuple[OneBody, tuple[type[Exception], ...]]:
    import json

    import fastavro

    reader = avro_reader()
    try:
        schema = json.loads(data)
        reader(schema, [])
    except (ValueError, fastavro.schema.SchemaParseException, fastavro.schema.UnknownType) as error:
        raise ValueError(f"the file is not an Avro schema: {error}") from error
    made: list[OneBody] = []  # once per worker

    def one(body: bytes) -> str:
        if not made:
            made.append(reader(schema, []))
        return made[0](body)

    return one, AVRO_ERRORS


def avro_reader() -> Callable[[Any, list[Any]], OneBody]:
    """Return a function that returns the reader of a schema with its referenced schemas; it is pickled by value."""

    def reader_of(schema: Any, referred: list[Any]) -> OneBody:
        import base64
        import io
        import json
        import math

        import fastavro
        import fastavro._read_py

        #: fastavro's compiled reader recurses per level; more than some ten thousand levels overflow the stack of the
        #: process. A level has at least one byte, except in records that contain themselves directly.
        harmless = 2000
        named: dict[str, Any] = {}
        for other in referred:
            fastavro.parse_schema(other, named_schemas=named)
        parsed: Any = fastavro.parse_schema(schema, named_schemas=named)

        def nests(kind: Any, within: tuple[str, ...]) -> bool:
            """Return whether a value may contain another of its own type."""
            if isinstance(kind, str):
                return kind in within or (kind in named and nests(named[kind], within))
            if isinstance(kind, list):
                return any(nests(one, within) for one in kind)
            if kind["type"] in ("record", "error"):
                inner = (*within, kind["name"])
                return any(nests(field["type"], inner) for field in kind["fields"])
            inside = kind.get("items", kind.get("values"))
            return nests(kind["type"] if inside is None else inside, within)

        def holds_itself(kind: Any, within: tuple[str, ...]) -> bool:
            """Return whether a record contains itself without a byte of the body in between."""
            if isinstance(kind, str):
                return kind in within or (kind in named and holds_itself(named[kind], within))
            if isinstance(kind, list) or kind["type"] not in ("record", "error"):
                return False
            return any(holds_itself(field["type"], (*within, kind["name"])) for field in kind["fields"])

        def plain(value: Any) -> str:
            if isinstance(value, bytes):
                return base64.b64encode(value).decode()
            return str(value.isoformat() if hasattr(value, "isoformat") else value)

        def finite(value: Any) -> Any:
            """Return the value with the numbers that JSON lacks as text, which Spark reads back as DOUBLE or FLOAT."""
            if isinstance(value, float) and not math.isfinite(value):
                return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
            if isinstance(value, dict):
                return {name: finite(one) for name, one in value.items()}
            return [finite(one) for one in value] if isinstance(value, list) else value

        compiled, careful = fastavro.schemaless_reader, fastavro._read_py.schemaless_reader
        whole = {name: kind for name, kind in named.items() if kind["type"] in ("record", "error")}
        if any(holds_itself(kind, ()) for kind in whole.values()):
            raise ValueError(f"a record contains itself directly, so bodies would be infinite: {', '.join(whole)}")
        is_deep = nests(parsed, ())

        def one(body: bytes) -> str:
            stream = io.BytesIO(body)
            read = careful if is_deep and len(body) > harmless else compiled
            value = read(stream, parsed, None)
            if stream.tell() != len(body):
                raise ValueError(f"the value ends at byte {stream.tell()} of {len(body)}")
            try:
                return json.dumps(value, default=plain, ensure_ascii=False, allow_nan=False)
            except ValueError:
                return json.dumps(finite(value), default=plain, ensure_ascii=False, allow_nan=False)

        return one

    return reader_of


def _protobuf(data: bytes, message: str | None) -> tuple[OneBody, tuple[type[Exception], ...]]:
    from google.protobuf import descriptor_pb2, descriptor_pool
    from google.protobuf.message import DecodeError

    if message is None:
        raise ValueError("protobuf needs the full name of the message, message='package.Name'")
    try:
        files = descriptor_pb2.FileDescriptorSet.FromString(data)
        pool = descriptor_pool.DescriptorPool()
        for file in files.file:
            pool.Add(file)
        pool.FindMessageTypeByName(message)
    except (DecodeError, TypeError) as error:
        raise ValueError(f"the file is not a descriptor set with all imports: {error}") from error
    except KeyError as missing:
        raise ValueError(f"the descriptor set has no message {message}") from missing
    classes: list[Any] = []  # once per worker

    def one(body: bytes) -> str:
        from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

        if not classes:
            pool = descriptor_pool.DescriptorPool()
            for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
                pool.Add(file)
            classes.append(message_factory.GetMessageClass(pool.FindMessageTypeByName(message)))
        value = classes[0].FromString(body)
        return str(json_format.MessageToJson(value, preserving_proto_field_name=True, indent=None, ensure_ascii=False))

    return one, (DecodeError, ValueError, TypeError)
