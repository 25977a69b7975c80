"""Follow the rolling restart of docs/ha/operate.md line by line; the clients of the set must not notice."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

from neve.client import AsyncClient, connect
from neve.client.consumers.base import DeliveringConsumer
from tests.kit.clock.waiting import until
from tests.kit.server.broker_set import TOPIC, BrokerSet
from tests.kit.server.neve import Serving

PAGE = (Path(__file__).parents[2] / "docs" / "ha" / "operate.md").read_text("utf-8")
GROUP = "g"
_CALL_S = 60.0  # A switchover takes a second, and the machine is shared.
_STEP = 50  # The number of messages sent and received before the first line and after each line.


def procedure() -> list[str]:
    block = re.search(
        r"^## Restart or upgrade the members one by one$.*?^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
    )
    assert block is not None
    return [line.partition("   ")[0].strip() for line in block[1].splitlines()]


class UpgradeOperator:
    """Executes the lines of the page."""

    def __init__(self, brokers: BrokerSet) -> None:
        self._names = brokers.name_server.namesrv
        one, other = brokers.slaves
        self.hosts: dict[str, Serving] = {"slave1": one, "slave2": other, "master": brokers.master}
        self.restarted: list[str] = []

    def does(self, line: str) -> None:
        service = re.fullmatch(r"ssh (\w+) systemctl restart neve-broker", line)
        if service is not None:
            member = self.hosts[service[1]]
            assert member.stop() == 0
            member.start()
            self.restarted.append(service[1])
            return
        for host, member in self.hosts.items():
            line = line.replace(f"{host}:10911", member.broker)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "NAMESRV_ADDR": self._names}
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, check=False, env=env)
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"


class NumberTraffic:
    """One producer of numbers that sends each after the previous one is acknowledged, and a group that reads them."""

    def __init__(self, client: AsyncClient, consumer: DeliveringConsumer) -> None:
        self._client, self._consumer = client, consumer
        self.sent = 0
        self.read = set[int]()
        self.is_over = False

    async def send(self) -> None:
        while not self.is_over:
            await self._client.send(TOPIC, str(self.sent))
            self.sent += 1

    async def receive(self) -> None:
        """Receive messages until cancelled."""
        while True:
            message = await self._consumer.receive()
            assert message is not None
            self.read.add(int(message.body))
            await message.ack()

    async def goes_on(self) -> None:
        """Wait until more messages are sent and received."""
        sent, read = self.sent + _STEP, len(self.read) + _STEP
        await until(lambda: self.sent >= sent and len(self.read) >= read, f"{_STEP} messages more", 2 * _CALL_S)


def test_rolling_restart_by_the_page_fails_no_send_and_loses_no_message(tmp_path: Path) -> None:
    async def scenario(brokers: BrokerSet) -> None:
        operator, former = UpgradeOperator(brokers), brokers.master
        epoch = brokers.epoch
        async with connect(brokers.name_server.namesrv, timeout=_CALL_S) as client:
            await client.admin.create_topic(TOPIC, queues=1)
            async with client.consumer(GROUP, TOPIC, start="earliest") as consumer, asyncio.TaskGroup() as group:
                traffic = NumberTraffic(client, consumer)
                sending = group.create_task(traffic.send())
                receiving = group.create_task(traffic.receive())
                await traffic.goes_on()
                for line in procedure():
                    await asyncio.to_thread(operator.does, line)
                await traffic.goes_on()
                traffic.is_over = True
                await sending
                await until(lambda: len(traffic.read) == traffic.sent, "all is read", 2 * _CALL_S)
                receiving.cancel()
            assert operator.restarted == ["slave1", "slave2", "master"]
            assert brokers.master is not former
            assert brokers.epoch == epoch + 1, "nobody was elected whom the hand-over did not name"
            assert brokers.in_sync() == {member.broker for member in brokers.members}
            found = [int(message.body) async for message in client.reader(TOPIC)]
            # A send whose connection broke is repeated, so a message may be followed by its duplicate.
            assert [n for at, n in enumerate(found) if at == 0 or found[at - 1] != n] == list(range(traffic.sent))
            assert traffic.read == set(range(traffic.sent))

    with BrokerSet(tmp_path, replication="sync") as brokers:
        asyncio.run(scenario(brokers))
        for member in brokers.members:
            assert "Traceback" not in member.log()
