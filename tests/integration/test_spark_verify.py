"""`verify` and `neve spark shell` on a real Spark."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.objects.open import open_store
from neve import spark as neve_spark
from neve.archive.format.journal import Gap
from neve.spark.verify import VerifyJob, verify
from neve.spark.verify_notes import OtherCheck
from tests.integration.spark_archive import commit
from tests.kit.archive.archive_on_paper import ArchiveOnPaper
from tests.kit.server.neve import NEVE

pytestmark = [
    pytest.mark.servers,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    conf = {"spark.ui.enabled": "false", "spark.log.level": "ERROR", "spark.sql.shuffle.partitions": "2"}
    session = neve_spark.session(master="local[2]", conf=conf)
    yield session
    session.stop()


def faults(done: VerifyJob) -> list[tuple[str, str | int | None, int | None, int | None]]:
    """Return (key or topic, queue, first, last), without duplicates."""
    return sorted({(one.key or one.topic, one.queue, one.first, one.last) for _, one in done.faults}, key=str)


def test_verify_names_object_and_offsets_of_each_planted_fault(spark: Any, tmp_path: Path) -> None:
    url = f"dir:{tmp_path}"
    store = open_store(url)
    sound = ArchiveOnPaper(store, "a", "sound")
    for number in range(3):
        commit(sound, number, 10 * number, 10 * number + 9)
    sound.append(Gap(topic="sound", queue=0, first=30, last=34, reason="test"))
    before = verify(spark, store=url)
    assert (before.ok, before.objects, before.rows, before.gaps) == (True, 3, 30, 1)

    flipped, missing, cut, one, other = (commit(sound, 3 + n, 35 + 10 * n, 44 + 10 * n) for n in range(5))
    broken = ArchiveOnPaper(store, "b", "untiled")
    commit(broken, 0, 0, 9)
    commit(broken, 1, 15, 24)
    commit(broken, 2, 20, 29)
    data = bytearray((tmp_path / flipped).read_bytes())
    data[100] ^= 16
    (tmp_path / flipped).write_bytes(data)
    (tmp_path / missing).unlink()
    (tmp_path / cut).write_bytes((tmp_path / cut).read_bytes()[:-1])
    swapped = (tmp_path / one).read_bytes(), (tmp_path / other).read_bytes()
    (tmp_path / one).write_bytes(swapped[1])
    (tmp_path / other).write_bytes(swapped[0])

    rounds: list[Any] = []
    done = verify(spark, store=url, progress=rounds.append)
    named = {name for name, *_ in faults(done)}
    assert named == {flipped, missing, cut, one, other, "untiled"}
    assert (flipped, 0, 35, 44) in faults(done)
    assert {("untiled", 0, 10, 14), ("untiled", 0, 20, 24)} <= set(faults(done))
    assert not done.ok and not done.unread
    assert rounds[-1].objects == rounds[-1].of_objects == 11
    assert [one.topic for _, one in verify(spark, store=url, topics=["untiled"], deep=False).faults] == ["untiled"] * 2
    quick = {name for name, *_ in faults(verify(spark, store=url, deep=False))}
    assert quick >= {missing, cut, "untiled"} and flipped not in quick
    assert json.loads(json.dumps(done.as_json()))["faults"]


def test_interrupted_verify_resumes_with_the_faults_found_before(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, note = f"dir:{tmp_path}/archive", tmp_path / "note"
    archive = ArchiveOnPaper(open_store(url), "a", "orders")
    keys = [commit(archive, number, 10 * number, 10 * number + 9) for number in range(4)]
    (tmp_path / "archive" / keys[0]).unlink()
    monkeypatch.setattr("neve.spark.verify.ROUND_OBJECTS", 2)

    class Killed(Exception):
        pass

    def die(_: object) -> None:
        raise Killed

    with pytest.raises(Killed):
        verify(spark, store=url, resume=note, progress=die)
    with note.open("a") as file:
        file.write('{"key": "cut sh')
    with pytest.raises(OtherCheck):
        verify(spark, store=f"dir:{tmp_path}/archive/", resume=note)
    rounds: list[Any] = []
    done = verify(spark, store=url, resume=note, progress=rounds.append)
    assert (done.resumed, [fault.key for _, fault in done.faults]) == (2, [keys[0]])
    (last,) = rounds
    assert last == (4, 4, done.bytes, done.bytes, 1), "objects checked before count once"
    assert not note.exists()


def test_shell_offers_topics_as_frames_and_tables(tmp_path: Path) -> None:
    store = open_store(f"dir:{tmp_path}")
    ArchiveOnPaper(store, "a", "orders").write(0, 0, 0, 7, hour=0)
    ArchiveOnPaper(store, "b", "%RETRY%g").write(0, 0, 0, 3, hour=0)
    typed = (
        "print('found', orders.count(), topics['%RETRY%g'].count(), read_topic('orders', offsets=(5, None)).count(), "
        "spark.sql('select count(*) from orders where text is not null').first()[0])\n"
    )
    command = [NEVE, "spark", "shell", "--store", f"dir:{tmp_path}", "--master", "local[1]"]
    done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, "found 7 3 2 7" in done.stdout) == (0, True), done.stdout + done.stderr[-2000:]
    assert "topics: %RETRY%g, orders" in done.stderr
