"""Members of a broker set in one process: the effect of a change of role on logs, tables and role-dependent state."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bench.wire import send_ext
from broker.broker_controller import BrokerController
from broker.ha.confirm import Confirm, HeldBack
from broker.ha.controller_calls import ControllerCall
from broker.ha.frames import (
    Hello,
    MasterFrames,
    SlaveHandshake,
    StreamRefusal,
    encode_ack,
    encode_hello,
    encode_slave_handshake,
)
from broker.ha.member import State
from broker.ha.member_events import SavedMember
from broker.ha.member_file import MemberFile
from broker.ha.member_status import faults, status
from broker.ha.replicas_manager import SwitchoverRefused
from broker.metadata.slave_synchronize import Master, SlaveSynchronize
from broker.role import Role
from infra.disk.filesystem import RealDisk
from infra.net.tls import client_context
from infra.objects.open import open_store
from infra.objects.store import StoreUnavailable
from neve.archive.catalog.journal_reader import read_catalog
from neve.errors import NeveError
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from tests.kit.broker.in_process import ask, offload, running, send
from tests.kit.broker.set_in_process import BrokerMember, Set, broker_set
from tests.kit.clock.waiting import until
from tests.kit.server.security import make_certificate
from tests.unit.broker.role_changes import TOPIC, bodies, hand_to, put, shows
from tiered.journal.ownership import Ownership, ResumePoint


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def hand_overs(member: BrokerMember, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the targets of the member's successful switchovers from now on."""
    replicas, taken = member.replicas, list[int]()
    hand_over = replicas.switch_over

    async def noted(target: int | None = None) -> int:
        taken.append(await hand_over(target))
        return taken[-1]

    monkeypatch.setattr(replicas, "switch_over", noted)
    return taken


async def test_messages_are_on_all_members_and_a_replaced_master_follows(tmp_path: Path) -> None:
    async with broker_set(tmp_path) as brokers:
        former = await brokers.master()
        slaves = await brokers.slaves()
        await put(former, b"1", b"2")
        for slave in slaves:
            await shows(slave, b"1", b"2")
        await until(lambda: {slave.role for slave in slaves} == {Role.SLAVE_IN_SYNC}, "they hear that they are")
        await hand_to(brokers, slaves[0])
        await until(lambda: former.state is State.SLAVE, "the former master follows")
        assert former.broker.store.end.is_following
        await put(slaves[0], b"3")
        for member in brokers.members:
            await shows(member, b"1", b"2", b"3")
        connection = await former.connect()
        refused = await ask(connection, Code.SEND_MESSAGE_V2, b"x", **send_ext(TOPIC, 0))
        assert refused.code == ResponseCode.SYSTEM_BUSY
        connection.close()


async def test_next_master_has_the_tables_and_pending_deliveries(tmp_path: Path) -> None:
    """A topic, delayed messages, and a group's committed offset."""

    async with broker_set(tmp_path) as brokers:
        former = await brokers.master()
        (heir, _) = await brokers.slaves()
        await put(former, b"delayed", properties="DELAY\x013\x02")
        await put(former, b"timer", properties="TIMER_DELAY_MS\x0115000\x02")
        await put(former, b"now")
        connection = await former.connect()
        group = b'{"groupName":"g"}'
        answer = await ask(connection, Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, group)
        assert answer.code == ResponseCode.SUCCESS
        answer = await ask(
            connection, Code.UPDATE_CONSUMER_OFFSET, consumerGroup="g", topic=TOPIC, queueId=0, commitOffset=1
        )
        assert answer.code == ResponseCode.SUCCESS
        connection.close()
        await until(lambda: heir.broker.offsets.query("g", TOPIC, 0) == 1, "the position is polled")
        await hand_to(brokers, heir)
        assert TOPIC in heir.broker.topics.topics
        assert "g" in heir.broker.groups.groups
        assert heir.broker.offsets.query("g", TOPIC, 0) == 1
        assert len(heir.broker.timers) == 1
        await until(lambda: len(former.broker.timers) == 0, "the former master forgets it")
        await until(lambda: sorted(bodies(heir)) == [b"delayed", b"now", b"timer"], "both come from the new master")


