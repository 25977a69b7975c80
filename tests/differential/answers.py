"""A server's answer in comparable form: parts that must differ are replaced by named rules.

rule           what it replaces                                                     by address        the server's own
and its client's addresses, its broker's name       <broker>, <client>, ... time           ms since 1970 within a day of
the run                                <time> id             offsetMsgIds and unique ids that the server made, or a JVM
client's  <id>; ids that the step sent are kept position       physical offset and size of a record in the CommitLog
<position> rate           messages per second                                                  <rate> data version
{"counter","stateVersion","timestamp"}                               <data version> null           a null field
nothing: fastjson leaves it out order          lists of JSON: sets on the Java side                                 the
list, sorted; of texts a set remark         prose
nothing; a word in capitals is kept handle         the recall handle of a timer message
its text, to which the rules apply
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neve.errors import ProtocolError
from neve.record.codec import MalformedRecord, MessageRecord, iter_records
from neve.remoting.body import MessageQueue, lenient_loads
from neve.remoting.command import RemotingCommand

_DAY_MS = 86_400_000
_ID = re.compile(r"(?<![0-9A-F])[0-9A-F]{32}(?![0-9A-F])")
_EPOCH_MS = re.compile(r"\b1[0-9]{12}\b")
_WORD = re.compile(r"[A-Z_]*")
_VERSION_TEXT = re.compile(r'\{"counter":\d+,"stateVersion":\d+,"timestamp":[^}]*\}')
_DATA_VERSION = {"counter", "stateVersion", "timestamp"}
_POSITIONS = ("physical_offset", "size", "prepared_transaction_offset")
_MEASURED = {"physicOffset": "position", "tps": "rate", "consumeTps": "rate", "topicPutTps": "rate"}
_RECORD_MAGICS = (b"\xda\xa3\x20\xa7", b"\xda\xa3\x20\xab")
#: In place of an answer: the server closed the connection, or did not answer in time.
CLOSED, SILENT = -1, -2


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. `body` is parsed if it is JSON or records, otherwise text."""

    code: int
    remark: str | None
    ext: Mapping[str, str]
    body: Any

    def tree(self) -> dict[str, Any]:
        return {"code": self.code, "remark": self.remark, "ext": dict(self.ext), "body": self.body}


def read_answer(command: RemotingCommand) -> Answer:
    return Answer(command.code, command.remark, command.ext, parse_body(bytes(command.body)))


def parse_body(raw: bytes) -> Any:
    """Parse records, JSON, Java properties or text; they are distinguished by their first bytes."""
    if raw[4:8] in _RECORD_MAGICS:
        try:
            return [record_tree(record) for record in iter_records(raw)]
        except MalformedRecord as error:
            return f"malformed records: {error}"
    if raw[:1] in (b"{", b"["):
        try:
            return _named(lenient_loads(raw))
        except ProtocolError:
            pass  # Text that only begins like JSON is compared as text.
    text = raw.decode("utf-8", "replace")
    lines = [line.partition("=") for line in text.splitlines() if line and not line.startswith("#")]
    if lines and all(separator for _, separator, _ in lines):
        return {key: value for key, _, value in lines}
    return text


def record_tree(record: MessageRecord) -> dict[str, Any]:
    """Return a record's fields by name, with its properties as a map."""
    tree = {name: getattr(record, name) for name in MessageRecord.__slots__ if name != "properties_raw"}
    return tree | {"body": record.body.decode("utf-8", "backslashreplace"), "properties": record.properties}


def _named(value: Any) -> Any:
    """Return the same JSON with text keys, as paths need them."""
    if isinstance(value, dict):
        return {_key(key): _named(item) for key, item in value.items()}
    return [_named(item) for item in value] if isinstance(value, list) else value


def _key(key: Any) -> str:
    if isinstance(key, MessageQueue):
        return f"{key.topic}:{key.broker_name}:{key.queue_id}"
    return key if isinstance(key, str) else json.dumps(key)


