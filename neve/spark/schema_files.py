"""Avro and Protobuf bodies as JSON text, by a schema file: functions of Arrow arrays for Spark's workers.

What comes out is JSON, so that a schema, a VARIANT and errors are one thing for all kinds of bodies. Bytes are base64,
times ISO 8601, decimals text; Protobuf's JSON is as its own library writes it, with the names of the fields. The
functions travel by value: workers need `fastavro` or `protobuf`, and no neve. So each stands whole within another.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Text = tuple[str | None, str | None]
OneBody = Callable[[bytes], str]


def json_writer(kind: str, schema_file: str | Path, message: str | None) -> Callable[[Any], Any]:
    """From an array of bodies to one of their JSON (`text`) and of why there is none (`error`).

    Args:
        kind: `avro`, each body one value without a file's header; or `protobuf`.
        schema_file: an Avro schema (.avsc); or a descriptor set, as `protoc --include_imports -o FILE` writes it.
        message: the full name of a body's message, for protobuf.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: `fastavro` or `protobuf` is not installed.
        ValueError: the file is no schema, or has no such message.
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
        told = pa.array([error for _, error in found], pa.string())
        return pa.StructArray.from_arrays([texts, told], ["text", "error"])

    write_all.__annotations__ = dict.fromkeys(("bodies", "return"), pa.Array)  # Spark goes by them
    return write_all


#: What a body that is none may raise.
AVRO_ERRORS = (ValueError, EOFError, LookupError, TypeError, ArithmeticError, MemoryError, RecursionError)


def _avro(data: bytes) -> tuple[OneBody, tuple[type[Exception], ...]]:
    import json

    import fastavro

    reader = avro_reader()
    try:
        schema = json.loads(data)
        reader(schema, [])
    except (ValueError, fastavro.schema.SchemaParseException, fastavro.schema.UnknownType) as error:
        raise ValueError(f"the file is no Avro schema: {error}") from error
    made: list[OneBody] = []  # once in each worker

    def one(body: bytes) -> str:
        if not made:
            made.append(reader(schema, []))
        return made[0](body)

    return one, AVRO_ERRORS


def avro_reader() -> Callable[[Any, list[Any]], OneBody]:
    """What makes of a schema, and of those that it refers to by name, a reader of bodies. It travels by value."""

    def reader_of(schema: Any, referred: list[Any]) -> OneBody:
        import base64
        import io
        import json
        import math

        import fastavro
        import fastavro._read_py

        #: fastavro's compiled reader calls itself for each level, and the stack of a process that nests deeper than
        #: some ten thousand ends it. A level takes a byte at least, but for records that hold themselves directly.
        harmless = 2000
        named: dict[str, Any] = {}
        for other in referred:
            fastavro.parse_schema(other, named_schemas=named)
        parsed: Any = fastavro.parse_schema(schema, named_schemas=named)

        def nests(kind: Any, within: tuple[str, ...]) -> bool:
            """Whether a value may hold another of its own type."""
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
            """The same where nothing of the body stands between the two."""
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
            raise ValueError(f"a record holds itself, so no body ever ends: {', '.join(whole)}")
        is_deep = nests(parsed, ())

        def one(body: bytes) -> str:
            stream = io.BytesIO(body)
            read = careful if is_deep and len(body) > harmless else compiled
            value = read(stream, parsed, None)
            if stream.tell() != len(body):
                raise ValueError(f"it ends at byte {stream.tell()} of {len(body)}")
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
        raise ValueError(f"the file is no descriptor set with all that it imports: {error}") from error
    except KeyError as missing:
        raise ValueError(f"the descriptor set has no message {message}") from missing
    classes: list[Any] = []  # once in each worker

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
