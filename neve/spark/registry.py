"""Bodies that begin with the id of their schema in a registry, as Confluent's serializers write them.

    0          one byte, always 0
    id         four bytes, big-endian: the id of the schema in the registry
    indexes    Protobuf only, zigzag varints: their count, and the index of the message at each level of nesting; a
               single 0 is the first message
    the value

Spark's workers request each schema once: `GET /schemas/ids/N`, and `GET /subjects/S/versions/V` for referenced schemas.
The registries of Confluent and Redpanda, Karapace and Apicurio (its ccompat path) support these. An unknown id is an
error of its body; a registry that does not answer ends the query. The functions are pickled by value, as in
`schema_files`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from neve.spark.schema_files import AVRO_ERRORS, OneBody, Text, avro_reader

#: The environment variable with user:password for the registry.
CREDENTIALS = "NEVE_REGISTRY_AUTH"


@dataclass(frozen=True, slots=True)
class Registry:
    """The URL of a registry, and `user:password`."""

    url: str
    credentials: str | None = field(default=None, repr=False)


def registry_at(url: str, credentials: str | None, environment: Mapping[str, str]) -> Registry:
    """Return a registry with the credentials of the driver. Raises ValueError."""
    where = urlsplit(url)
    if where.scheme not in ("http", "https") or not where.hostname:
        raise ValueError(f"registry must be http://HOST:PORT or https://HOST, got {url!r}")
    if where.username is not None or where.query or where.fragment:
        raise ValueError(
            f"the URL of a registry must not have credentials or parameters; use {CREDENTIALS}=user:password"
        )
    credentials = credentials or environment.get(CREDENTIALS)
    if credentials is not None and ":" not in credentials:
        raise ValueError("the credentials of a registry must be user:password")
    return Registry(url.rstrip("/"), credentials)


def json_writer(kind: str, registry: Registry) -> Callable[[Any], Any]:
    """Return a function from an array of bodies to a struct of their JSON (`text`) or the reason without (`error`).

    Raises:
        ImportError: `fastavro` or `protobuf` is not installed.
    """
    try:
        reader_by, errors = (_avro_by(avro_reader()), AVRO_ERRORS) if kind == "avro" else _protobuf_by()
    except ModuleNotFoundError as missing:
        package = {"avro": "fastavro"}.get(kind, kind)
        raise ImportError(f"{kind} bodies need {package}, here and on the workers: pip install {package}") from missing
    import pyarrow as pa

    ask = _asking(registry)
    readers: dict[int, OneBody] = {}  # per worker

    def write_all(bodies: Any) -> Any:
        unknown: dict[int, str] = {}  # per array: a follower of a registry may know the id later

        def reader_of(number: int) -> OneBody | str:
            if number not in readers and number not in unknown:
                try:
                    readers[number] = reader_by(number, ask)
                except LookupError as error:
                    unknown[number] = str(error.args[0])
            return readers[number] if number in readers else unknown[number]

        def write(body: bytes | None) -> Text:
            if body is None:
                return None, None
            if len(body) < 5 or body[0] != 0:
                return None, "the body does not begin with 0 and four bytes, so it has no schema id"
            number = int.from_bytes(body[1:5], "big")
            read = reader_of(number)
            if isinstance(read, str):
                return None, read
            try:
                return read(body[5:]), None
            except errors as error:
                reason = f"{type(error).__name__} {error}".strip()
                return None, f"the body is not {kind} of the registry's schema {number}: {reason}"

        found = [write(body) for body in bodies.to_pylist()]
        texts = pa.array([text for text, _ in found], pa.string())
        errors_found = pa.array([error for _, error in found], pa.string())
        return pa.StructArray.from_arrays([texts, errors_found], ["text", "error"])

    write_all.__annotations__ = dict.fromkeys(("bodies", "return"), pa.Array)  # Spark reads the annotations
    return write_all


#: Returns the JSON at a path of the registry, or None for 404.
Ask = Callable[[str], "dict[str, Any] | None"]
#: Returns the reader of a schema id. Raises LookupError with the reason.
ReaderBy = Callable[[int, Ask], OneBody]


def _asking(registry: Registry) -> Ask:
    url, credentials = registry.url, registry.credentials

    def ask(path: str) -> dict[str, Any] | None:
        import base64
        import json
        import threading
        import urllib.error
        import urllib.request

        request = urllib.request.Request(url + path, headers={"Accept": "application/vnd.schemaregistry.v1+json"})
        if credentials is not None:
            request.add_header("Authorization", "Basic " + base64.b64encode(credentials.encode()).decode())
        tries, reason = 5, ""
        for again in range(tries):
            try:
                with urllib.request.urlopen(request, timeout=10) as answer:
                    found = json.load(answer)
                if not isinstance(found, dict):
                    raise RuntimeError(f"{url}{path} is not a schema registry: it answers {str(found)[:100]}")
                return found
            except urllib.error.HTTPError as refused:
                if refused.code == 404:
                    return None
                reason = f"{refused.code} {refused.reason}"
                if refused.code < 500 and refused.code != 429:
                    break
            except ValueError as error:
                reason = f"the answer is not JSON: {error}"
                break
            except OSError as error:
                reason = str(error)
            if again < tries - 1:
                threading.Event().wait(0.2 * 2**again)
        raise RuntimeError(f"the schema registry does not return {url}{path}: {reason}")

    return ask


def _referred(given: str) -> Callable[[dict[str, Any], Ask], list[tuple[str, str]]]:
    """Return a function that returns (name, schema) of all referenced schemas, dependencies first.

    Args:
        given: query parameters of the requests.
    """

    def referred(found: dict[str, Any], ask: Ask) -> list[tuple[str, str]]:
        from urllib.parse import quote

        schemas: dict[str, str] = {}

        def collect(of: dict[str, Any], above: tuple[str, ...]) -> None:
            for reference in of.get("references") or ():
                name, subject, version = reference["name"], reference["subject"], reference["version"]
                if name in schemas or name in above:
                    continue
                other = ask(f"/subjects/{quote(subject, safe='')}/versions/{version}{given}")
                if other is None:
                    raise LookupError(f"the registry has no version {version} of {subject}, which a schema references")
                collect(other, (*above, name))
                schemas[name] = other["schema"]

        collect(found, ())
        return list(schemas.items())

    return referred


def _avro_by(reader_of: Callable[[Any, list[Any]], OneBody]) -> ReaderBy:
    import fastavro  # noqa: F401 - an error on the driver is clearer than one of a worker

    referred = _referred("")

    def reader_by(number: int, ask: Ask) -> OneBody:
        import json

        found = ask(f"/schemas/ids/{number}")
        if found is None:
            raise LookupError(f"the registry has no schema {number}")
        kind = found.get("schemaType", "AVRO")
        if kind != "AVRO":
            raise LookupError(f"the registry's schema {number} has type {kind}, not AVRO")
        others = [json.loads(text) for _, text in referred(found, ask)]
        try:
            return reader_of(json.loads(found["schema"]), others)
        except Exception as error:  # fastavro raises various errors for an invalid schema
            raise LookupError(f"the registry's schema {number} cannot be read: {error}") from error

    return reader_by


def _protobuf_by() -> tuple[ReaderBy, tuple[type[Exception], ...]]:
    from google.protobuf.message import DecodeError

    file_of, bodies_of = _file_of(), _bodies_of()

    def reader_by(number: int, ask: Ask) -> OneBody:
        return bodies_of(*file_of(number, ask))

    return reader_by, (DecodeError, ValueError, TypeError, LookupError)


def _file_of() -> Callable[[int, Ask], tuple[Any, Any]]:
    """Return a function that returns the descriptor of a schema id, and the file that is built from it."""
    # The text of a schema would need a compiler.
    serialized = "?format=serialized"
    referred = _referred(serialized)

    def file_of(number: int, ask: Ask) -> tuple[Any, Any]:
        import base64
        import importlib

        from google.protobuf import descriptor_pb2, descriptor_pool
        from google.protobuf.message import DecodeError

        found = ask(f"/schemas/ids/{number}{serialized}")
        if found is None:
            raise LookupError(f"the registry has no schema {number}")
        kind = found.get("schemaType", "AVRO")
        if kind != "PROTOBUF":
            raise LookupError(f"the registry's schema {number} has type {kind}, not PROTOBUF")

        def descriptor(name: str, text: str) -> Any:
            try:
                file = descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(text, validate=True))
            except (ValueError, DecodeError) as error:
                raise LookupError(f"the registry returns schema {number} only as text: use a schema_file") from error
            file.name = name
            return file

        pool = descriptor_pool.DescriptorPool()
        files = [descriptor(name, text) for name, text in referred(found, ask)]
        main = descriptor(f"schema-{number}.proto", found["schema"])
        known = {file.name for file in files}
        try:
            for file in (*files, main):
                for name in file.dependency:
                    if name not in known and name.startswith("google/protobuf/"):  # which registries omit
                        module = importlib.import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
                        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
                        known.add(name)
                pool.Add(file)
            return main, pool.FindFileByName(main.name)
        except (TypeError, KeyError, ImportError) as error:
            raise LookupError(f"the registry's schema {number} cannot be read: {error}") from error

    return file_of


def _bodies_of() -> Callable[[Any, Any], OneBody]:
    """Return a function that returns the reader of all messages of a file."""

    def bodies_of(main: Any, outermost: Any) -> OneBody:
        from google.protobuf import json_format, message_factory

        classes: dict[tuple[int, ...], Any] = {}

        def varint(body: bytes, at: int) -> tuple[int, int]:
            value = shift = 0
            while True:
                byte = body[at]  # IndexError if the body ends
                value |= (byte & 0x7F) << shift
                at, shift = at + 1, shift + 7
                if byte < 0x80:
                    return (value >> 1) ^ -(value & 1), at
                if shift > 35:
                    raise ValueError("its message indexes are not varints")

        def class_of(place: tuple[int, ...]) -> Any:
            if min(place) < 0:
                raise ValueError(f"its message indexes are {place}")
            inner = main.message_type[place[0]]
            message = outermost.message_types_by_name[inner.name]
            for index in place[1:]:
                inner = inner.nested_type[index]
                message = message.nested_types_by_name[inner.name]
            return message_factory.GetMessageClass(message)

        def one(body: bytes) -> str:
            count, at = varint(body, 0)
            indexes = [0] if count == 0 else []
            for _ in range(count):
                index, at = varint(body, at)
                indexes.append(index)
            place = tuple(indexes)
            if place not in classes:
                classes[place] = class_of(place)
            value = classes[place].FromString(body[at:])
            return str(
                json_format.MessageToJson(value, preserving_proto_field_name=True, indent=None, ensure_ascii=False)
            )

        return one

    return bodies_of
