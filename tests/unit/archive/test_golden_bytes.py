"""Tests of the golden bytes of `docs/reference/archive-golden-bytes.md`: the code reads and writes them."""

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
from neve.archive.format.broker_state import KIND as STATE
from neve.archive.format.broker_state import BrokerState, decode_state, encode_state
from neve.archive.format.checkpoint import KIND as CATALOG
from neve.archive.format.checkpoint import CheckpointHead, PackName, decode_checkpoint
from neve.archive.format.envelope import unseal
from neve.archive.format.journal import (
    AnyEntry,
    CommittedObject,
    EntriesDeleted,
    Entry,
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
from tests.unit.archive.format_page import GOLDEN_PAGE, names, table
from tiered.journal.store_format import StoreFormat

ENTRIES = {kind.__struct_config__.tag: kind for kind in get_args(AnyEntry)}
GOLDEN: dict[str, tuple[Any, bytes]] = {
    name: (json.loads(said), bytes.fromhex(digits.replace("\n", "")))
    for name, said, digits in re.findall(r"```golden (\S+)\n(\{.*?\})\n([0-9a-f\n]+)```", GOLDEN_PAGE, re.DOTALL)
}
#: Entries built from some of their fields.
VARIANTS = {"EPOCH-of-a-set", "INTENT-to-compact", "ABORT-to-compact", "INTENT-to-erase"}
OBJECT = Path(__file__).with_name("golden.parquet")
LIMIT = 1 << 20


def as_json(value: object) -> Any:
    """Return a value with bytes as hexadecimal digits."""
    return json.loads(json.dumps(value, default=bytes.hex))


def test_page_has_golden_bytes_of_each_format() -> None:
    assert set(GOLDEN) == {*ENTRIES, *VARIANTS, "SHORTENED", CATALOG, "part", STATE, "format"}


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_golden_bytes_decode_to_the_values_on_the_page(name: str) -> None:
    said, data = GOLDEN[name]
    found = msgpack.unpackb(data, strict_map_key=False)
    if "body" in found:
        found = msgpack.unpackb(zlib.decompress(found["body"]), strict_map_key=False)
    assert as_json(found) == said


@pytest.mark.parametrize("name", sorted({*ENTRIES, *VARIANTS}))
def test_golden_entry_round_trips(name: str) -> None:
    said, data = GOLDEN[name]
    entry = decode_entry(data)
    assert type(entry) is ENTRIES[name.partition("-")[0]]
    assert json.loads(msgspec.json.encode(entry)) == said
    assert encode_entry(entry) == data


def unpacked_part(data: bytes) -> Part:
    """Return a part with uncompressed blocks, because zlib versions compress to different bytes."""
    part = decode_part("orders", data)
    inside = [msgspec.structs.replace(block, packed=zlib.decompress(block.packed)) for block in part.blocks]
    outside = [
        (after, msgspec.structs.replace(block, packed=zlib.decompress(block.packed))) for after, block in part.expiring
    ]
    return msgspec.structs.replace(part, blocks=inside, expiring=outside)


def test_shortened_entry_0_raises_entries_deleted() -> None:
    said, data = GOLDEN["SHORTENED"]
    assert json.loads(msgspec.json.encode(msgspec.msgpack.decode(data, type=Shortened))) == said
    assert encode_entry(msgspec.msgpack.decode(data, type=Shortened)) == data
    with pytest.raises(EntriesDeleted):
        decode_entry(data)


def test_golden_checkpoint_and_pack_round_trip() -> None:
    _, data = GOLDEN[CATALOG]
    _, pack = GOLDEN["part"]
    head = decode_checkpoint(data, "b", 255)
    catalog = Catalog()
    catalog.restore(head, topics_in(head, {PackName(255, 0): pack}.__getitem__))
    (live,), (out,) = catalog.objects(), [name for _, name in catalog.topic("orders").expiring_names()]
    committed = json.loads(msgspec.json.encode(GOLDEN["COMMIT"][0]["names"][0]))
    assert as_json(msgspec.to_builtins(live, str_keys=True)) == committed
    assert as_json(msgspec.to_builtins(out, str_keys=True)) == committed | {"key": "k"}
    packs: dict[int, bytes] = {}
    pack_topics(topics_in(head, {PackName(255, 0): pack}.__getitem__), {}, 255, packs.__setitem__)
    assert unpacked_part(packs.pop(0)) == unpacked_part(pack)
    written = catalog.write_checkpoint("b", packs.__setitem__)
    assert not packs
    assert unseal(CATALOG, 1, written.content, LIMIT) == unseal(CATALOG, 1, data, LIMIT)
    assert head.entry == anchor(GOLDEN["COMMIT"][1])


def test_golden_state_round_trips() -> None:
    said, data = GOLDEN[STATE]
    state = decode_state(data, "b")
    assert json.loads(msgspec.json.encode(state)) == said
    assert unseal(STATE, 1, encode_state(state), LIMIT) == unseal(STATE, 1, data, LIMIT)


def test_golden_store_format_round_trips() -> None:
    said, data = GOLDEN["format"]
    found = msgspec.msgpack.decode(data, type=StoreFormat)
    assert msgspec.to_builtins(found) == said
    assert msgspec.msgpack.encode(found) == data


def test_data_object_rebuilds_to_the_sealed_records() -> None:
    data = OBJECT.read_bytes()
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
    assert pq.read_table(OBJECT).column("wire").null_count == 4, "one whose columns don't rebuild it"
    bodies = [bytes(record.body) for record in iter_records(wire)]
    assert bodies == [b"", b"plain", bytes(range(256)), zlib.compress(b"packed " * 50), b"odd property"]


def test_page_names_every_field() -> None:
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
        (CheckpointHead, "field of a head"),
        (Part, "field of a part"),
        (BrokerState, "field of a state"),
    ):
        assert {name for row in table(head) for name in names(row[0])} == set(kind.__struct_fields__)
    in_order = [name for row in table("place in a block") for name in names(row[0])]
    assert in_order == list(StoredBlock.__struct_fields__)
