"""Restore a broker from its bucket alone: what is recovered, what is lost, and that no offset is assigned twice."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from broker.archiving.restore import Restore
from broker.broker_controller import BrokerController
from broker.config import BrokerConfig
from broker.machine import Machine
from infra import failpoint
from infra.clock import SystemClock
from infra.disk.filesystem import RealDisk
from infra.failpoint import FailpointError
from infra.objects.minio import create_bucket, running
from infra.process.startup import StartupError
from neve.archive.catalog.journal_reader import read_catalog
from neve.archive.format.broker_state import BrokerState, read_state
from neve.archive.format.journal import Epoch
from neve.cli.store import open_source
from neve.record.codec import iter_records
from neve.remoting.codes import RequestCode as Code
from tests.kit.clock.waiting import wait_until
from tests.kit.server.neve import NEVE
from tests.kit.server.requests import (
    GOES_ON,
    GROUP,
    SMALL,
    TOPIC,
    ask,
    get,
    journal_of,
    offload,
    post,
    pull,
    read_all,
    refusal,
    send,
)

Up = Callable[..., AbstractContextManager[Any]]
OFTEN = ("--set", "statePeriod=100", *SMALL)
TIMED = {"a": "p", "b": TOPIC, "c": "TBW102", "d": "4", "e": "1", "f": "0", "g": "0", "h": "0", "j": "0", "k": "false",
         "m": "false", "i": "TIMER_DELAY_SEC\x01600\x02UNIQ_KEY\x01later\x02"}  # fmt: skip


def state_in(store: Path) -> BrokerState | None:
    return read_state(open_source(f"dir:{store}"), "broker-a")


def position(neve: Any) -> int:
    (answer,) = ask(neve, (Code.QUERY_CONSUMER_OFFSET, GROUP, b""))
    return int(answer.ext["offset"])


def commit(neve: Any, offset: int) -> None:
    pull(neve, 0)  # The first pull creates the group.
    (answer,) = ask(neve, (Code.UPDATE_CONSUMER_OFFSET, {**GROUP, "commitOffset": str(offset)}, b""))
    assert answer.code == 0, answer.remark


def wait_for_state(store: Path, following: int) -> None:
    def known() -> bool:
        state = state_in(store)
        return state is not None and state.queues.get(TOPIC, {}).get(0) == following

    wait_until(known)


def dry_run(data: Path, url: str) -> dict[str, Any]:
    command = [NEVE, "up", "--data", str(data), "--restore-from", url]
    done = subprocess.run([*command, "--dry-run", *SMALL], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def live_and_die(tmp_path: Path, neve_up: Up, url: str, known: Callable[[int], None]) -> None:
    """Run and kill a broker: six messages are archived, two are in the saved state only, and two are saved nowhere.

    A timer message is pending.
    """
    with neve_up(tmp_path, "--store", url, *OFTEN) as neve:
        assert send(neve, *(b"%d" % index for index in range(6))) == list(range(6))
        offload(neve, "?roll=1&evict=1")
        commit(neve, 4)
        ask(neve, (Code.SEND_MESSAGE_V2, TIMED, b"later"))
        send(neve, b"6", b"7")
        known(8)
        post(neve, "/jobs/state/run")
        neve.kill()
    shutil.rmtree(tmp_path / "data")


def test_bucket_has_the_broker_state_while_it_runs_and_after_it_stops(tmp_path: Path, neve_up: Up) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with neve_up(tmp_path, "--store", f"dir:{store}", *OFTEN) as neve:
        send(neve, b"a", b"b", b"c")
        commit(neve, 2)
        wait_for_state(store, 3)
        wait_until(lambda: f"{TOPIC}@g" in (state_in(store) or BrokerState(broker="")).offsets)
        running_state = state_in(store)
        assert running_state is not None and not running_state.clean
        assert running_state.offsets[f"{TOPIC}@g"] == {0: 2}
        assert TOPIC in {topic["topicName"] for topic in running_state.topics}
        send(neve, b"d")
        assert neve.stop() == 0
    last = state_in(store)
    assert last is not None
    assert (last.clean, last.queues[TOPIC], last.log_end > running_state.log_end) == (True, {0: 4}, True)


def test_restore_recovers_topics_offsets_and_cold_reads(tmp_path: Path, neve_up: Up) -> None:
    store = tmp_path / "store"
    store.mkdir()
    live_and_die(tmp_path, neve_up, f"dir:{store}", lambda following: wait_for_state(store, following))
    before = files(store)
    assert "use --restore-from with an empty one" in refusal(tmp_path / "data", f"dir:{store}")
    promised = dry_run(tmp_path / "data", f"dir:{store}")
    assert files(store) == before, "a dry run writes nothing"
    assert (promised["messages"], promised["lost"]["messages"], promised["lost"]["timers"]) == (6, 2, 1)
    with neve_up(tmp_path, "--restore-from", f"dir:{store}", *OFTEN) as neve:
        assert neve.ready["restored"]["messages"] == 6
        assert position(neve) == 4
        assert [bytes(record.body) for record in iter_records(pull(neve, 4).body)] == [b"4", b"5"]
        (new,) = send(neve, b"new")
        assert new >= 10, "above the two that only their producer knows"
        moved = pull(neve, 6)
        assert (moved.code, moved.ext["nextBeginOffset"]) == (GOES_ON, str(new))
        kept = {**{index: b"%d" % index for index in range(6)}, new: b"new"}
        assert read_all(neve) == kept
        assert (tiers(neve)["in_archive_alone"], tiers(neve)["on_brokers"], tiers(neve)["not_archived"]) == (6, 1, 1)
        assert offload(neve, "?roll=1&evict=1")["event"] == "done"
        assert (tiers(neve)["in_archive_alone"], tiers(neve)["not_archived"]) == (7, 0)
        assert read_all(neve) == kept
        assert post(neve, "/archive/verify?deep=true")[0]["findings"] == []
        (config,) = [topic for topic in get_topics(neve) if topic["topicName"] == TOPIC]
        assert config["writeQueueNums"] == 4
    with neve_up(tmp_path, "--store", f"dir:{store}", *OFTEN) as neve:  # The next start is an ordinary one.
        assert read_all(neve) == kept
        assert send(neve, b"next") == [new + 1]


def tiers(neve: Any) -> dict[str, Any]:
    """Return the summary of `neve topic show --tiers`."""
    command = [NEVE, "topic", "show", TOPIC, "--tiers", "-o", "json", "-n", neve.namesrv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout)["summary"])


def get_topics(neve: Any) -> list[dict[str, Any]]:
    (answer,) = ask(neve, (Code.GET_ALL_TOPIC_CONFIG, {}, b""))
    return list(json.loads(bytes(answer.body))["topicConfigTable"].values())


def test_restore_fences_a_running_broker(tmp_path: Path, neve_up: Up) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with neve_up(tmp_path / "old", "--store", f"dir:{store}", *OFTEN) as old:
        send(old, b"0", b"1")
        offload(old)
        wait_for_state(store, 2)
        with neve_up(tmp_path / "new", "--restore-from", f"dir:{store}", *OFTEN) as new:
            after = send(old, b"of the old")[0]
            assert send(new, b"of the new")[0] > after
            assert "this broker no longer archives, deletes or evicts" in offload(old)["error"]
            assert get(old, "/archive/status")["archive"] == "fenced"
            assert offload(new)["objects"] == 1
            assert list(read_all(new).values()) == [b"0", b"1", b"of the new"]
    last = state_in(store)
    assert last is not None and max(last.queues[TOPIC].values()) > 1000, "the old one's late state does not count"


# ---- an interrupted restore, in this process ----

STEPS = ("claim", "epoch", "plan", "log", "queues", "tables", "gaps")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory, neve_up: Up) -> Path:
    """Return the store of a broker that was lost."""
    directory = tmp_path_factory.mktemp("gone")
    store = directory / "store"
    store.mkdir()
    live_and_die(directory, neve_up, f"dir:{store}", lambda following: wait_for_state(store, following))
    return store


def controller(data: Path, store: Path, *, restoring: bool) -> BrokerController:
    settings = (
        f"storePathRootDir={data}", f"storeUrl=dir:{store}", "listenPort=0", "adminPort=-1", "brokerIP1=127.0.0.1",
        "bindAddress=127.0.0.1", "mappedFileSizeCommitLog=64k",
    )  # fmt: skip
    config, disk = BrokerConfig.load(None, settings), RealDisk()
    return BrokerController(
        config, Machine(clock=SystemClock(), disk=disk), Restore(config, disk) if restoring else None
    )


def start(data: Path, store: Path, *, restoring: bool) -> tuple[dict[int, int], dict[str, int], set[str]]:
    """Start and stop a broker; return the ends of the topic's queues, the group's offsets, and the topics."""

    async def run() -> tuple[dict[int, int], dict[str, int], set[str]]:
        broker = controller(data, store, restoring=restoring)
        await broker.start()
        context = broker
        found = (
            context.store.queues.following().get(TOPIC, {}),
            {name: queues[0] for name, queues in context.offsets.table().items()},
            {topic for topic in context.topics.topics if not context.topics.is_system(topic)},
        )
        await broker.shutdown()
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("step", STEPS)
def test_interrupted_restore_resumes_with_the_same_result(tmp_path: Path, archive: Path, step: str) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    shutil.copytree(archive, store)
    with failpoint.armed(f"restore.after_{step}"), pytest.raises((FailpointError, StartupError), match="failpoint"):
        start(data, store, restoring=True)
    with pytest.raises(StartupError, match="start again with --restore-from"):
        start(data, store, restoring=False)
    ends, offsets, topics = start(data, store, restoring=True)
    assert min(ends.values()) >= 10
    assert (offsets, topics) == ({f"{TOPIC}@g": 4}, {TOPIC})
    assert start(data, store, restoring=False) == (ends, offsets, topics)
    catalog = read_catalog(open_source(f"dir:{store}"), "broker-a")
    spans = sorted((gap.first, gap.last) for gap in catalog.gaps() if (gap.topic, gap.queue) == (TOPIC, 0))
    assert [first for first, _ in spans] == [6] and spans[-1][1] == ends[0] - 1
    assert catalog.rounds.open_intents() == {}


def test_restore_resumes_after_a_kill_between_log_and_checkpoint(tmp_path: Path, archive: Path) -> None:
    """An ordinary start cannot open such a directory; a restore builds it again."""
    store, data = tmp_path / "store", tmp_path / "data"
    shutil.copytree(archive, store)
    settings = (f"storePathRootDir={data}", "listenPort=0", "adminPort=-1", "mappedFileSizeCommitLog=64k")
    command = [NEVE, "broker", "--restore-from", f"dir:{store}"]
    killed = subprocess.run(
        [*command, *(part for setting in settings for part in ("--set", setting))],
        env={**os.environ, "NEVE_FAILPOINT": "store.roll=crash"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert list((data / "commitlog").iterdir())
    ends, offsets, _ = start(data, store, restoring=True)
    assert (min(ends.values()) >= 10, offsets) == (True, {f"{TOPIC}@g": 4})
    assert start(data, store, restoring=False)[0] == ends


def test_restore_requires_an_empty_directory_and_an_existing_archive(tmp_path: Path, archive: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    shutil.copytree(archive, store)
    before = files(store)
    with pytest.raises(StartupError, match="belongs to another data directory"):
        start(data, store, restoring=False)
    start(data, store, restoring=True)  # A directory left by a refused start counts as empty.
    assert sum(isinstance(entry, Epoch) for entry in journal_of(store)) == 2
    assert files(store).keys() > before.keys()
    with pytest.raises(StartupError, match="is not empty"):
        start(data, store, restoring=True)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(StartupError, match="no archive of broker broker-a"):
        start(tmp_path / "other", tmp_path / "nothing", restoring=True)
    start(tmp_path / "other", tmp_path / "nothing", restoring=False)


def test_superseded_restore_leaves_the_archive_to_its_successor(tmp_path: Path, archive: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(archive, store)
    with failpoint.armed("restore.after_queues"), pytest.raises((FailpointError, StartupError), match="failpoint"):
        start(tmp_path / "slow", store, restoring=True)
    start(tmp_path / "fast", store, restoring=True)
    with pytest.raises(StartupError, match="belongs to another data directory"):
        start(tmp_path / "slow", store, restoring=True)


@pytest.mark.servers
def test_broker_is_restored_from_a_bucket(tmp_path: Path, neve_up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path / "minio") as server:
        create_bucket(server, "archive")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        url = server.url("archive", "x")

        def known(following: int) -> None:
            def written() -> bool:
                state = read_state(open_source(url), "broker-a")
                return state is not None and state.queues.get(TOPIC, {}).get(0) == following

            wait_until(written)

        live_and_die(tmp_path, neve_up, url, known)
        assert dry_run(tmp_path / "data", url)["lost"]["messages"] == 2
        with neve_up(tmp_path, "--restore-from", url, *OFTEN) as neve:
            assert position(neve) == 4
            (new,) = send(neve, b"new")
            assert list(read_all(neve).values()) == [*(b"%d" % index for index in range(6)), b"new"]
            assert new >= 10
