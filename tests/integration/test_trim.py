"""`neve topic trim`: trimmed messages stay deleted in both tiers, after a kill and in a restored broker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from neve.cli import main
from neve.client import sync
from tests.kit.server.neve import NeveServer

SETTINGS = {"archiveWorkerPriority": "normal", "coldReadPriority": "normal", "archivePeriod": "1h"}


class BrokerCommands:
    """Runs commands against one broker."""

    def __init__(self, neve: NeveServer, capfd: pytest.CaptureFixture[str]) -> None:
        self._neve, self._capfd = neve, capfd
        self.said = ""

    def __call__(self, *arguments: str, code: int = 0) -> str:
        ended = main.run([*arguments, "-n", self._neve.namesrv])
        out, self.said = self._capfd.readouterr()
        assert ended == code, (arguments, out, self.said)
        return out

    def trim(self, *arguments: str, code: int = 0) -> list[tuple[int, int, int, int]]:
        """Return (queue, begin, to, messages) of the printed rows."""
        out = self("topic", "trim", "orders", *arguments, "--admin", self._neve.admin, "-o", "json", code=code)
        rows: list[dict[str, Any]] = json.loads(out) if out else []
        return [(row["queue"], row["begin"], row["to"], row["messages"]) for row in rows]

    def numbers(self) -> list[int]:
        return sorted(map(int, self("consume", "orders").split()))

    def offload(self, *how: str) -> None:
        self("archive", "offload", "--roll", *how, "--admin", self._neve.admin)


def send(neve: NeveServer, numbers: range) -> None:
    """Send even numbers to queue 0 and odd ones to queue 1."""
    with sync.connect(neve.namesrv) as client:
        for number in numbers:
            client.send("orders", str(number), queue=number % 2)


def test_trimmed_messages_stay_deleted_in_both_tiers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with NeveServer(tmp_path / "neve", settings=SETTINGS) as neve:
        shell = BrokerCommands(neve, capfd)
        shell("topic", "create", "orders", "--queues", "2")
        send(neve, range(10))
        shell.offload("--evict")
        send(neve, range(10, 20))
        assert shell.trim("--before-offset", "3", "--queue", "0", "--dry-run") == [(0, 0, 3, 3)]
        assert len(shell.numbers()) == 20
        # First only archived messages; then the rest of them and some that are only on the disk.
        assert shell.trim("--before-offset", "3", "--queue", "0", "--yes") == [(0, 0, 3, 3)]
        assert shell.trim("--before-offset", "7", "--queue", "1", "--yes") == [(1, 0, 7, 7)]
        left = [6, 8, 10, 12, 14, 15, 16, 17, 18, 19]
        assert shell.numbers() == left
        shell.trim("--before-offset", "11", "--queue", "1", "--yes", code=2)
        shell.trim("--before-offset", "1", "--yes", code=2)
        neve.kill()
        neve.start()
        assert shell.numbers() == left
        shell.offload()
        assert shell.numbers() == left
        told = json.loads(shell("topic", "show", "orders", "-o", "json"))
        assert [(row["min_offset"], row["max_offset"]) for row in told["queues"]] == [(3, 10), (7, 10)]
        assert shell.trim("--before-time", "2020-01-01", "--yes") == [(0, 3, 3, 0), (1, 7, 7, 0)]
        assert shell.trim("--before-time", "2100-01-01", "--yes") == [(0, 3, 10, 7), (1, 7, 10, 3)]
        assert shell.numbers() == []
        send(neve, range(20, 24))
        shell.offload()
        store = neve.store
        neve.stop()
    with NeveServer(tmp_path / "again", "--restore-from", store, store=store, settings=SETTINGS) as again:
        assert BrokerCommands(again, capfd).numbers() == [20, 21, 22, 23]