async def test_deleted_topics_queues_stay_until_the_deletion_is_confirmed(tmp_path: Path) -> None:
    """Otherwise a replaced master would lack messages that the other members have."""

    async with broker_set(tmp_path, "flushDiskType=SYNC_FLUSH") as brokers:
        former = await brokers.master()
        slaves = await brokers.slaves()
        await put(former, b"1", b"2")
        for slave in slaves:
            await shows(slave, b"1", b"2")
        for slave in slaves:
            await slave.stop()
        connection = await former.connect()
        answer = await ask(connection, Code.DELETE_TOPIC_IN_BROKER, topic=TOPIC)
        assert answer.code != ResponseCode.SUCCESS, "nobody else has heard of it"
        assert former.broker.store.queues.names_of(TOPIC) == [0]
        connection.close()
        await former.stop()
        for slave in slaves:
            await slave.start()
        master = await brokers.master()
        assert bodies(master) == [b"1", b"2"]
        await put(master, b"3")
        await former.start()
        await until(lambda: bodies(former) == [b"1", b"2", b"3"], "the former master has all of it")
        assert TOPIC in former.broker.topics.topics


async def offloading(broker: BrokerController, is_done: Callable[[], bool]) -> None:
    """Run archive rounds until a condition is met."""

    async def round_is_the_last() -> bool:
        await offload(broker)
        return is_done()

    await until(round_is_the_last, "the archive has it")


async def archived(brokers: Set) -> None:
    """Archive the whole topic and evict it from its master."""
    master = await brokers.master()
    await brokers.slaves()
    store = master.broker.store
    # once all members have fsynced it
    await offloading(master.broker, lambda: store.queues.min_offset(TOPIC, 0) == store.queues.max_offset(TOPIC, 0))


async def test_archive_gets_a_deletion_only_once_the_set_has_confirmed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A master that is isolated from its slaves can still reach the store.

    The next master still has the archived topic.
    """
    url = f"dir:{tmp_path / 'bucket'}"

    async with broker_set(tmp_path, f"storeUrl={url}", "slaveTimeout=300") as brokers:
        former = await brokers.master()
        await put(former, b"1", b"2")
        await archived(brokers)
        monkeypatch.setattr(Confirm, "reported", lambda *_, **__: True)  # their reports are lost from here on
        connection = await former.connect()
        answer = await ask(connection, Code.DELETE_TOPIC_IN_BROKER, topic=TOPIC)
        assert answer.code == ResponseCode.FLUSH_SLAVE_TIMEOUT
        connection.close()
        catalog = read_catalog(open_store(url), "broker-a")
        assert (catalog.recorded_minimum(TOPIC, 0), catalog.max_offset(TOPIC, 0)) == (0, 2)
        await asyncio.to_thread(former.broker.archive.lifecycle.expire.run)
        assert read_catalog(open_store(url), "broker-a").recorded_minimum(TOPIC, 0) == 0


@pytest.mark.parametrize(
    ("replication", "flush"), [("sync", "ASYNC_FLUSH"), ("async", "ASYNC_FLUSH"), ("async", "SYNC_FLUSH")]
)
async def test_confirmed_deletion_is_in_the_archive_before_it_is_answered(
    tmp_path: Path, replication: str, flush: str
) -> None:
    """Otherwise a topic created again would have the old messages."""
    url = f"dir:{tmp_path / 'bucket'}"

    settings = (f"storeUrl={url}", f"flushDiskType={flush}")
    async with broker_set(tmp_path, *settings, replication=replication) as brokers:
        master = await brokers.master()
        await put(master, b"1", b"2")
        await archived(brokers)
        connection = await master.connect()
        assert (await ask(connection, Code.DELETE_TOPIC_IN_BROKER, topic=TOPIC)).code == ResponseCode.SUCCESS
        connection.close()
        assert master.broker.store.queues.names_of(TOPIC) == []
        assert read_catalog(open_store(url), "broker-a").recorded_minimum(TOPIC, 0) == 2


async def test_segment_end_that_a_job_appends_is_replicated(tmp_path: Path) -> None:
    """No message is sent meanwhile."""

    async with broker_set(tmp_path, f"storeUrl=dir:{tmp_path / 'bucket'}", members=2) as brokers:
        master = await brokers.master()
        (slave,) = await brokers.slaves()
        await put(master, b"1")
        await offloading(master.broker, lambda: master.end % (1 << 20) == 0)
        await until(lambda: slave.end == master.end, "it has the end, too")
        await until(lambda: master.broker.store.visibility.confirmed == master.end, "it is confirmed")


async def test_slave_keeps_the_archives_log_name_across_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that lost the name could not archive.

    It may be elected before it has read the journal, and while the log and the archive have nothing in common to prove
    that they belong together.
    """
    monkeypatch.setattr(Ownership, "_follow_master", lambda _: None)

    async with broker_set(tmp_path, f"storeUrl=dir:{tmp_path / 'bucket'}") as brokers:
        former = await brokers.master()
        slaves = await brokers.slaves()
        await until(lambda: online(former), "it has the archive")
        for member in (*slaves, former):
            await member.stop()
        for member in slaves:
            await member.start()
        master = await brokers.master()
        await until(lambda: online(master), "it has the archive")


