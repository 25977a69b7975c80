"""The verbs that change something by a broker's admin port ask the broker that they are told to ask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from neve.cli import admin
from neve.cli.main import neve


@pytest.mark.parametrize(
    ("verb", "asked", "answer", "said"),
    [
        (["unexpire"], ("/archive/unexpire", {}), {"objects": 3, "local_queues": 1}, "3 objects are back, 1 queues"),
        (["sweep", "--repair"], ("/archive/sweep", {"repair": "true"}), {"orphans": ["topic=a/x"]}, "topic=a/x"),
        (
            ["compact", "--dry-run", "t"],
            ("/archive/compact", {"topic": "t", "dry-run": "true"}),
            {"planned": 2},
            '"planned": 2',
        ),
        (["confirm-clock"], ("/clock/confirm", {}), {"before": {"trusted": True}}, "trusted already"),
    ],
)
def test_a_verb_asks_the_port_that_it_is_given(
    verb: list[str],
    asked: tuple[str, dict[str, str]],
    answer: dict[str, Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, str, dict[str, str]]] = []

    def post_lines(port: str, path: str, **query: str) -> Iterator[dict[str, Any]]:
        calls.append((port, path, query))
        yield answer

    monkeypatch.setattr(admin, "post_lines", post_lines)
    done = CliRunner().invoke(neve, ["archive", *verb, "--admin", "127.0.0.1:1"])
    assert done.exit_code == 0, done.output
    assert calls == [("127.0.0.1:1", *asked)]
    assert said in done.output


def test_objects_that_were_not_made_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def post_lines(port: str, path: str, **query: str) -> Iterator[dict[str, Any]]:
        yield {"event": "failed", "topic": "t", "reason": "damaged"}
        yield {"event": "done", "made": 1, "failed": 1}

    monkeypatch.setattr(admin, "post_lines", post_lines)
    done = CliRunner().invoke(neve, ["archive", "compact", "--admin", "127.0.0.1:1"])
    assert done.exit_code == 1
    assert '"reason": "damaged"' in done.output
    assert "1 objects were not made" in str(done.exception)
