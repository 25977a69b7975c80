"""Tests of the conversion of bodies to JSON by schemas of a registry, as in Spark workers."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, timestamp_pb2
from pyspark import cloudpickle

from neve.spark.registry import Registry, json_writer, registry_at
from tests.kit.server.schema_registry import SchemaRegistry
from tests.kit.wire.schema_bodies import AS_JSON, ORDER, avro_body, descriptors, protobuf_body


@pytest.fixture
def registry() -> Iterator[SchemaRegistry]:
    with SchemaRegistry() as running:
        yield running


def framed(number: int, value: bytes, indexes: bytes = b"") -> bytes:
    return b"\x00" + number.to_bytes(4, "big") + indexes + value


def written(kind: str, registry: SchemaRegistry, *bodies: bytes | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json_writer(kind, Registry(registry.url))(pa.array(bodies, pa.binary())).to_pylist()
    return found


def test_avro_bodies_request_each_schema_once(registry: SchemaRegistry) -> None:
    newer = {**ORDER, "fields": [*ORDER["fields"], {"name": "more", "type": "int"}]}
    registry.put(7, json.dumps(ORDER), "orders-value")
    registry.put(70_000, json.dumps(newer), "orders-value", 2)
    old = framed(7, avro_body())
    new = framed(70_000, avro_body({**AVRO_VALUE, "more": 3}, newer))
    found = written("avro", registry, *[old, new] * 50, None)
    assert json.loads(found[0]["text"]) == AS_JSON
    assert json.loads(found[1]["text"]) == {**AS_JSON, "more": 3}
    assert found[-1] == {"text": None, "error": None}
    assert registry.asked == {"/schemas/ids/7": 1, "/schemas/ids/70000": 1}


AVRO_VALUE = {**AS_JSON, "raw": b"\x00\xff", "at": 1_767_312_000_000, "paid": b"\x04\xe2"}


def test_invalid_body_has_an_error(registry: SchemaRegistry) -> None:
    registry.put(7, json.dumps(ORDER), "orders-value")
    registry.put(8, "syntax = 'proto3';", "other-value", kind="PROTOBUF")
    registry.put(9, '{"type": "recrod"}', "wrong-value")
    whole = avro_body()
    bodies = [whole, b"", framed(7, whole[:-1]), framed(404, whole), framed(404, whole), framed(8, b""), framed(9, b"")]
    found = written("avro", registry, *bodies)
    assert [one["text"] for one in found] == [None] * 7
    no_number = "the body does not begin with 0 and four bytes, so it has no schema id"
    assert [one["error"] for one in found[:2]] == [no_number] * 2
    assert found[2]["error"].startswith("the body is not avro of the registry's schema 7: ")
    assert [one["error"] for one in found[3:5]] == ["the registry has no schema 404"] * 2
    assert found[5]["error"] == "the registry's schema 8 has type PROTOBUF, not AVRO"
    assert found[6]["error"].startswith("the registry's schema 9 cannot be read: ")
    assert registry.asked["/schemas/ids/404"] == 1, "once for the bodies of one array"


def test_referenced_schemas_are_read(registry: SchemaRegistry) -> None:
    money = {"type": "record", "name": "shop.Money", "fields": [{"name": "cents", "type": "long"}]}
    line = {"type": "record", "name": "shop.Line", "fields": [{"name": "price", "type": "shop.Money"}]}
    lines = {"type": "array", "items": "shop.Line"}
    fields = [{"name": "lines", "type": lines}, {"name": "sum", "type": "shop.Money"}]
    order = {"type": "record", "name": "shop.O", "fields": fields}

    def to(name: str, subject: str) -> dict[str, object]:
        return {"name": name, "subject": subject, "version": 1}

    registry.put(1, json.dumps(money), "money / v")
    registry.put(2, json.dumps(line), "line", references=[to("shop.Money", "money / v")])
    registry.put(3, json.dumps(order), "o", references=[to("shop.Line", "line"), to("shop.Money", "money / v")])
    registry.put(4, json.dumps(order), "p", references=[to("shop.Line", "gone")])
    found = written("avro", registry, framed(3, b"\x02\x04\x00\x06"), framed(4, b""))
    assert json.loads(found[0]["text"]) == {"lines": [{"price": {"cents": 2}}], "sum": {"cents": 3}}
    assert found[1]["error"] == "the registry has no version 1 of gone, which a schema references"


def test_protobuf_body_names_its_message_of_the_file(registry: SchemaRegistry) -> None:
    kind = descriptor_pb2.FieldDescriptorProto
    common, order = descriptor_pb2.FileDescriptorSet.FromString(descriptors()).file
    order.dependency.append("google/protobuf/timestamp.proto")
    inner = order.message_type.add(name="Outer").nested_type.add(name="Inner")
    inner.field.add(name="at", number=1, type=kind.TYPE_MESSAGE, type_name=".google.protobuf.Timestamp", label=1)

    def put(number: int, file: Any, subject: str, **more: Any) -> None:
        registry.put(number, base64.b64encode(file.SerializeToString()).decode(), subject, kind="PROTOBUF", **more)

    put(1, common, "common")
    put(2, order, "order", references=[{"name": "common.proto", "subject": "common", "version": 1}])
    registry.put(3, 'syntax = "proto3";', "text", kind="PROTOBUF")
    at = b"\x0a\x02" + timestamp_pb2.Timestamp(seconds=60).SerializeToString()
    bodies = [framed(2, protobuf_body(), b"\x00"), framed(2, protobuf_body(), b"\x02\x00")]
    bodies += [framed(2, at, indexes) for indexes in (b"\x04\x02\x00", b"\x02\x08")]
    bodies += [framed(2, b"", b"\x03"), framed(2, b""), framed(3, b"", b"\x00"), framed(5, b"\x00")]
    found = written("protobuf", registry, *bodies)
    order_text = '{"order_name": "Zürich", "prices": [{"cents": "150"}]}'
    assert [json.loads(one["text"]) for one in found[:2]] == [json.loads(order_text)] * 2
    assert json.loads(found[2]["text"]) == {"at": "1970-01-01T00:01:00Z"}
    assert all(one["error"].startswith("the body is not protobuf of the registry's schema 2: ") for one in found[3:6])
    assert found[6]["error"] == "the registry returns schema 3 only as text: use a schema_file"
    assert found[7]["error"] == "the registry has no schema 5"


@pytest.mark.parametrize("kind", ["avro", "protobuf"])
def test_random_bytes_never_end_the_job(kind: str, registry: SchemaRegistry) -> None:
    common, order = descriptor_pb2.FileDescriptorSet.FromString(descriptors()).file
    reference = {"name": "common.proto", "subject": "common", "version": 1}
    if kind == "avro":
        registry.put(1, json.dumps(ORDER), "order")
    else:
        registry.put(2, base64.b64encode(common.SerializeToString()).decode(), "common", kind="PROTOBUF")
        text = base64.b64encode(order.SerializeToString()).decode()
        registry.put(1, text, "order", kind="PROTOBUF", references=[reference])
    random, whole = Random(5), avro_body() if kind == "avro" else b"\x00" + protobuf_body()
    bodies = [framed(1, random.randbytes(random.randrange(40))) for _ in range(1000)]
    for _ in range(1000):
        changed = bytearray(whole)
        changed[random.randrange(len(changed))] = random.randrange(256)
        bodies.append(framed(1, bytes(changed)))
    assert all((one["text"] is None) != (one["error"] is None) for one in written(kind, registry, *bodies))


def test_registry_is_retried_and_ends_the_query_without_an_answer(
    registry: SchemaRegistry,
) -> None:
    registry.put(7, json.dumps(ORDER), "orders-value")
    registry.failing = [503, 500]
    assert written("avro", registry, framed(7, avro_body()))[0]["error"] is None
    registry.failing = [403]
    with pytest.raises(RuntimeError, match=r"does not return http.*/schemas/ids/7: 403 "):
        written("avro", registry, framed(7, avro_body()))
    registry.failing = [503] * 5
    with pytest.raises(RuntimeError, match="503"):
        written("avro", registry, framed(7, avro_body()))


def test_registry_credentials_are_sent_and_hidden() -> None:
    with SchemaRegistry("me:secret") as registry:
        registry.put(7, json.dumps(ORDER), "orders-value")
        body = pa.array([framed(7, avro_body())])
        found = registry_at(registry.url + "/", None, {"NEVE_REGISTRY_AUTH": "me:secret"})
        assert "secret" not in repr(found)
        assert json_writer("avro", found)(body).to_pylist()[0]["error"] is None
        with pytest.raises(RuntimeError, match="401"):
            json_writer("avro", registry_at(registry.url, "me:other", {"NEVE_REGISTRY_AUTH": "me:secret"}))(body)
    for url in ("registry:8081", "http://", "ftp://h", "http://me:secret@h", "http://h?x=1"):
        with pytest.raises(ValueError, match="registry") as refused:
            registry_at(url, None, {})
        assert "secret" not in str(refused.value)
    with pytest.raises(ValueError, match="user:password"):
        registry_at("http://h", "me", {})


def test_workers_read_without_neve(registry: SchemaRegistry) -> None:
    common = descriptor_pb2.FileDescriptorSet.FromString(descriptors()).file[0]
    registry.put(1, json.dumps(ORDER), "order")
    registry.put(2, base64.b64encode(common.SerializeToString()).decode(), "common", kind="PROTOBUF")
    for kind, body in (("avro", framed(1, avro_body())), ("protobuf", framed(2, b"\x08\x01", b"\x00"))):
        packed = cloudpickle.dumps((json_writer(kind, Registry(registry.url)), body))
        code = (
            "import sys; sys.modules['neve'] = None\n"
            "import pickle, pyarrow as pa\n"
            "run, body = pickle.loads(sys.stdin.buffer.read())\n"
            "print(run(pa.array([body]))[0]['text'].is_valid)"
        )
        done = subprocess.run([sys.executable, "-c", code], input=packed, capture_output=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (0, b"True\n"), done.stderr