async def test_member_that_led_above_the_archive_lacks_nothing_after_a_restart(tmp_path: Path) -> None:
    """The first master of a set is elected without an in-sync predecessor."""

    async with broker_set(tmp_path, members=2) as brokers:
        master = await brokers.master()
        (slave,) = await brokers.slaves()
        await until(lambda: not on_disk(master).may_lack_archived, "it has led above it")
        await until(lambda: not on_disk(slave).may_lack_archived, "it was taken in")
        assert on_disk(master).master_epoch > 0


async def elect_uncleanly(brokers: Set, chosen: BrokerMember, *gone: BrokerMember) -> None:
    """Elect a member uncleanly, as an operator does: remove the lost members, then designate one of the others."""
    of_set = {"clusterName": "DefaultCluster", "brokerName": "broker-a"}
    ids = ";".join(str(member.replicas.member.broker_id) for member in gone)
    member = chosen.replicas.member  # a slave already if it started before the controller missed the master
    waits = {State.WAITING, State.SLAVE}
    await until(lambda: chosen.state in waits and member.record.view.master is None, "it knows of no master")
    for code, ext in (
        (Code.CLEAN_BROKER_DATA, {"brokerControllerIdsToClean": ids, "isCleanLivingBroker": "true"}),
        (Code.CONTROLLER_ELECT_MASTER, {"brokerId": str(chosen.replicas.member.broker_id), "designateElect": "true"}),
    ):
        answer = await chosen.replicas.requests.controllers.ask(ControllerCall(code, of_set | ext))
        assert answer.code == ResponseCode.SUCCESS, answer.remark
    await until(lambda: chosen.state is State.MASTER, "it is elected")


