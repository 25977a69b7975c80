"""`neve produce` and `neve consume` against either broker."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from neve.client import sync
from tests.kit.server.neve import NEVE


def neve(server: Any, *arguments: str, stdin: str = "") -> str:
    done = subprocess.run(
        [NEVE, *arguments, "-n", server.namesrv], input=stdin, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_produce_sends_lines_in_order_delayed_and_with_properties(server: Any, topic: str) -> None:
    lines = [str(number) for number in range(20)]
    out = neve(
        server, "produce", topic, "--order-key", "k", "-p", "colour=red", stdin="\n".join([*lines[:9], "", *lines[9:]])
    )
    receipts = [json.loads(line) for line in out.splitlines()]
    assert len({receipt["queue"] for receipt in receipts}) == 1
    assert [receipt["offset"] for receipt in receipts] == list(range(20))
    assert neve(server, "consume", topic, "--count", "20").split() == lines
    delayed = json.loads(
        neve(server, "produce", topic, "later", "--delay", "1.5", "--queue", str(receipts[0]["queue"]))
    )
    with sync.connect(server.namesrv) as client:
        (message,) = client.pull(topic, receipts[0]["queue"], 20, wait=15, timeout=20).messages
        assert message.body == b"later"
        assert client.pull(topic, receipts[0]["queue"], 0).messages[0].properties["colour"] == "red"
    assert delayed["recall_handle"]
