"""A broker from its bucket alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from neve.archive.state import BrokerState, read_state
from neve.cli.store import open_source
from neve.remoting.codes import RequestCode as Code
from tests.integration.test_identity import GROUP, SMALL, TOPIC, ask, send, wait_until

Up = Callable[..., AbstractContextManager[Any]]


def state_in(store: Path) -> BrokerState | None:
    return read_state(open_source(f"dir:{store}"), "broker-a")


def test_the_bucket_knows_the_brokers_state_while_it_runs_and_after_its_stop(tmp_path: Path, neve_up: Up) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with neve_up(tmp_path, "--store", f"dir:{store}", "--set", "statePeriod=100", *SMALL) as neve:
        send(neve, b"a", b"b", b"c")
        ask(neve, (Code.UPDATE_CONSUMER_OFFSET, {**GROUP, "commitOffset": "2"}, b""))

        def known() -> bool:
            state = state_in(store)
            return state is not None and state.queues.get(TOPIC) == {0: 3} and f"{TOPIC}@g" in state.offsets

        wait_until(known)
        running = state_in(store)
        assert running is not None and not running.clean
        assert running.offsets[f"{TOPIC}@g"] == {0: 2}
        assert TOPIC in {topic["topicName"] for topic in running.topics}
        send(neve, b"d")
        assert neve.stop() == 0
    last = state_in(store)
    assert last is not None
    assert (last.clean, last.queues[TOPIC], last.log_end > running.log_end) == (True, {0: 4}, True)
