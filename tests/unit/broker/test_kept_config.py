"""A setting that is changed on a running broker applies after restarts, until it is unset."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest
from typing_extensions import override

from infra.disk.filesystem import RealDisk
from infra.process.startup import StartupError
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from tests.kit.broker.in_process import ask, running


async def test_changed_setting_overrides_file_and_command_line_after_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, "transactionCheckMax=15") as (broker, connection):
        answer = await ask(connection, Code.UPDATE_BROKER_CONFIG, b"transactionCheckMax=17\nhotBytes=1g\n")
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        assert (broker.config.transaction_check_max, broker.config.hot_bytes) == (17, 1 << 30)
    with caplog.at_level(logging.INFO):
        async with running(tmp_path, "transactionCheckMax=16") as (broker, connection):
            assert (broker.config.transaction_check_max, broker.config.hot_bytes) == (17, 1 << 30)
            assert "transactionCheckMax=17, as set on the running broker, overrides 16" in caplog.text
            told = await ask(connection, Code.GET_BROKER_CONFIG)
            assert json.loads(told.ext["kept"]) == {"hotBytes": str(2 << 30), "transactionCheckMax": "16"}
            assert (await ask(connection, Code.UPDATE_BROKER_CONFIG, unset="transactionCheckMax")).code == 0
            assert broker.config.transaction_check_max == 16
    async with running(tmp_path, "transactionCheckMax=18") as (broker, _):
        assert (broker.config.transaction_check_max, broker.config.hot_bytes) == (18, 1 << 30)


async def test_refused_change_has_no_effect_and_is_not_saved(tmp_path: Path) -> None:
    async with running(tmp_path) as (broker, connection):
        assert (await ask(connection, Code.UPDATE_BROKER_CONFIG, b"transactionCheckMax=9\n")).code == 0
        for body, unset in (
            (b"transactionCheckMax=0\n", ""),
            (b"transactionCheckMax=10\nlistenPort=1\n", ""),
            (b"hotBytes=1g\n", "maxTopics"),
            (b"transactionCheckMax=10\n", "transactionCheckMax"),
        ):
            answer = await ask(connection, Code.UPDATE_BROKER_CONFIG, body, unset=unset)
            assert answer.code != ResponseCode.SUCCESS, (body, unset)
            assert (broker.config.transaction_check_max, broker.config.hot_bytes) == (9, 2 << 30)
    async with running(tmp_path) as (broker, _):
        assert (broker.config.transaction_check_max, broker.config.hot_bytes) == (9, 2 << 30)


class _NothingIsKept(RealDisk):
    @override
    def write_atomic(self, path: Path, data: bytes) -> None:
        if path.name == "keptConfig.json":
            raise OSError(28, "No space left on device")
        super().write_atomic(path, data)


async def test_change_that_cannot_be_saved_is_not_applied(tmp_path: Path) -> None:
    async with running(tmp_path, disk=_NothingIsKept()) as (broker, connection):
        answer = await ask(connection, Code.UPDATE_BROKER_CONFIG, b"transactionCheckMax=9\n")
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "No space left" in (answer.remark or "")
        assert broker.config.transaction_check_max == 15


async def test_saved_key_of_another_version_is_ignored_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "config" / "keptConfig.json"
    path.parent.mkdir()
    path.write_text('{"neveFormat":1,"keys":{"ofTomorrow":"7","maxTopics":"12"}}')
    async with running(tmp_path) as (broker, connection):
        assert broker.config.max_topics == 12
        assert "ofTomorrow" in caplog.text
        assert json.loads((await ask(connection, Code.GET_BROKER_CONFIG)).ext["kept"]) == {"maxTopics": "100000"}
        assert (await ask(connection, Code.UPDATE_BROKER_CONFIG, b"hotBytes=1g\n")).code == 0
    assert json.loads(path.read_text())["keys"] == {"hotBytes": "1g", "maxTopics": "12", "ofTomorrow": "7"}


@pytest.mark.parametrize("text", ['{"neveFormat":2,"keys":{}}', '{"keys":[]}', "\x00\x00"])
async def test_unreadable_file_stops_the_start_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config" / "keptConfig.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(StartupError, match=r"keptConfig\.json"):
        async with running(tmp_path):
            pass


def test_log_level_changes_while_the_broker_runs(tmp_path: Path) -> None:
    root = logging.getLogger()
    before = root.level

    async def work() -> None:
        async with running(tmp_path) as (_, connection):
            assert (await ask(connection, Code.UPDATE_BROKER_CONFIG, b"logLevel=ERROR\n")).code == 0
            assert root.level == logging.ERROR
            assert (await ask(connection, Code.UPDATE_BROKER_CONFIG, unset="logLevel")).code == 0
            assert root.level == logging.INFO
            refused = await ask(connection, Code.UPDATE_BROKER_CONFIG, b"listenPort=1\n")
            assert "listenPort: restart the broker to change it; nothing was changed" in (refused.remark or "")

    try:
        asyncio.run(work())
    finally:
        root.setLevel(before)
