"""RocketMQ's topic attributes without an effect in neve."""

import asyncio
from pathlib import Path

import pytest

from neve.remoting.body import lenient_loads
from neve.remoting.codes import RequestCode as Code
from tests.kit.broker.in_process import ask, running, send


@pytest.mark.parametrize("attribute", ["queue.type=BatchCQ", "cleanup.policy=COMPACTION"])
def test_topic_with_an_attribute_without_effect_is_ordinary(
    tmp_path: Path, attribute: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with running(tmp_path) as (_, connection):
            made = {"topic": "t", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6, "attributes": f"+{attribute}"}
            for _ in range(2):  # the second request changes nothing
                answer = await ask(connection, Code.UPDATE_AND_CREATE_TOPIC, **made)
                assert answer.code == 0, answer.remark
            config = lenient_loads((await ask(connection, Code.GET_TOPIC_CONFIG, topic="t")).body)
            name, value = attribute.split("=")
            assert config["attributes"] == {name: value}
            changed = await ask(connection, Code.UPDATE_AND_CREATE_TOPIC, **{**made, "attributes": f"-{name}"})
            assert (changed.code, changed.remark) == (1, f"attribute {name} can't be changed")
            await send(connection, "t")

    asyncio.run(main())
    warnings = [one.message for one in caplog.records if "without effect" in one.message]
    assert warnings == [f"topic attribute without effect: topic=t {attribute}, the topic is an ordinary one"]
