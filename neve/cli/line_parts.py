"""Lines with keys and properties before the body: KEY, delimiter, NAME=VALUE,NAME=VALUE, delimiter, body.

42:colour=red,size=5|the body        --key-delimiter : --property-delimiter '|'
"""

from __future__ import annotations

import re
from typing import NamedTuple

import click

from neve.cli.message_lines import BadLine, Outgoing

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "\\": "\\"}


def unescaped(text: str) -> str:
    r"""Return the text with the escapes \n, \r, \t, \0, \\ and \xHH replaced."""

    def meant(found: re.Match[str]) -> str:
        if found[1]:
            return chr(int(found[1], 16))
        try:
            return _ESCAPES[found[2]]
        except KeyError:
            raise click.BadParameter(rf"{found[0]} is not an escape; escapes are \n \r \t \0 \\ \xHH") from None

    return re.sub(r"\\(?:x([0-9a-fA-F]{2})|(.?))", meant, text)


def delimiter_bytes(text: str) -> bytes:
    r"""Return the delimiter that a text with escapes describes, in UTF-8.

    Raises:
        click.BadParameter: the text is empty, or has an unknown escape.
    """
    found = unescaped(text).encode()
    if not found:
        raise click.BadParameter("the delimiter is empty")
    return found


class LineParts(NamedTuple):
    """The delimiters of a line; None if it has no such part."""

    key: bytes | None = None
    properties: bytes | None = None

    def message(self, line: bytes, common: Outgoing) -> Outgoing:
        """Return the message of a line, with its key and properties added to the common ones.

        Raises:
            BadLine: a part is missing, or is not UTF-8.
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
        raise BadLine(f"its {what} must end with {delimiter.decode()!r}")
    try:
        return part.decode(), rest
    except UnicodeDecodeError as error:
        raise BadLine(f"its {what} is not UTF-8: {error.reason}") from error


def _pairs(text: str) -> dict[str, str]:
    pairs = {}
    for pair in filter(None, text.split(",")):
        name, separator, value = pair.partition("=")
        if not separator:
            raise BadLine(f"{pair!r} of its properties is not NAME=VALUE")
        pairs[name] = value
    return pairs
