"""Tests of a controller over its port: answers, notifications of brokers, and faults."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from broker.config import BrokerConfig
from broker.ha.replicas_manager import TICK_S
from controller.controller_config import ControllerConfig
from controller.controller_manager import PULSE_MS, STANDSTILL_MS, ControllerManager
from controller.decision import Report
from controller.etcd_controllers import LEASE_S, RENEW_S
from controller.other_controllers import NoOtherControllers
from controller.register import FileRegister, RegisterUnavailable, StoredSet
from controller.registers import register_of
from infra.clock import ManualClock
from infra.config.properties import ConfigError, load
from infra.disk.filesystem import RealDisk
from infra.loop.threads import SYSTEM_THREADS
from infra.net.etcd import WHOLE_S
from infra.process.startup import StartupError
from neve.cli import main as cli
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.signature import signed
from tests.kit.clock.waiting import until
from tests.unit.controller.brokers import FakeBroker, closed, controlling, in_sync

Code = ResponseCode


async def master_is(asker: FakeBroker, broker: FakeBroker) -> None:
    async def holds() -> bool:
        return (await asker.info()).ext.get("masterBrokerId") == str(broker.id)

    await until(holds, f"broker {broker.id} is master")


async def test_answers_have_rocketmq_fields_and_bodies(tmp_path: Path) -> None:
    async with controlling(tmp_path) as server:
        a, b = FakeBroker(server), FakeBroker(server)
        await a.open()
        await b.open()
        own = {"clusterName": "c", "brokerName": "b"}
        answer = await a.ask(RequestCode.CONTROLLER_GET_NEXT_BROKER_ID, own)
        assert (answer.code, answer.ext) == (Code.SUCCESS, {**own, "nextBrokerId": "1"})
        await a.join()
        await b.join()
        answer = await a.register()
        assert (answer.ext, answer.body) == (own, b'{"syncStateSet":[],"syncStateSetEpoch":0}')
        answer = await a.beat()
        assert (answer.code, answer.remark, answer.ext) == (Code.SUCCESS, "Heart beat success", {})
        roles = {"masterBrokerId": "1", "masterAddress": a.address, "masterEpoch": "1", "syncStateSetEpoch": "1"}
        answer = await a.elect()
        assert (answer.code, answer.ext) == (Code.SUCCESS, roles)
        group = f'{{"brokerAddrs":{{1:"{a.address}",2:"{b.address}"}},"brokerName":"b","cluster":"c"}}'
        assert answer.body == f'{{"brokerMemberGroup":{group},"syncStateSet":[1]}}'.encode()
        answer = await b.elect()
        assert (answer.code, answer.ext, answer.body) == (
            Code.CONTROLLER_MASTER_STILL_EXIST,
            roles,
            b'{"syncStateSet":[1]}',
        )
        answer = await a.alter(a, b)
        assert (answer.ext, answer.body) == (
            {"newSyncStateSetEpoch": "2"},
            b'{"syncStateSet":[1,2],"syncStateSetEpoch":2}',
        )
        answer = await b.register()
        assert (answer.ext, answer.body) == (
            {**own, **roles, "syncStateSetEpoch": "2"},
            b'{"syncStateSet":[1,2],"syncStateSetEpoch":2}',
        )
        answer = await b.info()
        del roles["syncStateSetEpoch"]
        more = {"members": "2"}  # a neve extension; RocketMQ ignores unknown fields
        assert (answer.ext, answer.body) == (roles | more, b'{"syncStateSet":[1,2],"syncStateSetEpoch":2}')
        answer = await b.ask(RequestCode.CONTROLLER_GET_SYNC_STATE_DATA, body=b'["b","unknown"]')
        replicas = ",".join(
            f'{{"alive":true,"brokerAddress":"{one.address}","brokerId":{one.id},"brokerName":"b"}}' for one in (a, b)
        )
        assert (
            answer.body
            == (
                f'{{"replicasInfoTable":{{"b":{{"inSyncReplicas":[{replicas}],"masterAddress":"{a.address}",'
                f'"masterBrokerId":1,"masterEpoch":1,"notInSyncReplicas":[],"syncStateSetEpoch":2}}}}}}'
            ).encode()
        )
        clean = {"brokerName": "b", "brokerControllerIdsToClean": "2", "isCleanLivingBroker": "true"}
        assert (await a.ask(RequestCode.CLEAN_BROKER_DATA, clean)).code == Code.SUCCESS
        assert (await b.register()).code == Code.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED
        await closed(a, b)


async def test_disconnected_master_is_replaced_and_new_master_notified(tmp_path: Path) -> None:
    async with controlling(tmp_path) as server:
        a, b = FakeBroker(server), FakeBroker(server)
        await in_sync(a, b)
        a.hang_up()
        await until(lambda: len(b.told) == 2, "b is told")
        told = b.told[-1]
        assert told.is_oneway
        assert told.ext == {
            "masterAddress": b.address,
            "masterBrokerId": "2",
            "masterEpoch": "2",
            "syncStateSetEpoch": "3",
        }
        assert told.body == b'{"syncStateSet":[2],"syncStateSetEpoch":3}'
        assert len(a.told) == 1  # its own election, and nothing after it disconnected
        await closed(a, b)


async def test_silent_master_is_replaced_and_disconnected(tmp_path: Path) -> None:
    clock = ManualClock()

    async with controlling(tmp_path, clock=clock) as server:
        a, b = FakeBroker(server), FakeBroker(server)
        await in_sync(a, b)
        clock.advance(9_000)
        await b.beat()
        await server.scan()
        assert (await b.info()).ext["masterBrokerId"] == "1"
        clock.advance(2_000)
        clock.set_wall(0)  # the wall clock does not matter
        await server.scan()
        assert (await b.info()).ext["masterBrokerId"] == "2"
        assert a.connection is not None
        await until(lambda: a.connection is not None and a.connection.is_closed, "a is hung up on")
        await closed(a, b)


async def test_controller_shutdown_does_not_trigger_an_election(tmp_path: Path) -> None:
    clock = ManualClock()

    async with controlling(tmp_path, clock) as server:
        a, b = FakeBroker(server), FakeBroker(server)
        await in_sync(a, b)
    async with controlling(tmp_path, clock) as server:
        c = await FakeBroker(server).open()
        answer = await c.info()
        assert (answer.ext["masterBrokerId"], answer.ext["masterEpoch"]) == ("1", "1")
        await closed(a, b, c)


async def test_restarted_controller_waits_for_heartbeat_of_master(tmp_path: Path) -> None:
    clock = ManualClock()

    async with controlling(tmp_path, clock) as server:
        a, b = FakeBroker(server), FakeBroker(server)
        await in_sync(a, b)
    async with controlling(tmp_path, clock) as server:
        b._controller = server
        await b.connect()
        await b.beat()
        await server.scan()
        assert (await b.elect()).code == Code.CONTROLLER_ELECT_MASTER_FAILED
        assert (await b.info()).ext["masterBrokerId"] == "1"
        clock.advance(10_000)
        await b.beat()
        await server.scan()
        assert (await b.info()).ext["masterBrokerId"] == "2"
        await closed(a, b)


async def test_suspended_controller_waits_for_brokers_it_could_not_hear(tmp_path: Path) -> None:
    clock = ManualClock()

    async with controlling(tmp_path, clock=clock) as server:
        a, b = FakeBroker(server), FakeBroker(server)
        await in_sync(a, b)
        clock.advance(3_600_000 + 30_000)  # its next scan is this late
        await b.beat()
        await server.scan()
        await server.scan()
        answer = await b.elect()
        assert answer.code == Code.CONTROLLER_ELECT_MASTER_FAILED
        assert "has had no heartbeat of [1]" in (answer.remark or "")
        await a.beat()
        await server.scan()
        assert (await a.info()).ext["masterEpoch"] == "1"
        clock.advance(10_001)  # a is dead now
        await b.beat()
        await server.scan()
        await master_is(b, b)
        await closed(a, b)


async def test_suspension_closes_no_connection_before_its_heartbeat_is_read(tmp_path: Path) -> None:
    """A request, the pulse and the scan may each be the first to detect the suspension."""
    clock = ManualClock()

    async with controlling(tmp_path, clock=clock, pulse_ms=600000) as server:
        a, b = FakeBroker(server), FakeBroker(server)
        await in_sync(a, b)
        clock.advance(700_000)
        await b.beat()
        await b.elect()
        await server.scan()
        assert (await a.beat()).code == Code.SUCCESS, "over the connection that it had"
        assert (await a.info()).ext["masterEpoch"] == "1"
        clock.advance(5_000)
        await b.beat()
        clock.advance(6_000)
        await server.scan()
        await master_is(b, b)
        await closed(a, b)


@pytest.mark.parametrize("old_id", [1, 2])
async def test_first_election_is_refused_if_old_brokers_report_epochs(tmp_path: Path, old_id: int) -> None:
    """The register was lost with all controllers, and a new broker connects before the old ones."""
    clock = ManualClock()

    async with controlling(tmp_path, clock=clock, first_ms=50) as server:
        newcomer = await FakeBroker(server, born={"incarnation": "n", "starts": "1", "process": "p"}).open()
        old = await FakeBroker(server, born={"incarnation": "o", "starts": "4", "process": "q"}).open()
        await newcomer.join()
        answer = await newcomer.elect()
        assert answer.code == Code.CONTROLLER_ELECT_MASTER_FAILED
        assert "has just started" in (answer.remark or "")
        old.id = old_id  # the newcomer has got id 1
        await old.beat(masterEpoch=5, syncStateSetEpoch=7)
        clock.advance(50)
        answer = await newcomer.elect()
        assert answer.code == Code.CONTROLLER_ELECT_MASTER_FAILED
        assert "knows epochs (5, 7)" in (answer.remark or "")
        await closed(newcomer, old)


class LoopClock(ManualClock):
    """A clock that follows the time of the event loop."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()