@pytest.mark.parametrize("settles", [False, True])
async def test_unclean_election_never_reassigns_an_archived_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settles: bool
) -> None:
    """Archived offsets stay unique although the store is away during the election.

    The elected member lacks archived messages and takes in a slave. It dies before the store is back, or afterwards
    and before a message reaches the queue that it raised.
    """
    away, resume_log_above = asyncio.Event(), Ownership.resume_above

    def of_a_store_that_may_be_away(ownership: Ownership) -> ResumePoint:
        if away.is_set():
            raise StoreUnavailable("the store is away")
        return resume_log_above(ownership)

    monkeypatch.setattr(Ownership, "resume_above", of_a_store_that_may_be_away)
    url = f"dir:{tmp_path / 'bucket'}"

    async with broker_set(tmp_path, f"storeUrl={url}", replication="sync-available") as brokers:
        former = await brokers.master()
        lacking, heir = await brokers.slaves()
        await put(former, b"1", b"2")
        for slave in (lacking, heir):
            await shows(slave, b"1", b"2")
            await until(lambda slave=slave: not on_disk(slave).may_lack_archived, "it is told")  # type: ignore[misc]
            await slave.stop()
        await until(lambda: brokers.in_sync(former) == 1, "it goes on alone")
        await put(former, b"3", b"4", b"5")
        store = former.broker.store
        await offloading(former.broker, lambda: store.queues.min_offset(TOPIC, 0) == 5)
        await former.stop()
        away.set()
        for slave in (lacking, heir):
            await slave.start()
        await elect_uncleanly(brokers, lacking, former)
        await until(lambda: brokers.in_sync(lacking) == 2, "it takes a slave in before it leads")
        assert not lacking.leads
        if settles:
            away.clear()
            await until(lambda: lacking.leads, "it leads once the store is back")
            reign = lacking.replicas.term.leads_in
            await until(lambda: on_disk(heir).settled_in == reign, "its slave is told")
            assert heir.broker.store.queues.next_offset(TOPIC, 0) == 5, "that raises what it raised"
            assert heir.broker.store.queues.min_offset(TOPIC, 0) == 5, "and reads from the archive what lies below"
            away.set()  # the next one does not need it
            await heir.stop()
            await heir.start()
            await until(lambda: brokers.in_sync(lacking) == 2, "it is in sync again")
        await until(lambda: heir.replicas.member.record.is_in_sync, "it knows that it is in sync")
        assert heir.replicas.member.record.may_lack_archived is not settles
        with monkeypatch.context() as patch:
            patch.setattr(lacking.replicas, "switch_over", refuse)
            await lacking.stop()
        await until(lambda: heir.state is State.MASTER, "the slave is elected")
        if not settles:
            assert not heir.leads
            away.clear()
        await put(heir, b"6")
        assert (heir.broker.store.queues.min_offset(TOPIC, 0), heir.broker.store.queues.max_offset(TOPIC, 0)) == (5, 6)


async def refuse(target: int | None = None) -> int:
    raise SwitchoverRefused("it dies")


async def test_registered_members_include_one_that_is_away(tmp_path: Path) -> None:
    """An alert relies on the number while the member is away."""

    async with broker_set(tmp_path, members=2, replication="sync-available") as brokers:
        master = await brokers.master()
        (slave,) = await brokers.slaves()
        await slave.stop()
        await until(lambda: brokers.in_sync(master) == 1, "it goes on alone")
        await until(lambda: master.replicas.requests.registered == 2, "it is a member still")


def on_disk(member: BrokerMember) -> SavedMember:
    """Return the state that the member's next process will load."""
    file = MemberFile(RealDisk(), member.root)
    file.load()
    return file.saved


def online(member: BrokerMember) -> bool:
    journal = member.broker.archive.journal
    return journal is not None and journal.ownership.online


async def test_confirmed_deletion_drops_the_queues_on_all_members(tmp_path: Path) -> None:
    async with broker_set(tmp_path) as brokers:
        master = await brokers.master()
        await brokers.slaves()
        await put(master, b"1")
        connection = await master.connect()
        assert (await ask(connection, Code.DELETE_TOPIC_IN_BROKER, topic=TOPIC)).code == ResponseCode.SUCCESS
        connection.close()
        stores = [member.broker.store for member in brokers.members]
        await until(lambda: not any(store.queues.names_of(TOPIC) for store in stores), "they are gone")
        await put(master, b"again")
        assert master.broker.store.queues.max_offset(TOPIC, 0) == 2, "no offset is given twice"


async def test_switchover_is_immediate_and_a_stopping_master_makes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with broker_set(tmp_path) as brokers:
        former = await brokers.master()
        slaves = await brokers.slaves()
        await put(former, b"1")
        (heir, other) = slaves
        with pytest.raises(SwitchoverRefused, match="is not an in-sync slave"):
            await former.replicas.switch_over(9)
        assert former.leads
        target = heir.replicas.member.broker_id
        assert await former.replicas.switch_over(target) == target
        assert not former.leads
        await until(lambda: heir.leads, "the one that was named leads")
        with pytest.raises(SwitchoverRefused, match="not the master"):
            await former.replicas.switch_over()
        await put(heir, b"2")
        assert await brokers.slaves()
        epoch = heir.replicas.member.record.view.master_epoch
        handed = hand_overs(heir, monkeypatch)
        await heir.stop()
        (taken,) = handed
        assert taken in {one.replicas.member.broker_id for one in (former, other)}
        await until(lambda: former.leads or other.leads, "another one leads")
        master = await brokers.master()
        assert master.replicas.member.record.view.master_epoch == epoch + 1, "it was elected before the former was gone"
        await shows(master, b"1", b"2")


