"""Clusters by name: what the options of a command are where neither it nor the environment says them.

    {"current": "prod", "contexts": {"prod": {"namesrv": "ns1:9876;ns2:9876", "credentials": "/home/me/prod.yml"}}}

The file is contexts.json in $XDG_CONFIG_HOME/neve or ~/.config/neve; NEVE_CONTEXTS names another one. No secret is in
it: `credentials` names the file that has them.
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
    """As the file has them."""

    current: str | None
    named: Mapping[str, Mapping[str, Any]]

    def get(self, name: str) -> Mapping[str, Any]:
        """Raises Failure where there is none."""
        if name not in self.named:
            known = f"only {', '.join(sorted(self.named))}" if self.named else "none is made: `neve context add`"
            raise Failure(NOT_FOUND, f"there is no context {name}, {known}")
        return self.named[name]


def contexts_file() -> Path:
    named = os.environ.get(FILE_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "neve" / "contexts.json"


def read_contexts() -> Contexts:
    """
    Raises:
        click.UsageError: the file can't be read.
    """
    file = contexts_file()
    try:
        found = json.loads(file.read_text("utf-8"))
        named = {str(name): dict(settings) for name, settings in found["contexts"].items()}
    except FileNotFoundError:
        return Contexts(None, {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise click.UsageError(f"{file} is no file of contexts: {error}") from error
    return Contexts(found.get("current"), named)


def write_contexts(contexts: Contexts) -> None:
    """All of it or nothing of it."""
    file = contexts_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"current": contexts.current, "contexts": contexts.named}, indent=2, ensure_ascii=False)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as new:
        new.write(f"{text}\n")
    Path(new.name).replace(file)


def chosen() -> Mapping[str, Any]:
    """The settings of the context that holds for the running command: of that it names, or of the current one."""
    from neve.cli.main import CONTEXT_META

    running = click.get_current_context(silent=True)
    name = running.meta.get(CONTEXT_META) if running is not None else None
    contexts = read_contexts()
    if name is None:
        name = contexts.current
    return {} if name is None else contexts.get(str(name))


def from_context(setting: str, otherwise: Any = None) -> Callable[[], Any]:
    """An option's default."""
    assert setting in SETTINGS
    return lambda: chosen().get(setting, otherwise)
