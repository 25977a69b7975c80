"""`neve broker-set` on a set of Apache RocketMQ 5.3.3 brokers, elected by Apache's own controller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop.controlled_set import may_send
from tests.kit.clock.waiting import wait_until
from tests.kit.cluster.command import Command
from tests.kit.server.apache import ApacheController, ApacheMember, ApacheNameServer

pytestmark = pytest.mark.servers

NAME = "stock"
CONFLICT = 5
_CHANGE_S = 60.0


def test_apache_set_is_listed_switched_over_and_loses_a_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    neve = Command("broker-set", capfd)
    with ApacheController(tmp_path / "controller") as controller, ApacheNameServer(tmp_path / "names") as names:
        monkeypatch.setenv("NAMESRV_ADDR", names.namesrv)
        a, b = (
            ApacheMember(tmp_path / name, namesrv=names.namesrv, controller=controller.address) for name in ("a", "b")
        )
        with a, b:

            def members() -> dict[str, dict[str, Any]]:
                return {row["address"]: row for row in neve.json("show", NAME, "--controller", controller.address)}

            wait_until(lambda: sum(row["in_sync"] for row in members().values()) == 2, "both in sync", _CHANGE_S)
            former, other = (a, b) if members()[a.broker]["role"] == "master" else (b, a)
            wait_until(lambda: may_send(former), "a master that takes messages", _CHANGE_S)

            # The name server knows the set, and each member knows its controller.
            wait_until(lambda: neve.json("list")[0]["living"] == 2, "the set is shown", _CHANGE_S)
            (row,) = neve.json("list")
            assert (row["set"], row["address"], row["epoch"]) == (NAME, former.broker, 1)
            assert (row["in_sync"], row["living"], row["members"]) == (2, 2, 2)
            wait_until(lambda: len({row["log_end"] for row in members().values()}) == 1, "equal logs", _CHANGE_S)
            assert all(row["log_end"] > 0 and row["behind"] == 0 for row in members().values())
            ids = {address: row["id"] for address, row in members().items()}
            assert {(row["member"], row["epoch"], row["start"]) for row in neve.json("epochs", NAME)} == {
                (number, 1, 0) for number in ids.values()
            }
            assert f"brokerName={NAME}" in neve("add-member", NAME)

            old, new = ids[former.broker], ids[other.broker]
            neve("switchover", NAME, "--member", str(old), code=CONFLICT)
            neve("remove-member", NAME, str(new), "--yes", code=CONFLICT)
            neve("switchover", NAME, "--member", str(new))
            (row,) = neve.json("list")
            assert (row["address"], row["epoch"], row["in_sync"]) == (other.broker, 2, 2)
            wait_until(lambda: may_send(other), "the new master takes messages", _CHANGE_S)
            neve("elect", NAME, "--member", str(old), "--yes", code=CONFLICT)

            former.kill()
            wait_until(lambda: neve.json("list")[0]["living"] == 1, "it is dead", _CHANGE_S)
            neve("remove-member", NAME, str(old), "--yes")
            assert list(members()) == [other.broker]
