"""A line that has more than a body: KEY, its delimiter, NAME=VALUE,NAME=VALUE, its delimiter, body.

42:colour=red,size=5|the body        --key-delimiter : --property-delimiter '|'
"""

from __future__ import annotations

import re
from typing import NamedTuple

import click

from neve.cli.message_lines import BadLine, Outgoing

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "\\": "\\"}


def unescaped(text: str) -> str:
    r"""The text with its \n, \r, \t, \0, \\ and \xHH meant."""

    def meant(found: re.Match[str]) -> str:
        if found[1]:
            return chr(int(found[1], 16))
        try:
            return _ESCAPES[found[2]]
        except KeyError:
            raise click.BadParameter(rf"{found[0]} is none of \n \r \t \0 \\ \xHH") from None

    return re.sub(r"\\(?:x([0-9a-fA-F]{2})|(.?))", meant, text)


def delimiter_bytes(text: str) -> bytes:
    r"""What separates, given as text with escapes: up to \x7f a byte each, above it the character's UTF-8.

    Raises:
        click.BadParameter: there is none.
    """
    found = unescaped(text).encode()
    if not found:
        raise click.BadParameter("a delimiter has a character at least")
    return found


class LineParts(NamedTuple):
    """How a line is taken apart; None: it has no such part."""

    key: bytes | None = None
    properties: bytes | None = None

    def message(self, line: bytes, common: Outgoing) -> Outgoing:
        """The line's message; its key and properties come beside those that all have.

        Raises:
            BadLine: a part is missing, or is no text.
        """
        if self.key is not None:
            text, line = _cut(line, self.key, "key")
            common = common._replace(keys=(*common.keys, *text.split()))
        if self.properties is not None:
            text, line = _cut(line, self.properties, "properties")
            common = common._replace(properties={**common.properties, **_pairs(text)})
        return common._replace(body=line)


def _cut(line: bytes, delimiter: bytes, what: str) -> tuple[str, bytes]:
    part, found, rest = line.partition(delimiter)
    if not found:
        raise BadLine(f"no {delimiter.decode()!r} ends its {what}")
    try:
        return part.decode(), rest
    except UnicodeDecodeError as error:
        raise BadLine(f"its {what} are no UTF-8: {error.reason}") from error


def _pairs(text: str) -> dict[str, str]:
    pairs = {}
    for pair in filter(None, text.split(",")):
        name, separator, value = pair.partition("=")
        if not separator:
            raise BadLine(f"{pair!r} of its properties is not NAME=VALUE")
        pairs[name] = value
    return pairs
