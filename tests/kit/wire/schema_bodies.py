"""Message bodies in Avro, Protobuf and JSON."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import fastavro
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

ORDER = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string"]},
        {"name": "prices", "type": {"type": "array", "items": "double"}},
        {"name": "raw", "type": "bytes"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "paid", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
    ],
}
VALUE = {
    "id": 1 << 40, "name": "Zürich", "prices": [1.5, 2.0], "raw": b"\x00\xff", "at": datetime(2026, 1, 2, tzinfo=UTC),
    "paid": Decimal("12.50"),
}  # fmt: skip
AS_JSON = {**VALUE, "raw": "AP8=", "at": "2026-01-02T00:00:00+00:00", "paid": "12.50"}


def avro_body(value: Any = None, schema: Any = None) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema or ORDER), value or VALUE)
    return out.getvalue()


def descriptors() -> bytes:
    """Return descriptors of two files, one of which imports the other."""
    kind = descriptor_pb2.FieldDescriptorProto
    common = descriptor_pb2.FileDescriptorProto(name="common.proto", package="shop", syntax="proto3")
    common.message_type.add(name="Price").field.add(name="cents", number=1, type=kind.TYPE_INT64, label=1)
    order = descriptor_pb2.FileDescriptorProto(
        name="order.proto", package="shop", syntax="proto3", dependency=["common.proto"]
    )
    message = order.message_type.add(name="Order")
    message.field.add(name="order_name", number=1, type=kind.TYPE_STRING, label=1)
    message.field.add(name="prices", number=2, type=kind.TYPE_MESSAGE, type_name=".shop.Price", label=3)
    return bytes(descriptor_pb2.FileDescriptorSet(file=[common, order]).SerializeToString())


def protobuf_body() -> bytes:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors()).file:
        pool.Add(file)
    order = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))
    return bytes(order(order_name="Zürich", prices=[{"cents": 150}]).SerializeToString())