async def test_early_first_election_request_is_delayed_not_refused(tmp_path: Path) -> None:
    """A refused Apache broker would repeat its request only after five seconds."""

    async with controlling(tmp_path, clock=LoopClock(), first_ms=300) as server:
        broker = await FakeBroker(server).open()
        await broker.join()
        assert (await broker.elect()).code == Code.SUCCESS
        await closed(broker)


class StuckControllers(NoOtherControllers):
    """Other controllers to which a report never completes."""

    renew_s = 0.001

    def __init__(self) -> None:
        self.renewals = 0
        self.is_said = asyncio.Event()

    async def publish(self, name: str, living: Mapping[int, Report]) -> None:
        self.is_said.set()
        await asyncio.Event().wait()

    async def renew(self) -> None:
        self.renewals += 1


async def test_lease_is_renewed_while_a_report_to_other_controllers_hangs(tmp_path: Path) -> None:
    config = ControllerConfig(listen_port=0, bind_address="127.0.0.1", controller_store_path=str(tmp_path))
    register, _ = register_of(config, RealDisk())
    others = StuckControllers()
    server = ControllerManager(config, ManualClock(), RealDisk(), register, others)
    await server.start()
    a = await FakeBroker(server).open()
    await a.join()
    await others.is_said.wait()
    before = others.renewals
    await until(lambda: others.renewals > before + 2, "the lease is renewed")
    await closed(a)
    await server.shutdown()


