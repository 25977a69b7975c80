r"""The forms of a printed message: the body, a JSON line, or a format like that of kcat.

%s body       %S its bytes    %k keys       %K their bytes   %h application's properties  %H all of them
%t topic      %q or %p queue  %o offset     %b broker        %g tags                      %i message id
%T stored, ms %D stored, ISO  %B born, ms   %R body's length as four bytes                %% a per cent sign
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from neve.cli.line_parts import unescaped
from neve.cli.message_lines import to_line

if TYPE_CHECKING:
    from neve.client import Message

Form = Callable[["Message"], bytes]


def as_json(body: str) -> Form:
    """Return the form of a JSON line; `body` is one of `message_lines.BODY_FORMS`."""
    return lambda message: to_line(message, body).encode() + b"\n"


def as_body(delimiter: bytes) -> Form:
    """Return the form of a body that is followed by a delimiter."""
    return lambda message: message.body + delimiter


def by_format(text: str) -> Form:
    r"""Return the form that a format describes, with the escapes \n, \t, \0, \xHH.

    Raises:
        click.BadParameter: a letter after a per cent sign is unknown.
    """
    parts: list[Form] = []
    for literal, letter in re.findall(r"([^%]+)|%(.?)", text, re.DOTALL):
        if literal:
            parts.append(_always(unescaped(literal).encode()))
        elif letter == "%":
            parts.append(_always(b"%"))
        elif letter in _FIELDS:
            parts.append(_FIELDS[letter])
        else:
            raise click.BadParameter(f"%{letter} is unknown; known are {' '.join('%' + known for known in _FIELDS)}")
    return lambda message: b"".join([part(message) for part in parts])


def _always(text: bytes) -> Form:
    return lambda _: text


def _pairs(properties: Mapping[str, str]) -> bytes:
    return ",".join(f"{name}={value}" for name, value in properties.items()).encode()


def _own(message: Message) -> bytes:
    from neve.client.validators import RESERVED_PROPERTIES

    return _pairs({name: value for name, value in message.properties.items() if name not in RESERVED_PROPERTIES})


def _queue(message: Message) -> bytes:
    return b"" if message.queue is None else b"%d" % message.queue.queue_id


def _stored_at(message: Message) -> bytes:
    moment = datetime.fromtimestamp(message.store_timestamp / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z").encode()


_FIELDS: Mapping[str, Form] = {
    "s": lambda message: message.body,
    "S": lambda message: b"%d" % len(message.body),
    "k": lambda message: " ".join(message.keys).encode(),
    "K": lambda message: b"%d" % len(" ".join(message.keys).encode()),
    "h": _own,
    "H": lambda message: _pairs(message.properties),
    "t": lambda message: message.topic.encode(),
    "q": _queue,
    "p": _queue,
    "o": lambda message: b"%d" % message.queue_offset,
    "b": lambda message: b"" if message.queue is None else message.queue.broker_name.encode(),
    "g": lambda message: (message.tags or "").encode(),
    "i": lambda message: message.msg_id.encode(),
    "T": lambda message: b"%d" % message.store_timestamp,
    "D": _stored_at,
    "B": lambda message: b"%d" % message.born_timestamp,
    "R": lambda message: len(message.body).to_bytes(4, "big"),
}
