"""A message as one JSON line: what `neve consume -o json` prints, `neve produce --json` reads back, byte for byte.

    {"topic": …, "broker": …, "queue": 0, "offset": 7, "msg_id": …, "tags": "new", "keys": ["42"], "flag": 0,
     "store_timestamp": …, "properties": {…}, "body": "text"}

`body` is there where the body is UTF-8, else `body_base64`; a line that has both is read by `body_base64`. Of a line
with an `offset`, which a broker had stored, the properties of clients' and brokers' own making are left out when it is
read: the next send writes new ones.
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
    """A line that is no message; the text says why."""


class Outgoing(NamedTuple):
    """What of a line is sent."""

    body: bytes
    tags: str | None = None
    keys: tuple[str, ...] = ()
    properties: Mapping[str, str] = {}
    flag: int = 0


def to_line(message: Message, form: str) -> str:
    """The message; `form` is one of BODY_FORMS."""
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
    """
    Raises:
        BadLine: it is no message.
    """
    try:
        row = json.loads(line)
    except ValueError as error:
        raise BadLine(f"no JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadLine("no JSON object")
    if unknown := sorted(row.keys() - _KNOWN):
        raise BadLine(f"nobody knows {', '.join(unknown)}")
    properties = _texts(row)
    found = Outgoing(_bytes(row), _tags(row), _keys(row), _own(row, properties), _flag(row))
    _require_unicode(found)
    return found


def _require_unicode(found: Outgoing) -> None:
    """JSON can say half of a pair of surrogates, which no message can."""
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
    raise BadLine("it has no text `body` and no text `body_base64`")


def _tags(row: Mapping[str, Any]) -> str | None:
    tags = row.get("tags")
    if tags is not None and not isinstance(tags, str):
        raise BadLine("`tags` is a text or null")
    return tags


def _keys(row: Mapping[str, Any]) -> tuple[str, ...]:
    keys = row.get("keys") or []
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise BadLine("`keys` is a list of texts")
    stored = (row.get("properties") or {}).get("KEYS")
    # a client may have written its keys with more than one space between them
    return (stored,) if isinstance(stored, str) and stored.split() == keys else tuple(keys)


def _flag(row: Mapping[str, Any]) -> int:
    flag = row.get("flag", 0)
    if not isinstance(flag, int) or isinstance(flag, bool) or not -(2**31) <= flag < 2**31:
        raise BadLine("`flag` is a whole number of 32 bits")
    return flag


def _texts(row: Mapping[str, Any]) -> dict[str, str]:
    properties = row.get("properties") or {}
    if not isinstance(properties, dict) or not all(isinstance(value, str) for value in properties.values()):
        raise BadLine("`properties` is an object of texts")
    return properties


def _own(row: Mapping[str, Any], properties: dict[str, str]) -> dict[str, str]:
    """The application's properties; in a line that was never stored nothing is left out, and nothing ignored."""
    if "offset" not in row:
        return properties
    from neve.client.validators import RESERVED_PROPERTIES

    return {name: value for name, value in properties.items() if name not in RESERVED_PROPERTIES}