def at_path(tree: Any, path: str) -> Any:
    """Return the value at a path such as `ext.msgId` or `body.0.properties.UNIQ_KEY`, or None."""
    for step in path.split("."):
        if isinstance(tree, list):
            tree = tree[int(step)] if step.isdigit() and int(step) < len(tree) else None
        elif isinstance(tree, dict):
            tree = tree.get(step)
        else:
            return None
    return tree


def names_of(tree: Any) -> Any:
    """Return the same tree without its values."""
    return {name: names_of(value) for name, value in tree.items()} if isinstance(tree, dict) else "<value>"


@dataclass(frozen=True, slots=True)
class Normaliser:
    """The rules for one server: `names` maps its own addresses and names to placeholders."""

    names: Mapping[str, str]
    now_ms: int
    sent: str

    def apply(self, answer: Answer) -> dict[str, Any]:
        tree = answer.tree()
        if not (answer.remark and _WORD.fullmatch(answer.remark)):
            del tree["remark"]
        if handle := answer.ext.get("recallHandle"):
            tree["ext"]["recallHandle"] = base64.urlsafe_b64decode(handle).decode()
        if "indexLastUpdatePhyoffset" in answer.ext:
            tree["ext"]["indexLastUpdatePhyoffset"] = "<position>"
        return {name: self._value(value) for name, value in tree.items() if value is not None}

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return self._object(value)
        if isinstance(value, list):
            items = [self._value(item) for item in value]
            if items and all(isinstance(item, str) for item in items):
                return dict.fromkeys(items, "there")
            is_records = bool(value) and isinstance(value[0], dict) and "physical_offset" in value[0]
            return items if is_records else sorted(items, key=lambda item: json.dumps(item, sort_keys=True))
        if type(value) is int and abs(value - self.now_ms) < _DAY_MS:
            return "<time>"
        return value

    def _object(self, value: dict[str, Any]) -> Any:
        measured = {name: f"<{_MEASURED[name]}>" for name in _MEASURED.keys() & value.keys()}
        value = value | measured
        if value.keys() == _DATA_VERSION:
            return "<data version>"
        if "physical_offset" in value:
            value = value | dict.fromkeys(_POSITIONS, "<position>")
        return {self._text(key): self._value(item) for key, item in value.items() if item is not None}

    def _text(self, text: str) -> str:
        for own, name in self.names.items():
            text = text.replace(own, name)
        text = _ID.sub(lambda match: match.group() if match.group() in self.sent else "<id>", text)
        text = _EPOCH_MS.sub(self._time, text)
        return _VERSION_TEXT.sub("<data version>", text)

    def _time(self, match: re.Match[str]) -> str:
        return "<time>" if abs(int(match.group()) - self.now_ms) < _DAY_MS else match.group()


@dataclass(frozen=True, slots=True)
class Difference:
    """A field of an answer that differs."""

    answer: str
    field: str
    apache: Any
    neve: Any


_ABSENT = "(absent)"


def differences(name: str, apache: Mapping[str, Any], neve: Mapping[str, Any]) -> list[Difference]:
    """Compare field by field; a field in only one answer is a difference. If the codes differ, stop there."""
    if apache["code"] != neve["code"]:
        return [Difference(name, "code", apache["code"], neve["code"])]
    return [Difference(name, *found) for found in _walk("", apache, neve)]


def _walk(path: str, left: Any, right: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        keys = [*left, *(key for key in right if key not in left)]
        pairs = [(f"{path}.{key}", left.get(key, _ABSENT), right.get(key, _ABSENT)) for key in keys]
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = [(f"{path}.{i}", a, b) for i, (a, b) in enumerate(zip(left, right, strict=True))]
    else:
        return [] if left == right else [(path.removeprefix("."), left, right)]
    return [found for pair in pairs for found in _walk(*pair)]
