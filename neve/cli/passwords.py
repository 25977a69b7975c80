"""Passwords, from a prompt, a file or stdin. Never from an argument, which all users of the machine can see."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from neve.cli.failures import FAILED, USAGE, Failure


def password_from(source: Path | None, name: str) -> str:
    """Return the password in a file, or in stdin for `-`; None prompts for it twice.

    Raises:
        Failure: there is no terminal, or the file does not hold exactly one line.
    """
    if source is None:
        if not sys.stdin.isatty():
            raise Failure(
                USAGE, "there is no terminal to prompt for the password: give --password-file FILE, or - for stdin"
            )
        return str(click.prompt(f"password of {name}", hide_input=True, confirmation_prompt=True, err=True))
    try:
        text = sys.stdin.read() if str(source) == "-" else source.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise Failure(FAILED, f"{source}: not UTF-8") from error
    password = text.removesuffix("\n").removesuffix("\r")
    if not password or "\n" in password:
        raise Failure(USAGE, f"{'stdin' if str(source) == '-' else source}: it must hold one line, the password")
    return password
