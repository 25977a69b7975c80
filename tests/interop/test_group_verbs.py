"""`neve group` on an Apache RocketMQ 5.3.3 broker, which reports no archive."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.cluster.command import Command
from tests.kit.cluster.group_command import (
    GROUP,
    a_deleted_group_is_gone,
    fill,
    is_request_in_flight,
    members_are_told,
    reset_matches_preview,
)
from tests.kit.server.apache import ApacheServer

pytestmark = pytest.mark.servers


def test_apache_groups_are_shown_like_neve_groups(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with ApacheServer(tmp_path, heap="512m", quick=True) as apache:
        fill(apache.namesrv)
        neve = Command("group", capfd, "-n", apache.namesrv)
        is_request_in_flight(neve)
        assert all(row["cold"] is None for row in neve.json("lag", GROUP))
        reset_matches_preview(neve, apache.namesrv)
        members_are_told(neve, apache.namesrv)
        a_deleted_group_is_gone(neve, apache.namesrv)