async def test_standalone_broker_becomes_the_first_master_of_a_set_with_its_log(tmp_path: Path) -> None:
    async with running(tmp_path / "1") as (_, connection):
        await send(connection, TOPIC, b"before there was a set")
    async with broker_set(tmp_path) as brokers:
        first = brokers.members[0]
        await until(lambda: first.state is State.WAITING, "nobody elects by itself over a log that is not empty")
        await hand_to(brokers, first)
        for slave in await brokers.slaves():
            await shows(slave, b"before there was a set")


async def test_new_members_of_an_existing_set_lead_only_when_designated(tmp_path: Path) -> None:
    """The controller lost its state, and all members with the set's log are away."""

    async with broker_set(tmp_path, "brokerSetExists=true", members=2) as brokers:
        for member in brokers.members:
            await until(
                lambda member=member: [one.name for one in faults(member.replicas)] == ["broker set: not found"],  # type: ignore[misc]
                "it says what it waits for",
            )
        (first, second) = brokers.members
        await until(lambda: first.replicas.requests.sent["AskReplicaInfo"] >= 4, "its controller may elect by now")
        assert {member.replicas.requests.sent["Elect"] for member in brokers.members} == {0}
        await hand_to(brokers, first)
        await put(first, b"1")
        await shows(second, b"1")
        assert faults(first.replicas) == []


async def test_troubles_of_a_member_are_on_its_status_pages(tmp_path: Path) -> None:
    async with broker_set(tmp_path, members=2) as brokers:
        master = await brokers.master()
        (slave,) = await brokers.slaves()
        assert faults(master.replicas) == []
        await until(lambda: faults(slave.replicas) == [], "it follows")
        assert status(slave.replicas)["master"] == master.replicas.member.broker_id
        await slave.stop()
        await put_unconfirmed(master)
        (trouble,) = faults(master.replicas)
        assert trouble.why.startswith(HeldBack.AWAY.value)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(master.broker.archive, "unsettled", "the store is away")
            assert "the store is away" in [trouble.why for trouble in faults(master.replicas)]


async def test_members_authenticate_if_users_do(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "set")
    security = (
        "authenticationEnabled=true",
        'initAuthenticationUser={"username":"root","password":"root-secret"}',
        'innerClientAuthenticationCredentials={"accessKey":"member","secretKey":"members-secret"}',
        "tlsServerMode=enforcing",
        "tlsEnable=true",
        *(f"{name}={path}" for name, path in (("tlsCertPath", certificate), ("tlsKeyPath", key))),
        f"tlsTrustCertPath={certificate}",
    )

    async with broker_set(tmp_path, security=security) as brokers:
        master = await brokers.master()
        slaves = await brokers.slaves()
        master.broker.topics.create_plain("secret", 1)
        await until(lambda: all("secret" in slave.broker.topics.topics for slave in slaves), "it comes with the log")
        host, port = "127.0.0.1", master.replicas.term.ha_service.port
        member = replace(master.replicas.term.ha_service.leadership.own, member_id=9, nonce="n")  # type: ignore[union-attr]
        reader, writer = await asyncio.open_connection(host, port, ssl=client_context(str(certificate)))
        writer.write(encode_hello(member) + encode_slave_handshake(SlaveHandshake(9)) + encode_ack(0, 0))
        frames = MasterFrames().receive_data(await reader.read())
        assert [type(frame) for frame in frames] == [Hello, StreamRefusal], "and nothing of the log"
        writer.close()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(encode_hello(member))
        with suppress(ConnectionResetError):
            assert await reader.read() == b"", "nor is plain text spoken"
        writer.close()


