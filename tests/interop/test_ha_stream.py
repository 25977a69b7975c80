"""A neve log under an Apache RocketMQ 5.3.3 master in controller mode is replicated byte by byte."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.wire import Client
from broker.ha.epoch_file import FILE_NAME, encode_entries
from broker.ha.ha_client import FollowTarget
from tests.interop.controlled_set import TOPIC, broker_set, controller, in_sync, may_send, name_server
from tests.kit.broker.ha_member import B, HaMember
from tests.kit.clock.waiting import until, wait_until
from tests.kit.server.apache import ApacheMember
from tests.kit.server.neve import Serving

pytestmark = pytest.mark.servers

FILE_SIZE = 16 << 20  # The setting of Apache's members in these tests.
_CHANGE_S = 60.0


def send(master: ApacheMember, count: int, size: int = 100) -> None:
    with Client(master.broker) as client:
        for number in range(count):
            client.send(TOPIC, 0, b"%d" % number * size)


def log_of(master: ApacheMember) -> bytes:
    """Return the concatenated log files; unwritten space is zero."""
    files = sorted((master.directory / "store" / "commitlog").iterdir())
    return b"".join(path.read_bytes() for path in files)


def has_all(slave: HaMember, master: ApacheMember) -> bool:
    """Return whether the local log equals the master's log, with nothing above its end."""
    theirs, end = log_of(master), slave.store.max_physical_offset
    return end > 0 and not any(theirs[end : end + 8])


def own_log(slave: HaMember) -> bytes:
    log, at = bytearray(), slave.store.min_physical_offset
    while True:
        at, data = slave.store.log_bytes(at, 1 << 62, 1 << 30, padding=True)
        if not data:
            return bytes(log)
        log += data
        at += len(data)


def follow(slave: HaMember, master: ApacheMember, epoch: int) -> asyncio.Task[None]:
    host, _, port = master.ha.partition(":")
    target = FollowTarget(host=host, port=int(port), master_epoch=epoch, is_stock=True)
    return asyncio.create_task(slave.client().follow(target))


async def caught_up(slave: HaMember, master: ApacheMember) -> None:
    await until(lambda: has_all(slave, master), "all of Apache's log", _CHANGE_S)
    end = slave.store.max_physical_offset
    assert own_log(slave)[:end] == log_of(master)[:end]
    await until(lambda: slave.confirmed_to == end, "what it has confirmed", _CHANGE_S)


def becomes_master(server: Serving, master: ApacheMember) -> int:
    wait_until(lambda: in_sync(server) == {master.broker}, "a master", _CHANGE_S)
    wait_until(lambda: may_send(master), "a master that takes messages", _CHANGE_S)
    return int(broker_set(server)["masterEpoch"])


def test_apache_log_is_replicated_byte_by_byte_and_after_a_restart(tmp_path: Path) -> None:
    async def scenario(server: Serving, master: ApacheMember) -> None:
        slave = HaMember(B, commit_log_file_size=FILE_SIZE)
        epoch = await asyncio.to_thread(becomes_master, server, master)
        await asyncio.to_thread(send, master, 300)
        following = follow(slave, master, epoch)
        await caught_up(slave, master)
        await asyncio.to_thread(send, master, 50)
        await caught_up(slave, master)

        await asyncio.to_thread(send, master, 60, 200_000)  # Across the end of a file, with padding.
        await caught_up(slave, master)
        assert slave.store.max_physical_offset > FILE_SIZE

        await asyncio.to_thread(master.kill)
        await asyncio.to_thread(master.start)
        later = await asyncio.to_thread(becomes_master, server, master)
        assert later > epoch
        following.cancel()
        following = follow(slave, master, later)
        await asyncio.to_thread(send, master, 50)
        await caught_up(slave, master)
        following.cancel()
        theirs = (tmp_path / "a" / "store" / FILE_NAME).read_bytes()
        assert slave.epoch_file.path.name == FILE_NAME
        assert encode_entries(slave.epochs.entries()) == theirs
        assert len(slave.epochs) == 2
        assert slave.store.queues.max_offset(TOPIC, 0) >= 460

    with controller(tmp_path / "controller") as server, name_server(tmp_path / "namesrv") as names:
        master = ApacheMember(tmp_path / "a", namesrv=names.namesrv, controller=server.ready["controller"])
        with master:
            asyncio.run(scenario(server, master))
