"""Tests of archive commands that use the admin port of a broker."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from click.testing import CliRunner

from neve.cli import admin, admin_address
from neve.cli.failures import UNREACHABLE, Failure
from neve.cli.main import neve
from neve.client.model import BrokerInfo


@pytest.mark.parametrize(
    ("verb", "asked", "answer", "said"),
    [
        (
            ["unexpire"],
            ("/archive/unexpire", {}),
            {"objects": 3, "local_queues": 1},
            "restored 3 objects, and 1 queues",
        ),
        (["sweep", "--repair"], ("/archive/sweep", {"repair": "true"}), {"orphans": ["topic=a/x"]}, "topic=a/x"),
        (
            ["compact", "--dry-run", "t"],
            ("/archive/compact", {"topic": "t", "dry-run": "true"}),
            {"planned": 2},
            "planned  2",
        ),
        (
            ["erase", "t", "--key", "k", "--dry-run", "--grace", "0s", "--no-retries", "--id", "e1.2"],
            (
                "/archive/erase",
                {"topic": "t", "key": "k", "dry-run": "true", "no-retries": "true", "grace": "0s", "id": "e1.2"},
            ),
            {"event": "done", "topic": "t", "rows": 3, "objects": 2},
            "3 messages in 2 archived objects of t",
        ),
        (["confirm-clock"], ("/clock/confirm", {}), {"before": {"trusted": True}}, "trusted already"),
    ],
)
def test_archive_command_calls_the_given_admin_port(
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


def test_failed_compaction_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def post_lines(port: str, path: str, **query: str) -> Iterator[dict[str, Any]]:
        yield {"event": "failed", "topic": "t", "reason": "damaged"}
        yield {"event": "done", "made": 1, "failed": 1}

    monkeypatch.setattr(admin, "post_lines", post_lines)
    done = CliRunner().invoke(neve, ["archive", "compact", "-o", "json", "--admin", "127.0.0.1:1"])
    assert done.exit_code == 1
    assert '"reason": "damaged"' in done.output
    assert "1 objects were not written" in str(done.exception)


CERTIFICATE = {
    "event": "certificate", "id": "e3.9", "broker": "b1", "topic": "t", "key_sha256": "ab", "time_ms": 0,
    "complete": False, "rows": 4,
    "erased": [{"topic": "t", "queue": 1, "offsets": [[3, 3], [7, 9]]}],
    "quarantine": ["/data/quarantine/x.record"],
    "remains": {
        "objects": [{"key": "topic=t/x", "until_ms": 86_400_000}],
        "in_no_view": ["topic=t/z"],
        "local_log": [
            {"topic": "t", "queue": 1, "rows": 2, "hidden": 2, "until_ms": None},
            {"topic": "t", "queue": 2, "rows": 5, "hidden": 4, "until_ms": 0},
        ],
        "other_members": True,
    },
    "not_erased": ["topic=t/y: damaged"],
}  # fmt: skip


@pytest.mark.parametrize("output", ["table", "json"])
def test_erase_prints_its_certificate_and_fails_if_incomplete(output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def post_lines(port: str, path: str, **query: str) -> Iterator[dict[str, Any]]:
        yield {"event": "erased", "key": "topic=t/x", "rows": 4}
        yield CERTIFICATE

    monkeypatch.setattr(admin, "post_lines", post_lines)
    done = CliRunner().invoke(neve, ["archive", "erase", "t", "--key", "k", "-o", output, "--admin", "127.0.0.1:1"])
    assert done.exit_code == 1
    assert "not erased: topic=t/y: damaged" in str(done.exception)
    if output == "json":
        assert json.loads(done.stdout) == CERTIFICATE
        return
    said = done.stdout
    assert "deleted       the quarantined record /data/quarantine/x.record" in said
    assert "erased        4 messages, NOT ALL" in said and "t queue 1: 3, 7-9" in said
    assert "until 1970-01-02T00:00:00Z in the object topic=t/x" in said
    assert "until an unknown time in the local log: 2 of t queue 1" in said
    assert "2 of t queue 1\n              on the disk only: no request returns them" in said
    assert "5 of t queue 2\n              of these 1 may still be returned" in said
    assert "other members" in said and "as an orphan" in said and "the object topic=t/z" in said
    assert "broker        b1, only its part" in said


def test_erase_fails_without_a_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    def post_lines(port: str, path: str, **query: str) -> Iterator[dict[str, Any]]:
        yield {"event": "erased", "key": "topic=t/x", "rows": 4}

    monkeypatch.setattr(admin, "post_lines", post_lines)
    done = CliRunner().invoke(neve, ["archive", "erase", "t", "--key", "k", "--admin", "127.0.0.1:1"])
    assert done.exit_code == 1
    assert "before the certificate" in str(done.exception)


def test_verify_reports_a_malformed_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "post_json", lambda *_, **__: ["not", "a", "report"])
    done = CliRunner().invoke(neve, ["archive", "verify", "--admin", "127.0.0.1:1"])
    assert isinstance(done.exception, Failure)
    assert str(done.exception) == "the broker's answer to a verification is not a report: ['not', 'a', 'report']"


def test_admin_port_of_a_broker_without_a_master_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """During an election, the name servers list only replicas."""

    class Electing:
        @property
        def admin(self) -> Electing:
            return self

        async def cluster_info(self) -> dict[str, BrokerInfo]:
            return {"a": BrokerInfo("c", "a", {1: "127.0.0.1:2"})}

    @asynccontextmanager
    async def connecting(_: str) -> AsyncIterator[Electing]:
        yield Electing()

    monkeypatch.setattr(admin_address, "connect", connecting)
    done = CliRunner().invoke(neve, ["archive", "list", "-n", "127.0.0.1:1"])
    assert isinstance(done.exception, Failure)
    assert done.exception.exit_code == UNREACHABLE
    assert "broker a has no master at present" in str(done.exception)