async def put_unconfirmed(master: BrokerMember) -> None:
    connection = await master.connect()
    answer = await ask(connection, Code.SEND_MESSAGE_V2, b"alone", **send_ext(TOPIC, 0))
    assert answer.code == ResponseCode.FLUSH_SLAVE_TIMEOUT
    connection.close()


@contextmanager
def images_wait(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.Event]:
    """Yield an event that all fetches of a master's tables wait for."""
    may_come = asyncio.Event()
    asks = SlaveSynchronize._ask_image

    async def ask_image(self: SlaveSynchronize, master: Master) -> None:
        if not may_come.is_set():
            raise NeveError(None, "not yet")
        await asks(self, master)

    with monkeypatch.context() as patch:
        patch.setattr(SlaveSynchronize, "_ask_image", ask_image)
        yield may_come


def test_slave_with_truncated_changes_in_its_tables_stays_a_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it were elected before it has its master's tables, it would restore changes that its set has lost."""

    async def scenario(may_come: asyncio.Event) -> None:
        async with broker_set(tmp_path, members=2, replication="async") as brokers:
            former = await brokers.master()
            (heir,) = await brokers.slaves()
            with monkeypatch.context() as patch:
                patch.setattr(heir.replicas, "switch_over", refuse)
                patch.setattr(former.replicas, "switch_over", refuse)
                await heir.stop()
                former.broker.topics.create_plain("cut", 1)
                await former.broker.topics.file.save()
                await former.stop()
            await heir.start()
            await until(lambda: heir.leads, "the other leads")
            await former.start()
            await until(lambda: former.replicas.tail.truncations == 1, "what it had alone is cut")
            await until(lambda: former.end == heir.end, "it has all of the log")
            assert "cut" in former.broker.topics.topics, "nothing that is here says what there was before"
            kept = MemberFile(RealDisk(), former.root)
            kept.load()
            assert kept.lacks_tables
            confirming = heir.replicas.member.confirming
            assert confirming is not None
            joins = former.replicas.member.broker_id
            await until(lambda: confirming.end_of(joins) == heir.end, "its master has heard of it")
            assert confirming.wish(heir.broker.clock.monotonic()) is None, "nobody joins"
            may_come.set()
            await until(lambda: brokers.in_sync(heir) == 2, "it is in sync")
            assert "cut" not in former.broker.topics.topics

    with images_wait(monkeypatch) as may_come:
        run(lambda: scenario(may_come))


def test_new_member_without_tables_stays_a_learner_until_it_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its master's log begins above the changes that created its topics.

    Elected without the tables, it would have none.
    """
    settings = (f"storeUrl=dir:{tmp_path / 'bucket'}", "archiveMinBytes=1")

    async def scenario(may_come: asyncio.Event) -> None:
        async with broker_set(tmp_path, *settings, members=2, replication="sync-available") as brokers:
            (young,) = await brokers.slaves()
            old = await brokers.master()
            brokers.members.remove(young)
            await young.stop()
            shutil.rmtree(young.root)
            await until(lambda: brokers.in_sync(old) == 1, "it is alone")
            await put(old, b"1", b"2", b"3")
            await offloading(old.broker, lambda: old.broker.store.min_physical_offset > 0)
            brokers.members.append(await young.start())
            await until(lambda: young.broker.store.min_physical_offset > 0, "its log begins above the first byte")
            await put(old, b"4")
            await until(lambda: young.end == old.end, "it has all of the log")
            confirming = old.replicas.member.confirming
            assert confirming is not None
            joins = young.replicas.member.broker_id
            await until(lambda: confirming.end_of(joins) == old.end, "its master has heard of it")
            assert confirming.wish(old.broker.clock.monotonic()) is None, "nobody joins"
            assert TOPIC not in young.broker.topics.topics
            may_come.set()
            await brokers.slaves()
            assert TOPIC in young.broker.topics.topics
            brokers.members.remove(old)
            await old.stop()
            assert await brokers.master() is young
            await until(lambda: brokers.in_sync(young) == 1, "the former master has left the SyncStateSet")
            await put(young, b"5")

    with images_wait(monkeypatch) as may_come:
        run(lambda: scenario(may_come))
