"""`neve group` against a neve server, including the lag in messages that only the archive has."""

from __future__ import annotations

from pathlib import Path

import pytest

from neve.client.sync import connect
from tests.kit.cluster.command import Command
from tests.kit.cluster.group_command import (
    GROUP,
    TOPIC,
    a_deleted_group_is_gone,
    fill,
    is_request_in_flight,
    members_are_told,
    reset_matches_preview,
)
from tests.kit.server.requests import Up, offload


def test_group_shows_lag_age_and_cold_share(neve_up: Up, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with neve_up(tmp_path / "neve", "--set", "adminPort=0") as server:
        fill(server.namesrv)
        neve = Command("group", capfd, "-n", server.namesrv)
        is_request_in_flight(neve)
        assert all(row["cold"] is None for row in neve.json("lag", GROUP, "--topic", TOPIC))

        offload(server, "?roll=1&evict=1")
        with connect(server.namesrv) as client:
            client.send(TOPIC, "hot", queue=0)
        rows = {row["queue"]: row for row in neve.json("lag", GROUP, "--topic", TOPIC)}
        assert {queue: (row["lag"], row["cold"]) for queue, row in rows.items()} == {0: (4, 3), 1: (1, 1)}
        assert all(0 <= row["behind_ms"] < 600_000 for row in rows.values())
        assert "5 messages behind" in neve.err and "80.0% cold" in neve.err
        (listed,) = (row for row in neve.json("list") if row["group"] == GROUP)
        assert (listed["lag"], listed["cold"]) == (5, 4)

        with connect(server.namesrv) as client:
            client.commit(GROUP, TOPIC, 0, 6)
        (row,) = neve.json("reset", GROUP, "--topic", TOPIC, "--queue", "0", "--to-offset", "1", "--dry-run")
        assert (row["skipped"], row["repeated"], row["cold"]) == (0, 5, 4)
        rows = {row["queue"]: row for row in neve.json("lag", GROUP, "--topic", TOPIC)}
        assert (rows[0]["lag"], rows[0]["cold"], rows[0]["behind_ms"]) == (0, 0, 0)


def test_connected_members_are_shown_with_their_queues(
    neve_up: Up, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with neve_up(tmp_path / "neve") as server:
        fill(server.namesrv)
        members_are_told(Command("group", capfd, "-n", server.namesrv), server.namesrv)


def test_reset_matches_its_dry_run_and_deleted_group_is_removed(
    neve_up: Up, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with neve_up(tmp_path / "neve") as server:
        fill(server.namesrv)
        neve = Command("group", capfd, "-n", server.namesrv)
        reset_matches_preview(neve, server.namesrv)
        a_deleted_group_is_gone(neve, server.namesrv)
