"""Tests of retries at a busy broker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from neve.cli.busy import retry_while_busy
from neve.errors import BrokerError
from neve.remoting.codes import ResponseCode


def asked(answers: Iterator[str | int], monkeypatch: pytest.MonkeyPatch) -> tuple[str | int, list[float]]:
    """Return the result and the pauses of a retried call with these answers; numbers are refusal codes."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def pull() -> str:
        answer = next(answers)
        if isinstance(answer, int):
            raise BrokerError(answer, "not now")
        return answer

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return asyncio.run(retry_while_busy(pull)), pauses


def test_busy_broker_is_retried_for_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = int(ResponseCode.SYSTEM_BUSY)
    found, pauses = asked(iter([busy, busy, "there"]), monkeypatch)
    assert (found, len(pauses)) == ("there", 2)
    assert "retrying" in capsys.readouterr().err
    with pytest.raises(BrokerError, match="not now"):
        asked(iter([busy] * 100), monkeypatch)


def test_permanent_refusal_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BrokerError, match="not now"):
        asked(iter([int(ResponseCode.NO_PERMISSION), "there"]), monkeypatch)
