"""Contexts: named defaults of the connection options of a command.

    {"current": "prod", "contexts": {"prod": {"namesrv": "ns1:9876;ns2:9876", "credentials": "/home/me/prod.yml"}}}

The file is contexts.json in $XDG_CONFIG_HOME/neve or ~/.config/neve, or the one that NEVE_CONTEXTS names. It holds no
secrets: `credentials` names the file with them.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from neve.cli.failures import NOT_FOUND, Failure

FILE_VARIABLE = "NEVE_CONTEXTS"
SETTINGS = ("namesrv", "credentials", "tls", "tls_ca", "tls_cert", "tls_key", "store")


class Contexts(NamedTuple):
    """The content of the file."""

    current: str | None
    named: Mapping[str, Mapping[str, Any]]

    def get(self, name: str) -> Mapping[str, Any]:
        """Return the settings of a context.

        Raises:
            Failure: there is no such context.
        """
        if name not in self.named:
            known = (
                f"only {', '.join(sorted(self.named))}"
                if self.named
                else "because none exists: `neve context create` creates one"
            )
            raise Failure(NOT_FOUND, f"there is no context {name}, {known}")
        return self.named[name]


def contexts_file() -> Path:
    """Return the path of the file."""
    named = os.environ.get(FILE_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "neve" / "contexts.json"


def read_contexts() -> Contexts:
    """Return the contexts of the file; none if there is no file.

    Raises:
        click.UsageError: the file cannot be read.
    """
    file = contexts_file()
    try:
        found = json.loads(file.read_text("utf-8"))
        named = {str(name): dict(settings) for name, settings in found["contexts"].items()}
    except FileNotFoundError:
        return Contexts(None, {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise click.UsageError(f"{file} cannot be read as contexts: {error}") from error
    return Contexts(found.get("current"), named)


def write_contexts(contexts: Contexts) -> None:
    """Replace the file atomically."""
    file = contexts_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"current": contexts.current, "contexts": contexts.named}, indent=2, ensure_ascii=False)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as new:
        new.write(f"{text}\n")
    Path(new.name).replace(file)


def chosen() -> Mapping[str, Any]:
    """Return the settings of the context that the running command names, or of the current one."""
    from neve.cli.main import CONTEXT_META

    running = click.get_current_context(silent=True)
    name = running.meta.get(CONTEXT_META) if running is not None else None
    contexts = read_contexts()
    if name is None:
        name = contexts.current
    return {} if name is None else contexts.get(str(name))


def from_context(setting: str, otherwise: Any = None) -> Callable[[], Any]:
    """Return a function for the default of an option."""
    assert setting in SETTINGS
    return lambda: chosen().get(setting, otherwise)