def test_lease_is_longer_than_the_longest_renewal() -> None:
    assert RENEW_S + WHOLE_S < LEASE_S


async def test_regular_heartbeats_outlast_every_suspension_of_controller(tmp_path: Path) -> None:
    """A suspension too short to be detected ends before the default heartbeat timeout of a broker."""
    clock = ManualClock()
    config = BrokerConfig()
    beat = {"heartbeatTimeoutMills": config.controller_heart_beat_timeout_mills}
    period_ms = config.broker_heartbeat_interval + round(TICK_S * 1000)

    async with controlling(tmp_path, clock=clock, pulse_ms=PULSE_MS) as server:
        a, b = FakeBroker(server), FakeBroker(server)
        await in_sync(a, b)
        for standstill_ms in (STANDSTILL_MS, STANDSTILL_MS + 1, 2 * STANDSTILL_MS):
            for broker in (a, b):
                await broker.beat(**beat)
            for _ in range(period_ms // PULSE_MS):  # the next heartbeat is due when the suspension begins
                clock.advance(PULSE_MS)
                await server.scan()
            clock.advance(PULSE_MS + standstill_ms)
            await server.scan()  # before it has read the requests received meanwhile
            assert (await b.info()).ext["masterEpoch"] == "1"
        await closed(a, b)


async def test_candidates_are_queried_and_the_longest_log_wins(tmp_path: Path) -> None:
    async with controlling(tmp_path) as server:
        a, b, c = FakeBroker(server), FakeBroker(server), FakeBroker(server)
        await in_sync(a, b, c)
        b.epochs, b.end = [{"epoch": 1, "startOffset": 0, "endOffset": 500}], 500
        c.epochs, c.end = [{"epoch": 1, "startOffset": 0, "endOffset": 900}], 900
        await b.beat(maxOffset=1000)
        await c.beat(maxOffset=10)
        a.hang_up()
        await master_is(b, c)
        await closed(a, b, c)


async def test_candidate_with_unregistered_process_is_not_elected(tmp_path: Path) -> None:
    async with controlling(tmp_path) as server:
        born = [{"incarnation": f"i{n}", "starts": "1", "process": f"p{n}"} for n in range(3)]
        a, b, c = (FakeBroker(server, born=one) for one in born)
        await in_sync(a, b, c)
        b.answers_as = {**b.born, "process": "after the power was back"}
        b.end = 1000
        a.hang_up()
        await master_is(b, c)
        await closed(a, b, c)


@pytest.mark.parametrize("refuses", [True, False])
async def test_unreachable_candidate_is_not_elected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    monkeypatch.setattr("controller.calls.ASK_S", 0.2)

    async with controlling(tmp_path) as server:
        a, b, c = FakeBroker(server), FakeBroker(server), FakeBroker(server)
        await in_sync(a, b, c)
        b.end, c.end = 1000, 10
        if refuses:
            await b.close_port()
        b.is_frozen = True
        a.hang_up()
        await master_is(c, c)
        await closed(a, b, c)


async def test_elect_request_waits_for_first_heartbeat_of_its_sender(tmp_path: Path) -> None:
    async with controlling(tmp_path) as server:
        a = await FakeBroker(server).open()
        own = {"clusterName": "c", "brokerName": "b"}
        a.id = 1
        await a.ask(RequestCode.CONTROLLER_APPLY_BROKER_ID, {**own, "appliedBrokerId": 1, "registerCheckCode": "h:1;1"})
        await a.register()
        asked = asyncio.create_task(a.elect())
        await a.info()  # the elect request sent before has been received
        await a.beat()
        assert (await asked).code == Code.SUCCESS
        await closed(a)


async def test_new_incarnation_leaves_sync_state_set_and_master_is_notified(tmp_path: Path) -> None:
    async with controlling(tmp_path) as server:
        born = {"starts": "1", "minInSyncReplicas": "1"}
        a = FakeBroker(server, born={**born, "incarnation": "a", "process": "p"})
        b = FakeBroker(server, born={**born, "incarnation": "b", "process": "p"})
        await in_sync(a, b)
        b.born = {**b.born, "incarnation": "lost its memory"}
        answer = await b.register()
        assert json.loads(answer.body) == {"syncStateSet": [1], "syncStateSetEpoch": 3}
        await until(lambda: len(a.told) == 2, "the master is told")
        assert a.told[-1].ext["syncStateSetEpoch"] == "3"
        b.born = {**b.born, "process": "a copy"}
        assert (await b.register()).code == Code.CONTROLLER_INVALID_REQUEST
        assert (await b.beat()).code == Code.CONTROLLER_INVALID_REQUEST  # the registered process is alive
        await closed(a, b)


async def test_registration_with_wrong_check_code_is_refused(tmp_path: Path) -> None:
    async with controlling(tmp_path) as controller:
        a = await (await FakeBroker(controller).open()).join()
        assert (await a.register(registerCheckCode=f"{a.address};1")).code == Code.SUCCESS
        assert (await a.register(registerCheckCode="another:1;1")).code == Code.CONTROLLER_BROKER_ID_INVALID
        assert (await a.register()).code == Code.SUCCESS  # as an Apache broker does
        assert (await a.register(registerCheckCode="x" * 256)).code == Code.CONTROLLER_INVALID_REQUEST
        await closed(a)


async def test_heartbeat_of_another_cluster_is_refused(tmp_path: Path) -> None:
    async with controlling(tmp_path) as server:
        a, b = FakeBroker(server), FakeBroker(server)
        await in_sync(a, b)
        assert (await b.beat(clusterName="other", epoch=9)).code == Code.CONTROLLER_INVALID_REQUEST
        a.hang_up()
        await master_is(b, b)
        await closed(a, b)


async def test_unsigned_requests_are_refused_with_authentication(tmp_path: Path) -> None:
    root = '{"username":"root","password":"root-secret"}'
    async with controlling(
        tmp_path, authentication_enabled=True, authorization_enabled=True, init_authentication_user=root
    ) as server:
        a = await FakeBroker(server).open()
        own = {"clusterName": "c", "brokerName": "b"}
        changing: dict[int, dict[str, Any]] = {
            RequestCode.CONTROLLER_APPLY_BROKER_ID: {**own, "appliedBrokerId": 1, "registerCheckCode": "h:1;1"},
            RequestCode.CONTROLLER_REGISTER_BROKER: {**own, "brokerId": 1, "brokerAddress": "h:1"},
            RequestCode.BROKER_HEARTBEAT: {**own, "brokerId": 1, "brokerAddr": "h:1", "maxOffset": 0},
            RequestCode.CONTROLLER_ELECT_MASTER: {**own, "brokerId": 1, "designateElect": "true"},
            RequestCode.CLEAN_BROKER_DATA: {**own, "isCleanLivingBroker": "true"},
        }
        asked = [
            *changing,
            RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET,
            RequestCode.UPDATE_CONTROLLER_CONFIG,
            RequestCode.GET_CONTROLLER_CONFIG,
            RequestCode.CONTROLLER_GET_SYNC_STATE_DATA,
        ]
        for code in asked:
            assert (await a.ask(code, changing.get(code))).code == Code.NO_PERMISSION, code
        for code, ext in changing.items():
            fields = {name: str(value) for name, value in ext.items()}
            assert (await a.ask(code, signed("root", "root-secret", fields))).code == Code.SUCCESS, code
        await closed(a)


async def test_replica_info_counts_members_in_and_out_of_sync(tmp_path: Path) -> None:
    async with controlling(tmp_path) as server:
        a, b = FakeBroker(server), FakeBroker(server)
        await in_sync(a)
        await b.open()
        await b.join()
        info = await a.info()
        assert (info.ext["members"], json.loads(info.body)["syncStateSet"]) == ("2", [1])
        await closed(a, b)


async def test_broker_of_frozen_set_registers_and_can_be_designated(tmp_path: Path) -> None:
    async with controlling(tmp_path) as server:
        a, b = FakeBroker(server), FakeBroker(server)
        await in_sync(a, b)
        await b.beat(epoch=9)
        await server.scan()
        b.hang_up()
        await b.connect()
        answer = await b.register()
        assert (answer.code, answer.body) == (Code.SUCCESS, b'{"syncStateSet":[],"syncStateSetEpoch":0}')
        assert "masterBrokerId" not in answer.ext
        await b.beat(epoch=9)
        answer = await a.elect(brokerId=2, designateElect="true")
        assert (answer.code, answer.ext["masterEpoch"]) == (Code.SUCCESS, "10")
        await closed(a, b)


async def test_repeated_alteration_with_request_id_returns_same_answer(tmp_path: Path) -> None:
    async with controlling(tmp_path) as server:
        a, b = FakeBroker(server), FakeBroker(server)
        await in_sync(a, b)
        ext = {"brokerName": "b", "masterBrokerId": 1, "masterEpoch": 1, "requestId": "r"}
        body = b'{"syncStateSet":[1],"syncStateSetEpoch":2}'
        answers = [await a.ask(RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET, ext, body) for _ in range(2)]
        assert [(one.code, one.ext) for one in answers] == [(Code.SUCCESS, {"newSyncStateSetEpoch": "3"})] * 2
        await closed(a, b)


@pytest.mark.parametrize(
    ("code", "ext", "body", "expected"),
    [
        (RequestCode.BROKER_HEARTBEAT, {"clusterName": "c", "brokerName": "b"}, b"", Code.CONTROLLER_INVALID_REQUEST),
        (RequestCode.CONTROLLER_GET_NEXT_BROKER_ID, {"clusterName": "c"}, b"", Code.SYSTEM_ERROR),
        (
            RequestCode.CONTROLLER_GET_NEXT_BROKER_ID,
            {"clusterName": "c", "brokerName": "b" * 256},
            b"",
            Code.CONTROLLER_INVALID_REQUEST,
        ),
        (RequestCode.CONTROLLER_GET_REPLICA_INFO, {"brokerName": "b"}, b"", Code.CONTROLLER_BROKER_METADATA_NOT_EXIST),
        (
            RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET,
            {"brokerName": "b", "masterBrokerId": "1", "masterEpoch": "1"},
            b'{"syncStateSet":[1,"x"],"syncStateSetEpoch":1}',
            Code.SYSTEM_ERROR,
        ),
        (
            RequestCode.CONTROLLER_REGISTER_BROKER,
            {"clusterName": "c", "brokerName": "b", "brokerId": "1", "brokerAddress": "h:1", "incarnation": "i" * 65},
            b"",
            Code.CONTROLLER_INVALID_REQUEST,
        ),
        (
            RequestCode.CONTROLLER_GET_SYNC_STATE_DATA,
            {},
            json.dumps(["b"] * 1001).encode(),
            Code.CONTROLLER_INVALID_REQUEST,
        ),
        (1014, {}, b"", Code.REQUEST_CODE_NOT_SUPPORTED),
        (RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "t"}, b"", Code.REQUEST_CODE_NOT_SUPPORTED),
    ],
)
async def test_invalid_request_is_refused_and_connection_stays_open(
    tmp_path: Path, code: int, ext: dict[str, str], body: bytes, expected: Code
) -> None:
    async with controlling(tmp_path) as server:
        a = await FakeBroker(server).open()
        assert (await a.ask(code, ext, body)).code == expected
        assert (await a.ask(RequestCode.CONTROLLER_GET_METADATA_INFO)).code == Code.SUCCESS
        await closed(a)


