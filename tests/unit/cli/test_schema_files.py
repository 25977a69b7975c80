"""Tests of the conversion of Avro and Protobuf bodies to JSON by a schema file, as in Spark workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2
from pyspark import cloudpickle

from neve.spark.schema_files import json_writer
from tests.kit.wire.schema_bodies import AS_JSON, ORDER, VALUE, avro_body, descriptors, protobuf_body


@pytest.fixture
def avsc(tmp_path: Path) -> Path:
    path = tmp_path / "order.avsc"
    path.write_text(json.dumps(ORDER))
    return path


@pytest.fixture
def desc(tmp_path: Path) -> Path:
    path = tmp_path / "order.desc"
    path.write_bytes(descriptors())
    return path


def test_avro_bodies_become_json_and_invalid_ones_an_error(avsc: Path) -> None:
    write = json_writer("avro", avsc, None)
    whole = avro_body()
    found = write(pa.array([whole, None, b"", whole[:-1], whole + b"x"])).to_pylist()
    assert json.loads(found[0]["text"]) == AS_JSON
    assert found[1] == {"text": None, "error": None}
    assert [one["text"] for one in found[2:]] == [None] * 3
    assert all(one["error"].startswith("the body is not avro of the schema: ") for one in found[2:])
    assert found[4]["error"].endswith(f"the value ends at byte {len(whole)} of {len(whole) + 1}")


def test_avro_numbers_unknown_to_json_become_text(avsc: Path) -> None:
    value = {**VALUE, "prices": [float("nan"), float("inf"), float("-inf"), 1.5]}
    (found,) = json_writer("avro", avsc, None)(pa.array([avro_body(value)])).to_pylist()
    assert found["error"] is None
    assert json.loads(found["text"]) == {**AS_JSON, "prices": ["NaN", "Infinity", "-Infinity", 1.5]}


def test_avro_body_nested_too_deep_for_json_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "node.avsc"
    file.write_text('{"type": "record", "name": "N", "fields": [{"name": "next", "type": ["null", "N"]}]}', "utf-8")
    write = json_writer("avro", file, None)
    found = write(pa.array([b"\x02" * 3000 + b"\x00", b"\x00"])).to_pylist()
    assert "RecursionError" in found[0]["error"] and found[0]["text"] is None
    assert found[1] == {"text": '{"next": null}', "error": None}


def test_avro_body_of_100000_levels_does_not_crash_the_process(tmp_path: Path) -> None:
    """Run in a subprocess, because a regression would crash the process."""
    file = tmp_path / "node.avsc"
    file.write_text('{"type": "record", "name": "N", "fields": [{"name": "next", "type": ["null", "N"]}]}', "utf-8")
    code = (
        "import sys, pyarrow as pa\n"
        "from neve.spark.schema_files import json_writer\n"
        "found = json_writer('avro', sys.argv[1], None)(pa.array([b'\\2' * 100_000 + b'\\0', b'\\2\\2\\0']))\n"
        "print(found.to_pylist())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert b"RecursionError" in done.stdout
    assert b'{"next": {"next": {"next": null}}}' in done.stdout


def test_recursive_avro_types_of_any_length_are_read(tmp_path: Path) -> None:
    """A tree of lists and maps, larger than the limit for the compiled reader."""
    tree = {
        "type": "record", "name": "Tree", "namespace": "t", "fields": [
            {"name": "kids", "type": {"type": "array", "items": "Tree"}},
            {"name": "named", "type": {"type": "map", "values": ["null", "t.Tree"]}},
            {"name": "text", "type": "string"},
        ],
    }  # fmt: skip
    file = tmp_path / "tree.avsc"
    file.write_text(json.dumps(tree), "utf-8")
    leaf = {"kids": [], "named": {}, "text": "x" * 500}
    value = {"kids": [leaf] * 4, "named": {"a": leaf, "b": None}, "text": ""}
    body = avro_body(value, tree)
    assert len(body) > 2000
    found = json_writer("avro", file, None)(pa.array([body, avro_body(leaf, tree)])).to_pylist()
    assert [json.loads(one["text"]) for one in found] == [value, leaf]


def test_protobuf_bodies_become_json_and_invalid_ones_an_error(desc: Path) -> None:
    write = json_writer("protobuf", desc, "shop.Order")
    found = write(pa.array([protobuf_body(), b"", None, b"\xff\xff"])).to_pylist()
    assert json.loads(found[0]["text"]) == {"order_name": "Zürich", "prices": [{"cents": "150"}]}
    assert found[1] == {"text": "{}", "error": None}, "in Protobuf nothing is a message of defaults"
    assert found[2] == {"text": None, "error": None}
    assert found[3]["error"].startswith("the body is not protobuf of the schema: DecodeError")


@pytest.mark.parametrize("kind", ["avro", "protobuf"])
def test_random_bytes_never_end_the_job(kind: str, avsc: Path, desc: Path) -> None:
    write = json_writer(kind, avsc if kind == "avro" else desc, "shop.Order")
    random, whole = Random(5), avro_body() if kind == "avro" else protobuf_body()
    bodies = [random.randbytes(random.randrange(40)) for _ in range(2000)]
    for _ in range(2000):
        changed = bytearray(whole)
        changed[random.randrange(len(changed))] = random.randrange(256)
        bodies.append(bytes(changed))
    found = write(pa.array(bodies)).to_pylist()
    assert all((one["text"] is None) != (one["error"] is None) for one in found)


def test_workers_write_without_neve(avsc: Path, desc: Path) -> None:
    for kind, file, body in (("avro", avsc, avro_body()), ("protobuf", desc, protobuf_body())):
        packed = cloudpickle.dumps((json_writer(kind, file, "shop.Order"), body))
        code = (
            "import sys; sys.modules['neve'] = None\n"
            "import pickle, pyarrow as pa\n"
            "run, body = pickle.loads(sys.stdin.buffer.read())\n"
            "print(run(pa.array([body]))[0]['text'].is_valid)"
        )
        done = subprocess.run([sys.executable, "-c", code], input=packed, capture_output=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (0, b"True\n"), done.stderr


def test_invalid_schema_file_is_refused(avsc: Path, desc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, file, message, text in (
        ("avro", desc, None, "not an Avro schema"),
        ("protobuf", avsc, "shop.Order", "not a descriptor set"),
        ("protobuf", desc, None, "full name of the message"),
        ("protobuf", desc, "shop.Nope", "no message shop.Nope"),
    ):
        with pytest.raises(ValueError, match=text):
            json_writer(kind, file, message)
    avsc.write_text('{"type": "record", "name": "N", "fields": [{"name": "next", "type": "N"}]}')
    with pytest.raises(ValueError, match="not an Avro schema: a record contains itself"):
        json_writer("avro", avsc, None)
    avsc.write_text('{"type": "recrod"}')
    with pytest.raises(ValueError, match="not an Avro schema"):
        json_writer("avro", avsc, None)
    desc.write_bytes(descriptor_pb2.FileDescriptorSet(
        file=descriptor_pb2.FileDescriptorSet.FromString(descriptors()).file[1:]).SerializeToString())  # fmt: skip
    with pytest.raises(ValueError, match="with all imports"):
        json_writer("protobuf", desc, "shop.Order")
    monkeypatch.setitem(sys.modules, "fastavro", None)
    with pytest.raises(ImportError, match="pip install fastavro"):
        json_writer("avro", avsc, None)
