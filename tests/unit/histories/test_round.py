"""Tests of history rounds: late ends, leader queries, and replacement of members."""

from __future__ import annotations

import asyncio
import io
import random
from pathlib import Path

import pytest

from broker.ha.master_session import AWAY_TOO_LONG
from neve.cli.failures import Failure
from neve.errors import BrokerError, ClientError, ConnectionFailed, ProtocolError, UnknownOutcome
from neve.remoting.codes import ResponseCode
from tests.histories.links import Links
from tests.histories.round import LATE, epoch_told
from tests.histories.servers import FaultyProcess, FaultySet
from tests.kit.clock.waiting import NotWithin, until, wait_until


@pytest.mark.parametrize("error", [ConnectionFailed("a"), ClientError("a"), UnknownOutcome("a"), TimeoutError()])
def test_unanswered_round_may_be_late(error: Exception) -> None:
    assert isinstance(error, LATE)


@pytest.mark.parametrize("error", [ProtocolError("a"), BrokerError(ResponseCode.SYSTEM_ERROR), Failure(1, "a")])
def test_round_with_a_wrong_answer_is_not_late(error: Exception) -> None:
    assert not isinstance(error, LATE)


def test_wait_timeout_is_late() -> None:
    with pytest.raises(NotWithin):
        asyncio.run(until(lambda: False, timeout=0.05))
    with pytest.raises(NotWithin):
        wait_until(lambda: False, timeout=0.05)


def test_leader_is_queried_until_an_answer_or_timeout() -> None:
    answers = iter((-1, -1, 7))

    async def ask() -> int:
        return next(answers)

    async def nobody() -> int:
        return -1

    assert asyncio.run(epoch_told(ask, 60.0)) == 7
    assert asyncio.run(epoch_told(nobody, 0.05)) == -1


class RecordedProcess(FaultyProcess):
    """A server that does not run and records the calls."""

    def __init__(self, done: list[str], directory: Path) -> None:
        super().__init__("a", directory, "broker", {})
        self._done = done

    def kill(self) -> None:
        self._done.append("kill")

    def begin(self) -> None:
        self._done.append("begin")


class ForgetfulSet(FaultySet):
    """A broker set whose controller forgets a member after `may_forget`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, Links(list, random.Random(0)), {})
        self.done: list[str] = []
        self.servers["a"] = RecordedProcess(self.done, directory / "a")
        self.asked, self.may_forget, self.is_needed = asyncio.Event(), asyncio.Event(), False

    async def forget(self, member: str) -> bool:
        self.asked.set()
        await self.may_forget.wait()
        self.done.append("needed" if self.is_needed else "forget")
        return not self.is_needed

    def noted(self, member: str) -> None:
        self.done.append(f"noted {member}")


async def test_cancelled_replacement_runs_to_its_end(tmp_path: Path) -> None:
    """Otherwise, a member would stay down, or restart with a disk whose id the controller has forgotten."""

    brokers = ForgetfulSet(tmp_path)
    first = asyncio.create_task(brokers.replace("a", brokers.noted))
    await brokers.asked.wait()
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled() and brokers.done == ["kill"]
    assert brokers.turns["a"].locked(), "nobody begins it meanwhile"
    again = asyncio.create_task(brokers.replace("a", brokers.noted))
    brokers.may_forget.set()
    assert await again
    assert brokers.done == ["kill", "forget", "noted a", "begin"], "once"
    assert await brokers.replace("a", brokers.noted, begins=False)
    assert brokers.done[4:] == ["kill", "forget", "noted a"], "who asked begins it"


async def test_needed_member_restarts_unchanged(tmp_path: Path) -> None:
    brokers = ForgetfulSet(tmp_path)
    brokers.is_needed = True
    brokers.may_forget.set()
    assert not await brokers.replace("a", brokers.noted)
    assert brokers.done == ["kill", "needed", "begin"]


@pytest.mark.parametrize(("end", "is_away"), [(99, True), (100, False)])
def test_member_is_replaced_only_with_confirmation_of_its_master(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: int, is_away: bool
) -> None:
    """The log of its master must begin above its own log end."""
    brokers = FaultySet(tmp_path, Links(list, random.Random(0)), {})
    brokers.log_files["a"].mkdir(parents=True)
    (brokers.log_files["a"] / f"{100:020}").touch()
    monkeypatch.setattr(brokers, "_admin", {"b": "127.0.0.1:1"})

    async def master() -> str:
        return "a"

    async def log_end(member: str) -> int:
        return end

    def told(url: str, timeout: float) -> io.BytesIO:
        return io.BytesIO(AWAY_TOO_LONG.encode())

    monkeypatch.setattr(brokers, "master", master)
    monkeypatch.setattr(brokers, "log_end", log_end)
    monkeypatch.setattr("urllib.request.urlopen", told)
    assert asyncio.run(brokers.away_too_long()) == (["b"] if is_away else [])
