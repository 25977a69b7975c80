"""A user's password: typed, or read from a file or stdin; an argument is seen by everybody on the machine."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from neve.cli.failures import FAILED, USAGE, Failure


def password_from(source: Path | None, name: str) -> str:
    """`source`: a file, `-` for stdin, or None to ask on the terminal, twice.

    Raises:
        Failure: there is nobody to ask, or nothing in it.
    """
    if source is None:
        if not sys.stdin.isatty():
            raise Failure(USAGE, "no terminal to type the password at: --password-file FILE, or - for stdin")
        return str(click.prompt(f"password of {name}", hide_input=True, confirmation_prompt=True, err=True))
    try:
        text = sys.stdin.read() if str(source) == "-" else source.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise Failure(FAILED, f"{source}: not UTF-8") from error
    password = text.removesuffix("\n").removesuffix("\r")
    if not password or "\n" in password:
        raise Failure(USAGE, f"{'stdin' if str(source) == '-' else source}: one line, the password")
    return password
