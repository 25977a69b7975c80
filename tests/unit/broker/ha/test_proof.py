"""A broker set with a secret neither sends its log to a member without it nor follows one."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from broker.ha.frames import Hello, SlaveHandshake, encode_hello, encode_slave_handshake
from broker.ha.greeting import Reason
from broker.ha.master_session import MasterState
from broker.ha.proof import MASTER, SLAVE, is_proven, proven
from broker.ha.slave_session import Send, SlaveSession
from tests.kit.broker.ha_master import MasterEnd, frames, refused
from tests.kit.broker.ha_session import EMPTY, hello, why

SECRET = b"user\0password"
H1 = encode_slave_handshake(SlaveHandshake(2))


def slave(secret: bytes = SECRET) -> SlaveSession:
    made = SlaveSession(EMPTY, member_id=2, master_epoch=3, hello=hello(), secret=secret)
    made.start(0.0)
    return made


def greeting_of(master: MasterEnd) -> Hello:
    (answer,) = frames(master.greet())
    assert isinstance(answer, Hello)
    return answer


def test_members_with_the_same_secret_shake_hands() -> None:
    master, follower = MasterEnd(secret=SECRET), slave()
    (sent,) = follower.receive_data(encode_hello(greeting_of(master)), 0.0)
    assert isinstance(sent, Send)
    (h2,) = frames(master.session.receive_data(sent.data, 0.0))
    assert not isinstance(h2, Hello)
    assert master.session.state is MasterState.SHAKEN


def test_slave_without_the_secret_is_refused_with_a_reason() -> None:
    for made_by in (b"", b"user\0another"):
        master = MasterEnd(secret=SECRET)
        greeting = greeting_of(master)
        again = replace(hello(), answers=greeting.nonce)
        said = encode_hello(proven(again, SLAVE, made_by) if made_by else again)
        assert refused(master.session.receive_data(said + H1, 0.0)) == (Reason.STRANGER.value, True)
    master = MasterEnd(secret=SECRET)
    greeting_of(master)
    assert refused(master.session.receive_data(H1, 0.0)) == (Reason.STRANGER.value, True)


def test_stolen_proof_is_refused_on_another_connection_or_as_another_id() -> None:
    first = MasterEnd(secret=SECRET)
    answer = proven(replace(hello(), answers=greeting_of(first).nonce), SLAVE, SECRET)
    assert first.session.receive_data(encode_hello(answer), 0.0) == []
    for stolen in (answer, replace(answer, member_id=3)):
        other = MasterEnd(secret=SECRET, nonce="another")
        other.greet(replace(hello(), member_id=stolen.member_id))
        assert refused(other.session.receive_data(encode_hello(stolen), 0.0)) == (Reason.STRANGER.value, True)


def test_master_without_the_secret_is_not_followed() -> None:
    for master in (MasterEnd(), MasterEnd(secret=b"user\0another")):
        assert why(slave().receive_data(encode_hello(greeting_of(master)), 0.0)) == Reason.STRANGER.value
    mirrored = proven(replace(hello(1), answers="n2"), SLAVE, SECRET)  # the slave's own hello, sent back
    assert why(slave().receive_data(encode_hello(mirrored), 0.0)) == Reason.STRANGER.value


def test_stock_member_is_not_admitted_if_there_is_a_secret() -> None:
    master = MasterEnd(secret=SECRET, admits_stock=True)
    assert refused(master.shake()) == (Reason.STOCK.value, False)


@pytest.mark.parametrize("side", [MASTER, SLAVE])
def test_proof_covers_each_field_of_a_hello(side: str) -> None:
    said = proven(replace(hello(), answers="n1"), side, SECRET)
    assert is_proven(said, side, SECRET)
    for other in (
        replace(said, nonce="x"),
        replace(said, answers="x"),
        replace(said, master_epoch=4),
        replace(said, eviction_frontier=1),
    ):
        assert not is_proven(other, side, SECRET)
