"""Master and slave sessions connected by links that break at any byte: the slave's log equals the master's."""

from __future__ import annotations

import random

import pytest

from broker.ha import master_session, slave_session
from broker.ha.epochs import EpochCache
from broker.ha.master_session import MasterSession, StreamRules
from broker.ha.slave_session import Local, SlaveSession
from tests.kit.broker.byte_log import ByteLog, record
from tests.kit.broker.ha_session import hello

FILE_SIZE = 256


class SessionMember:
    """A log with its epochs and its confirmed offset."""

    def __init__(self, member_id: int) -> None:
        self.id = member_id
        self.log, self.epochs = ByteLog(FILE_SIZE), EpochCache()
        self.confirm = self.followed = 0

    def lead(self, epoch: int) -> None:
        self.log.forget()
        self.epochs.assign(epoch, self.log.max_physical_offset)

    def wants(self, epoch: int, *, stock: bool) -> SlaveSession:
        self.log.forget()
        log = self.log
        local = Local(
            log.min_physical_offset, log.max_physical_offset, self.epochs.entries(), self.confirm, self.followed
        )
        own = hello(self.id, master_epoch=epoch)
        return SlaveSession(local, member_id=self.id, master_epoch=epoch, hello=None if stock else own)


class SessionLink:
    """One connection between two sessions, whose bytes arrive in pieces, or never."""

    def __init__(
        self, dice: random.Random, master: SessionMember, slave: SessionMember, epoch: int, *, stock: bool
    ) -> None:
        self.dice, self.member = dice, slave
        self.slave = slave.wants(epoch, stock=stock)
        self.master = MasterSession(
            master.log,
            master.epochs,
            hello(master.id, nonce="m", master_epoch=epoch),
            StreamRules(batch=dice.choice((7, 32, 1000)), admits_stock=True),
            is_member={1, 2, 3}.__contains__,
            confirm=lambda: master.confirm,
            now=0.0,
        )
        self.up = self.down = b""
        self.asked = False
        self.do(self.slave.start(0.0))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            take = self.dice.randint(0, 400)
            data, self.up = self.up[:take], self.up[take:]
            for action in self.master.receive_data(data, 0.0) + self.master.advance(0.0):
                assert not isinstance(action, master_session.End), action.why
                if isinstance(action, master_session.Send):
                    self.down += b"".join(map(bytes, action.data))
                elif isinstance(action, master_session.Reported):
                    self.asked = True
                    assert action.end <= self.master._log.max_physical_offset
            take = self.dice.randint(0, 400)
            data, self.down = self.down[:take], self.down[take:]
            self.do(self.slave.receive_data(data, 0.0))
            if self.slave.state is slave_session.SlaveState.FOLLOWING:
                end = self.member.log.max_physical_offset
                self.do(self.slave.stored(end, end, 0.0))

    def do(self, actions: list[slave_session.Action]) -> None:
        member = self.member
        for action in actions:
            match action:
                case slave_session.Send(data=data):
                    self.up += data
                case slave_session.Truncate(to=to):
                    member.log.truncate(to)
                    end = member.log.max_physical_offset
                    member.epochs.truncate(end)
                    self.do(self.slave.parted(end, member.epochs.entries()))
                case slave_session.Attached(master_epoch=epoch):
                    member.followed = epoch
                    self.do(self.slave.attached(0, 0.0))
                case slave_session.TakeEpochs(entries=entries):
                    for entry in entries:
                        assert member.epochs.assign(*entry)
                case slave_session.Append(at=at, data=data):
                    member.log.append_replica(data, at)
                case slave_session.Confirmed(offset=offset):
                    assert member.confirm <= offset <= member.log.max_physical_offset
                    member.confirm = offset
                case slave_session.End(why=why):
                    raise AssertionError(why)


def assert_prefix(slave: SessionMember, master: SessionMember) -> None:
    log, whole = slave.log, master.log
    assert log.content() == whole.content()[: log.max_physical_offset - whole.min_physical_offset]
    end = log.max_physical_offset
    told = [entry for entry in master.epochs.entries() if entry[1] < end]
    assert [entry for entry in slave.epochs.entries() if entry[1] < end] == told


@pytest.mark.parametrize("stock", [False, True], ids=["neve", "stock"])
def test_slave_log_equals_the_masters_whatever_the_links_do(stock: bool) -> None:
    whole = 0
    for seed in range(120):
        dice = random.Random(seed)
        members = {number: SessionMember(number) for number in (1, 2, 3)}
        members[1].lead(1)
        for epoch in range(1, 8):
            master = members[1] if epoch == 1 else members[dice.randint(1, 3)]
            if epoch > 1:
                master.lead(epoch)
            others = [member for member in members.values() if member is not master]
            for _ in range(dice.randint(0, 6)):
                for _ in range(dice.randint(0, 9)):
                    master.log.append(record(epoch, dice.randint(3, 60)))
                slave = dice.choice(others)
                link = SessionLink(dice, master, slave, epoch, stock=stock)
                for _ in range(dice.randint(0, 4)):
                    link.run(dice.randint(0, 30))
                    master.log.append(record(epoch, dice.randint(3, 60)))
                if link.asked:
                    assert_prefix(slave, master)
                    whole += slave.log.max_physical_offset > 0
    assert whole > 500, "the walks lead somewhere"