HOSTILE = [
    "",
    "-1",
    "0",
    "2",
    "9" * 25,
    str(2**63 - 1),
    str(-(2**63)),
    "1;2;1",
    "a;b",
    "é\n\x00",
    "x" * 300,
    "true",
    "{}",
]
FIELDS = {
    "clusterName": "c",
    "brokerName": "b",
    "brokerId": "1",
    "brokerAddr": "h:1",
    "brokerAddress": "h:1",
    "appliedBrokerId": "3",
    "registerCheckCode": "h:1;1",
    "masterBrokerId": "1",
    "masterEpoch": "1",
    "syncStateSetEpoch": "1",
    "designateElect": "true",
    "brokerControllerIdsToClean": "7",
    "heartbeatTimeoutMills": "1000",
    "epoch": "0",
    "maxOffset": "0",
    "electionPriority": "1",
    "incarnation": "i",
    "starts": "1",
    "process": "p",
    "minInSyncReplicas": "1",
    "requestId": "r",
}
BODIES = [
    b"",
    b"[]",
    b"{}",
    b"null",
    b'{"syncStateSet":[9223372036854775807],"syncStateSetEpoch":1}',
    b"\xff",
    b"[" * 9999,
]


async def test_hostile_requests_are_answered_and_register_stays_readable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with controlling(tmp_path, enable_elect_unclean_master=True) as server:
        a, b = FakeBroker(server), FakeBroker(server)
        await in_sync(a, b)
        asking = sorted(server.codes)
        for name, value in [(name, value) for name in FIELDS for value in HOSTILE]:
            for code in asking:
                answer = await a.ask(code, {**FIELDS, name: value}, BODIES[len(name + value) % len(BODIES)])
                assert not (answer.remark or "").startswith(("AssertionError", "KeyError", "ValueError", "TypeError"))
        for body in BODIES:
            for code in asking:
                await a.ask(code, FIELDS, body)
        await closed(a, b)
    assert [record for record in caplog.records if "request failed" in record.message] == []
    async with controlling(tmp_path):
        pass  # the start proves that the register is readable


