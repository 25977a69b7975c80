"""Avro and Protobuf bodies as JSON text, by a schema file: functions of Arrow arrays for Spark's workers.

What comes out is JSON, so that a schema, a VARIANT and errors are one thing for all kinds of bodies. Bytes are base64,
times ISO 8601, decimals text; Protobuf's JSON is as its own library writes it, with the names of the fields. The
functions travel by value: workers need `fastavro` or `protobuf`, and no neve.
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


def _avro(data: bytes) -> tuple[OneBody, tuple[type[Exception], ...]]:
    import json

    import fastavro

    try:
        schema = json.loads(data)
        fastavro.parse_schema(schema)
    except (ValueError, fastavro.schema.SchemaParseException, fastavro.schema.UnknownType) as error:
        raise ValueError(f"the file is no Avro schema: {error}") from error
    parsed: list[Any] = []  # once in each worker

    def plain(value: Any) -> str:
        import base64

        if isinstance(value, bytes):
            return base64.b64encode(value).decode()
        return str(value.isoformat() if hasattr(value, "isoformat") else value)

    def one(body: bytes) -> str:
        import io

        import fastavro

        if not parsed:
            parsed.append(fastavro.parse_schema(schema))
        stream = io.BytesIO(body)
        value = fastavro.schemaless_reader(stream, parsed[0], None)
        if stream.tell() != len(body):
            raise ValueError(f"it ends at byte {stream.tell()} of {len(body)}")
        return json.dumps(value, default=plain, ensure_ascii=False, allow_nan=False)

    return one, (ValueError, EOFError, LookupError, TypeError, ArithmeticError, MemoryError, RecursionError)


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
