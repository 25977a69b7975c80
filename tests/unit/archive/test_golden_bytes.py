"""The golden bytes of `docs/archive-format.md`: today's code reads them, writes them, and the page names each field."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from pathlib import Path
from typing import Any, get_args

import msgpack
import msgspec
import pyarrow.parquet as pq
import pytest

from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.name_blocks import StoredBlock
from neve.archive.catalog.topic_parts import Part, decode_part, topics_in
from neve.archive.catalog.topic_parts import pack as pack_topics
from neve.archive.format import journal
from neve.archive.format.broker_state import KIND as STATE
from neve.archive.format.broker_state import BrokerState, decode_state, encode_state
from neve.archive.format.checkpoint import KIND as CATALOG
from neve.archive.format.checkpoint import CatalogState, CheckpointHead, PackedState, PackName, decode_checkpoint
from neve.archive.format.envelope import unseal
from neve.archive.format.journal import (
    AnyEntry,
    CommittedObject,
    Entry,
    FellBehind,
    NewerFormat,
    PlannedObject,
    RowGroup,
    Shortened,
    anchor,
    decode_entry,
    encode_entry,
)
from neve.archive.rows.row_groups import decode_group
from neve.archive.rows.schema import describe, parse_footer
from neve.record.codec import iter_records
from tests.unit.archive.test_format_page import PAGE, names, table
from tiered.journal.store_format import StoreFormat

ENTRIES = {kind.__struct_config__.tag: kind for kind in get_args(AnyEntry)}
GOLDEN: dict[str, tuple[Any, bytes]] = {
    name: (json.loads(said), bytes.fromhex(digits.replace("\n", "")))
    for name, said, digits in re.findall(r"```golden (\S+)\n(\{.*?\})\n([0-9a-f\n]+)```", PAGE, re.DOTALL)
}
#: Entries as some of their fields make them.
VARIANTS = {"EPOCH-of-a-set", "INTENT-to-compact", "ABORT-to-compact", "INTENT-to-erase"}
OBJECTS = [Path(__file__).with_name(name) for name in ("golden.parquet", "golden-with-ids.parquet")]
LIMIT = 1 << 20


def as_json(value: object) -> Any:
    """Bytes as hexadecimal digits."""
    return json.loads(json.dumps(value, default=bytes.hex))


def test_there_is_one_of_each() -> None:
    assert set(GOLDEN) == {*ENTRIES, *VARIANTS, "SHORTENED", CATALOG, "CATALOG-2", "CATALOG-3", "part", STATE, "format"}


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_msgpack_reads_what_the_page_says(name: str) -> None:
    said, data = GOLDEN[name]
    found = msgpack.unpackb(data, strict_map_key=False)
    if "body" in found:
        found = msgpack.unpackb(zlib.decompress(found["body"]), strict_map_key=False)
    assert as_json(found) == said


@pytest.mark.parametrize("name", sorted({*ENTRIES, *VARIANTS}))
def test_an_entry_is_read_and_written(name: str) -> None:
    said, data = GOLDEN[name]
    entry = decode_entry(data)
    assert type(entry) is ENTRIES[name.partition("-")[0]]
    assert json.loads(msgspec.json.encode(entry)) == said
    assert encode_entry(entry) == data


def test_a_checkpoint_of_version_1_is_read() -> None:
    said, data = GOLDEN[CATALOG]
    state = decode_checkpoint(data, "b", 255)
    assert isinstance(state, PackedState)
    whole = msgspec.msgpack.decode(unseal(CATALOG, 1, data, LIMIT), type=CatalogState)
    assert json.loads(msgspec.json.encode(whole)) == said
    catalog = Catalog()
    catalog.restore(state)
    assert catalog.state("b") == msgspec.structs.replace(whole, queues=[*whole.queues, ("orders", 1, 0)])


def unpacked_part(data: bytes) -> Part:
    """Another zlib may compress its blocks to other bytes."""
    part = decode_part("orders", data)
    inside = [msgspec.structs.replace(block, packed=zlib.decompress(block.packed)) for block in part.blocks]
    outside = [
        (after, msgspec.structs.replace(block, packed=zlib.decompress(block.packed))) for after, block in part.expiring
    ]
    return msgspec.structs.replace(part, blocks=inside, expiring=outside)


def test_what_stands_in_the_place_of_entry_0_is_told_and_written() -> None:
    said, data = GOLDEN["SHORTENED"]
    assert json.loads(msgspec.json.encode(msgspec.msgpack.decode(data, type=Shortened))) == said
    assert encode_entry(msgspec.msgpack.decode(data, type=Shortened)) == data
    with pytest.raises(FellBehind):
        decode_entry(data)


@pytest.mark.parametrize("name", ["SHORTENED", "FORGET"])
def test_a_program_that_does_not_know_it_refuses_the_journal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(journal._NEWEST, name)
    with pytest.raises(NewerFormat, match=f"the journal's {name} is of format 2, this program knows up to 1"):
        decode_entry(GOLDEN[name][1])


@pytest.mark.parametrize("name", ["CATALOG-2", "CATALOG-3"])
def test_a_checkpoint_and_its_pack_are_read_and_written(name: str) -> None:
    _, data = GOLDEN[name]
    _, pack = GOLDEN["part"]
    head = decode_checkpoint(data, "b", 255)
    assert isinstance(head, CheckpointHead)
    catalog = Catalog()
    catalog.restore(head, topics_in(head, {PackName(255, 0): pack}.__getitem__))
    (live,), (out,) = catalog.objects(), [name for _, name in catalog.expiring_of("orders")]
    committed = json.loads(msgspec.json.encode(GOLDEN["COMMIT"][0]["names"][0]))
    assert as_json(msgspec.to_builtins(live, str_keys=True)) == committed
    assert as_json(msgspec.to_builtins(out, str_keys=True)) == committed | {"key": "k"}
    packs: dict[int, bytes] = {}
    pack_topics(topics_in(head, {PackName(255, 0): pack}.__getitem__), {}, 255, packs.__setitem__)
    assert unpacked_part(packs.pop(0)) == unpacked_part(pack)
    written = catalog.packed("b", packs.__setitem__)
    assert not packs
    again = msgpack.unpackb(unseal(CATALOG, 3, written.content, LIMIT), strict_map_key=False)
    assert again == msgpack.unpackb(unseal(CATALOG, 3, data, LIMIT), strict_map_key=False)
    assert msgpack.unpackb(written.content)["version"] == 3
    assert again.get("entry", b"") == (anchor(GOLDEN["COMMIT"][1]) if name == "CATALOG-3" else b"")


def test_a_state_is_read_and_written() -> None:
    said, data = GOLDEN[STATE]
    state = decode_state(data, "b")
    assert json.loads(msgspec.json.encode(state)) == said
    assert unseal(STATE, 1, encode_state(state), LIMIT) == unseal(STATE, 1, data, LIMIT)


def test_the_stores_format_is_read_and_written() -> None:
    said, data = GOLDEN["format"]
    found = msgspec.msgpack.decode(data, type=StoreFormat)
    assert msgspec.to_builtins(found) == said
    assert msgspec.msgpack.encode(found) == data


@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: path.stem)
def test_a_data_object_rebuilds_to_the_records_that_were_sealed(path: Path) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[-8:-4], "little") + 8
    metadata = parse_footer(data[-length:])
    name = describe(metadata, key="k", size=len(data), footer=length, etag="", checksum=("", ""))
    wire = b""
    for index, group in enumerate(name.row_groups):
        part = data[group.offset : group.offset + group.length]
        wire += decode_group(
            metadata, index, group.offset, part, size=len(data), topic=name.topic, wire_bytes=group.wire_bytes
        ).wire
    assert hashlib.sha256(wire).hexdigest() == name.sha256
    assert pq.read_table(path).column("wire").null_count == 4, "one whose columns don't rebuild it"
    bodies = [bytes(record.body) for record in iter_records(wire)]
    assert bodies == [b"", b"plain", bytes(range(256)), zlib.compress(b"packed " * 50), b"odd property"]


def test_every_field_is_on_the_page() -> None:
    carried = set(Entry.__struct_fields__)
    own = {tag: set(kind.__struct_fields__) - carried for tag, kind in ENTRIES.items()}
    own["INTENT"] |= set(PlannedObject.__struct_fields__)
    assert {
        row[0].strip("`"): {name for name in names(row[1]) if name.islower()} for row in table("type of entry")
    } == own
    committed = {name for row in table("field") for name in names(row[0])}
    assert committed == set(CommittedObject.__struct_fields__)
    (groups,) = (row[1] for row in table("field") if row[0] == "`row_groups`")
    assert set(names(groups)) == set(RowGroup.__struct_fields__)
    for kind, head in (
        (CatalogState, "field of a checkpoint"),
        (CheckpointHead, "field of a head"),
        (Part, "field of a part"),
        (BrokerState, "field of a state"),
    ):
        assert {name for row in table(head) for name in names(row[0])} == set(kind.__struct_fields__)
    in_order = [name for row in table("place in a block") for name in names(row[0])]
    assert in_order == list(StoredBlock.__struct_fields__)
