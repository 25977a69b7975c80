"""A message as one JSON line: what `neve consume -o json` prints, `neve produce --json` reads back, byte for byte.

    {"topic": …, "broker": …, "queue": 0, "offset": 7, "msg_id": …, "tags": "new", "keys": ["42"], "flag": 0,
     "store_timestamp": …, "properties": {…}, "body": "text"}

A line has `body` if the body is UTF-8, and otherwise `body_base64`, which wins if a line has both. In a line with
an `offset`, which a broker has stored, properties of clients and brokers are ignored: the next send adds new ones.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from neve.client import Message

BODY_FORMS = ("auto", "base64", "both")
_STORED = ("topic", "broker", "queue", "offset", "msg_id", "store_timestamp")
_KNOWN = frozenset({*_STORED, "tags", "keys", "flag", "properties", "body", "body_base64"})


class BadLine(ValueError):
    """A line is not a message; the text names the cause."""


class Outgoing(NamedTuple):
    """The parts of a line that are sent."""

    body: bytes
    tags: str | None = None
    keys: tuple[str, ...] = ()
    properties: Mapping[str, str] = {}
    flag: int = 0


def to_line(message: Message, form: str) -> str:
    """Return the line of a message; `form` is one of BODY_FORMS."""
    queue = message.queue
    row = {
        "topic": message.topic,
        "broker": queue.broker_name if queue else None,
        "queue": queue.queue_id if queue else None,
        "offset": message.queue_offset,
        "msg_id": message.msg_id,
        "tags": message.tags,
        "keys": list(message.keys),
        "flag": message.flag,
        "store_timestamp": message.store_timestamp,
        "properties": dict(message.properties),
        **_body(message.body, form),
    }
    return json.dumps(row, ensure_ascii=False)


def _body(body: bytes, form: str) -> dict[str, str]:
    encoded = {"body_base64": base64.b64encode(body).decode()}
    if form == "base64":
        return encoded
    try:
        text = {"body": body.decode()}
    except UnicodeDecodeError:
        return encoded if form == "auto" else {"body": body.decode("utf-8", "replace"), **encoded}
    return text if form == "auto" else {**text, **encoded}


def from_line(line: bytes) -> Outgoing:
    """Return the message that a line describes.

    Raises:
        BadLine: the line is not a message.
    """
    try:
        row = json.loads(line)
    except ValueError as error:
        raise BadLine(f"it is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadLine("it is not a JSON object")
    if unknown := sorted(row.keys() - _KNOWN):
        raise BadLine(f"unknown fields: {', '.join(unknown)}")
    properties = _texts(row)
    found = Outgoing(_bytes(row), _tags(row), _keys(row), _own(row, properties), _flag(row))
    _require_unicode(found)
    return found


def _require_unicode(found: Outgoing) -> None:
    """Refuse half of a surrogate pair, which JSON can express and a message cannot."""
    try:
        " ".join([found.tags or "", *found.keys, *found.properties, *found.properties.values()]).encode()
    except UnicodeEncodeError as error:
        raise BadLine(f"tags, keys or properties: {error.reason}") from error


def _bytes(row: Mapping[str, Any]) -> bytes:
    encoded, text = row.get("body_base64"), row.get("body")
    if isinstance(encoded, str):
        try:
            return base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise BadLine(f"body_base64: {error}") from error
    if encoded is None and isinstance(text, str):
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            raise BadLine(f"body: {error.reason}") from error
    raise BadLine("it has neither a text `body` nor a text `body_base64`")


def _tags(row: Mapping[str, Any]) -> str | None:
    tags = row.get("tags")
    if tags is not None and not isinstance(tags, str):
        raise BadLine("`tags` must be a text or null")
    return tags


def _keys(row: Mapping[str, Any]) -> tuple[str, ...]:
    keys = row.get("keys") or []
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise BadLine("`keys` must be a list of texts")
    stored = (row.get("properties") or {}).get("KEYS")
    # a client may have written its keys with more than one space between them
    return (stored,) if isinstance(stored, str) and stored.split() == keys else tuple(keys)


def _flag(row: Mapping[str, Any]) -> int:
    flag = row.get("flag", 0)
    if not isinstance(flag, int) or isinstance(flag, bool) or not -(2**31) <= flag < 2**31:
        raise BadLine("`flag` must be an integer of 32 bits")
    return flag


def _texts(row: Mapping[str, Any]) -> dict[str, str]:
    properties = row.get("properties") or {}
    if not isinstance(properties, dict) or not all(isinstance(value, str) for value in properties.values()):
        raise BadLine("`properties` must be an object of texts")
    return properties


def _own(row: Mapping[str, Any], properties: dict[str, str]) -> dict[str, str]:
    """Return the application's properties; all properties, if the message was never stored."""
    if "offset" not in row:
        return properties
    from neve.client.validators import RESERVED_PROPERTIES

    return {name: value for name, value in properties.items() if name not in RESERVED_PROPERTIES}