class FullDisk(RealDisk):
    """A disk that rejects writes while `is_full` is set."""

    def __init__(self) -> None:
        self.is_full = False

    def write_atomic(self, path: Path, data: bytes) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "full")
        super().write_atomic(path, data)


async def test_election_on_full_disk_is_refused_and_not_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk()
    monkeypatch.setattr("tests.unit.controller.brokers.RealDisk", lambda: disk)

    async with controlling(tmp_path) as server:
        a, b = FakeBroker(server), FakeBroker(server)
        await in_sync(a, b)
        await until(lambda: len(a.told) == 1, "a is told")
        disk.is_full = True
        answer = await a.elect(brokerId=2, designateElect="true")
        assert answer.code == Code.SYSTEM_ERROR
        assert "full" in (answer.remark or "")
        assert (await a.info()).ext["masterBrokerId"] == "1"
        disk.is_full = False
        assert (await a.elect(brokerId=2, designateElect="true")).code == Code.SUCCESS
        await until(lambda: [one.ext["masterBrokerId"] for one in a.told] == ["1", "2"], "a is told of b alone")
        await closed(a, b)


async def test_metadata_has_dialled_or_configured_address(tmp_path: Path) -> None:
    async def told(server: ControllerManager) -> RemotingCommand:
        a = await FakeBroker(server).open()
        answer = await a.ask(RequestCode.CONTROLLER_GET_METADATA_INFO)
        await closed(a)
        return answer

    async with controlling(tmp_path / "a") as server:
        address = f"127.0.0.1:{server.port}"
        assert (await told(server)).ext == {
            "group": "neve",
            "controllerLeaderId": "n0",
            "controllerLeaderAddress": address,
            "isLeader": "true",
            "knowsIncarnations": "true",
            "peers": f"n0:{address};",
        }
    async with controlling(tmp_path / "b", controller_dleger_peers="n0-host:0") as server:
        ext = (await told(server)).ext
        assert (ext["controllerLeaderAddress"], ext["peers"]) == ("host:0", "n0:host:0;")


