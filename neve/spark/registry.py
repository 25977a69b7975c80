"""Bodies that name their schema by its number in a registry, as Confluent's serializers write them.

    0          one byte, always 0
    id         four bytes, the most significant first: the schema's number in the registry
    indexes    of Protobuf alone, zigzag varints: how many, and which message of the file, down from the outermost; a
               single 0 stands for the first message
    the value

The registry is asked in Spark's workers, once for each number: `GET /schemas/ids/N`, and
`GET /subjects/S/versions/V` for what a schema refers to. Confluent's, Karapace, Redpanda's and Apicurio's (its ccompat
path) answer these. A number that the registry does not know is a fault of its body; a registry that does not answer
ends the query. The functions travel by value, as those of `schema_files`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from neve.spark.schema_files import AVRO_ERRORS, OneBody, Text, avro_reader

#: user:password for the registry, where none is given.
CREDENTIALS = "NEVE_REGISTRY_AUTH"


@dataclass(frozen=True, slots=True)
class Registry:
    """Where it is, and who asks: `user:password`."""

    url: str
    credentials: str | None = field(default=None, repr=False)


def registry_at(url: str, credentials: str | None, environment: Mapping[str, str]) -> Registry:
    """With the credentials that the driver finds. Raises ValueError."""
    where = urlsplit(url)
    if where.scheme not in ("http", "https") or not where.hostname:
        raise ValueError(f"a registry is at http://HOST:PORT or https://HOST, not {url!r}")
    if where.username is not None or where.query or where.fragment:
        raise ValueError(f"a registry's URL is without credentials and parameters; {CREDENTIALS} says user:password")
    credentials = credentials or environment.get(CREDENTIALS)
    if credentials is not None and ":" not in credentials:
        raise ValueError("a registry's credentials are user:password")
    return Registry(url.rstrip("/"), credentials)


def json_writer(kind: str, registry: Registry) -> Callable[[Any], Any]:
    """From an array of bodies to one of their JSON (`text`) and of why there is none (`error`).

    Raises:
        ImportError: `fastavro` or `protobuf`, which bodies of this kind need, is not installed.
    """
    try:
        reader_by, errors = (_avro_by(avro_reader()), AVRO_ERRORS) if kind == "avro" else _protobuf_by()
    except ModuleNotFoundError as missing:
        package = {"avro": "fastavro"}.get(kind, kind)
        raise ImportError(f"{kind} bodies need {package}, here and on the workers: pip install {package}") from missing
    import pyarrow as pa

    ask = _asking(registry)
    readers: dict[int, OneBody] = {}  # of one worker

    def write_all(bodies: Any) -> Any:
        unknown: dict[int, str] = {}  # for these bodies: a registry that follows another may know it a moment later

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
                return None, "the body does not begin with 0 and four bytes, so it names no schema of a registry"
            number = int.from_bytes(body[1:5], "big")
            read = reader_of(number)
            if isinstance(read, str):
                return None, read
            try:
                return read(body[5:]), None
            except errors as error:
                told = f"{type(error).__name__} {error}".strip()
                return None, f"the body is not {kind} of the registry's schema {number}: {told}"

        found = [write(body) for body in bodies.to_pylist()]
        texts = pa.array([text for text, _ in found], pa.string())
        told = pa.array([error for _, error in found], pa.string())
        return pa.StructArray.from_arrays([texts, told], ["text", "error"])

    write_all.__annotations__ = dict.fromkeys(("bodies", "return"), pa.Array)  # Spark goes by them
    return write_all


#: What the registry says at a path, or None where it knows nothing of it.
Ask = Callable[[str], "dict[str, Any] | None"]
#: By a schema's number. Raises LookupError with why there is no reader.
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
                    raise RuntimeError(f"{url}{path} is no schema registry's: it answers {str(found)[:100]}")
                return found
            except urllib.error.HTTPError as refused:
                if refused.code == 404:
                    return None
                reason = f"{refused.code} {refused.reason}"
                if refused.code < 500 and refused.code != 429:
                    break
            except ValueError as error:
                reason = f"no JSON: {error}"
                break
            except OSError as error:
                reason = str(error)
            if again < tries - 1:
                threading.Event().wait(0.2 * 2**again)
        raise RuntimeError(f"the schema registry can't be asked for {url}{path}: {reason}")

    return ask


def _referred(given: str) -> Callable[[dict[str, Any], Ask], list[tuple[str, str]]]:
    """(name, schema) of all that a schema refers to, first what others refer to. `given`: how it is asked for."""

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
                    raise LookupError(f"the registry has no version {version} of {subject}, which a schema refers to")
                collect(other, (*above, name))
                schemas[name] = other["schema"]

        collect(found, ())
        return list(schemas.items())

    return referred


def _avro_by(reader_of: Callable[[Any, list[Any]], OneBody]) -> ReaderBy:
    import fastavro  # noqa: F401 - on the driver it is to be there, too

    referred = _referred("")

    def reader_by(number: int, ask: Ask) -> OneBody:
        import json

        found = ask(f"/schemas/ids/{number}")
        if found is None:
            raise LookupError(f"the registry has no schema {number}")
        kind = found.get("schemaType", "AVRO")
        if kind != "AVRO":
            raise LookupError(f"the registry's schema {number} is of {kind}, not of Avro")
        others = [json.loads(text) for _, text in referred(found, ask)]
        try:
            return reader_of(json.loads(found["schema"]), others)
        except Exception as error:  # a schema that is none, whatever fastavro makes of it
            raise LookupError(f"the registry's schema {number} can't be read: {error}") from error

    return reader_by


def _protobuf_by() -> tuple[ReaderBy, tuple[type[Exception], ...]]:
    from google.protobuf.message import DecodeError

    file_of, bodies_of = _file_of(), _bodies_of()

    def reader_by(number: int, ask: Ask) -> OneBody:
        return bodies_of(*file_of(number, ask))

    return reader_by, (DecodeError, ValueError, TypeError, LookupError)


def _file_of() -> Callable[[int, Ask], tuple[Any, Any]]:
    """The schema of a number, as a descriptor and as what is made of it with all that it imports."""
    # Its text would need a compiler.
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
            raise LookupError(f"the registry's schema {number} is of {kind}, not of Protobuf")

        def descriptor(name: str, text: str) -> Any:
            try:
                file = descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(text, validate=True))
            except (ValueError, DecodeError) as error:
                raise LookupError(
                    f"the registry gives schema {number} as text alone: decode by a schema_file"
                ) from error
            file.name = name
            return file

        pool = descriptor_pool.DescriptorPool()
        files = [descriptor(name, text) for name, text in referred(found, ask)]
        main = descriptor(f"schema-{number}.proto", found["schema"])
        known = {file.name for file in files}
        try:
            for file in (*files, main):
                for name in file.dependency:
                    if name not in known and name.startswith("google/protobuf/"):  # which registries leave out
                        module = importlib.import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
                        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
                        known.add(name)
                pool.Add(file)
            return main, pool.FindFileByName(main.name)
        except (TypeError, KeyError, ImportError) as error:
            raise LookupError(f"the registry's schema {number} can't be read: {error}") from error

    return file_of


def _bodies_of() -> Callable[[Any, Any], OneBody]:
    """Bodies of any message of a file."""

    def bodies_of(main: Any, outermost: Any) -> OneBody:
        from google.protobuf import json_format, message_factory

        classes: dict[tuple[int, ...], Any] = {}

        def varint(body: bytes, at: int) -> tuple[int, int]:
            value = shift = 0
            while True:
                byte = body[at]  # an IndexError is a body that ends too soon
                value |= (byte & 0x7F) << shift
                at, shift = at + 1, shift + 7
                if byte < 0x80:
                    return (value >> 1) ^ -(value & 1), at
                if shift > 35:
                    raise ValueError("its message indexes are no varints")

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