@pytest.mark.parametrize("peers", ["n0-a:9878;n1-b:9878", "n1-a:9878", "n0-a", "n0-:1", "a:9878"])
def test_several_controllers_without_shared_register_are_refused(peers: str) -> None:
    config = load(ControllerConfig, None, [f"controllerDLegerPeers={peers}"])
    with pytest.raises(ConfigError, match="controllerDLegerPeers"):
        assert config.port


def test_controllers_with_shared_register_list_their_peers() -> None:
    shared = ["controllerDLegerPeers=n0-a:9878;n1-b:9879", "registerUrl=etcd://h/neve"]
    for own, port in (("n0", 9878), ("n1", 9879)):
        config = load(ControllerConfig, None, [*shared, f"controllerDLegerSelfId={own}"])
        assert config.port == port
        assert [f"{peer.id}:{peer.host}:{peer.port}" for peer in config.peers] == ["n0:a:9878", "n1:b:9879"]
    with pytest.raises(ConfigError, match="controllerDLegerPeers"):
        assert load(ControllerConfig, None, [*shared, "controllerDLegerSelfId=n2"]).port


def test_peers_separated_by_commas_are_refused() -> None:
    shared = ["controllerDLegerPeers=n0-a:9878,n1-b:9879", "registerUrl=etcd://h/neve"]
    with pytest.raises(ConfigError, match="separate several with ;"):
        assert load(ControllerConfig, None, [*shared, "controllerDLegerSelfId=n0"]).port


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"register_url": "http://h/neve"}, "expected etcd://"),
        ({"register_url": "etcd://h"}, "expected a prefix"),
        ({"register_url": "etcd://h,h:2379/neve"}, "named twice"),
        ({"register_url": "etcd://h:x/neve"}, "is not host or host:port"),
        ({"register_url": "etcd://user@h/neve"}, "is not host or host:port"),
        ({"register_url": "etcd://h/neve", "etcd_tls_cert_path": "/c.pem"}, "belong together"),
        (
            {
                "register_url": "etcd://h/n",
                "etcd_tls_enable": True,
                "etcd_tls_cert_path": "/c",
                "etcd_tls_key_path": "/k",
            },
            "etcdTlsCertPath=/c",
        ),
    ],
)
def test_invalid_register_settings_stop_the_start(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(StartupError, match=why):
        register_of(ControllerConfig(**settings), RealDisk())


class Away(FileRegister):
    """A register that is unavailable while `is_away` is set."""

    is_away = False

    async def get(self, name: str) -> StoredSet:
        if self.is_away:
            raise RegisterUnavailable(None, "away")
        return await super().get(name)


async def test_heartbeats_during_register_outage_keep_brokers_alive(tmp_path: Path) -> None:
    register, clock = Away(tmp_path / "register.json", RealDisk(), SYSTEM_THREADS), ManualClock()

    async with controlling(tmp_path, clock=clock, register=register) as server:
        a, b = FakeBroker(server), FakeBroker(server)
        await in_sync(a, b)
        register.is_away = True
        for _ in range(3):
            clock.advance(8_000)
            for broker in (a, b):
                assert (await broker.beat()).code == Code.SUCCESS
            assert (await a.info()).code == Code.SYSTEM_ERROR
            with pytest.raises(RegisterUnavailable):
                await server.scan()
        register.is_away = False
        await server.scan()
        info = await a.info()
        assert (info.ext["masterBrokerId"], info.ext["masterEpoch"]) == ("1", "1")
        await closed(a, b)


async def test_operator_changes_only_live_settings(tmp_path: Path) -> None:
    async with controlling(tmp_path) as server:
        a = await FakeBroker(server).open()
        for text, expected in (
            ("enableElectUncleanMaster=true", Code.SUCCESS),
            ("listenPort=1", Code.NO_PERMISSION),
            ("controllerStorePath=/", Code.NO_PERMISSION),
            ("rocketmqHome=/", Code.NO_PERMISSION),
            ("nonsense=1", Code.NO_PERMISSION),
        ):
            assert (await a.ask(RequestCode.UPDATE_CONTROLLER_CONFIG, body=text.encode())).code == expected, text
        answer = await a.ask(RequestCode.GET_CONTROLLER_CONFIG)
        assert b"enableElectUncleanMaster=true\n" in answer.body
        assert b"listenPort=0\n" in answer.body
        await closed(a)


async def test_role_change_notifications_follow_their_setting(tmp_path: Path) -> None:
    async with controlling(tmp_path, notify_broker_role_changed=False) as server:
        a, b = FakeBroker(server), FakeBroker(server)
        await in_sync(a, b)
        await a.ask(RequestCode.UPDATE_CONTROLLER_CONFIG, body=b"notifyBrokerRoleChanged=true")
        await a.elect(brokerId=2, designateElect="true")
        await until(lambda: bool(a.told and b.told), "both are told")
        assert [one.ext["masterEpoch"] for one in (*a.told, *b.told)] == ["2", "2"]
        await closed(a, b)


def test_doctor_checks_a_controller_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("controller.conf", "c.properties"):
        path = tmp_path / name
        path.write_text(f"listenPort=0\ncontrollerStorePath={tmp_path}/c\nprocessReadEvent=true\n")
        assert cli.run(["doctor", "-c", str(path)]) == 0
        said = capsys.readouterr().out
        assert "a controller" in said
        assert "processReadEvent has no effect" in said
        path.write_text(f"controllerStorePath={tmp_path}/c\ncontrollerDLegerPeers=n0-a:1;n1-b:1\n")
        assert cli.run(["doctor", "-c", str(path)]) == 1
        assert "each elect a master of their own" in capsys.readouterr().out
