"""Tests of the requests of `neve.admin`: the choice of a server, and unreachable servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from neve.admin.errors import AdminError, NotFound, NotPermitted, Unreachable
from neve.admin.requests import ServerRequests, split_addresses
from neve.admin.users import Rule, Users
from neve.client.model import BrokerInfo
from neve.errors import ConnectionFailed
from neve.remoting.body import dumps
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand

BROKERS = {
    "a": BrokerInfo("c", "a", {0: "a0", 1: "a1"}),
    "b": BrokerInfo("c", "b", {2: "b2", 3: "b3"}),  # without a master
}


class Pool:
    """A pool that answers SUCCESS or the code in `codes` by address; addresses in `gone` do not answer."""

    def __init__(self, codes: Mapping[str, int] | None = None, gone: frozenset[str] = frozenset()) -> None:
        self._codes, self._gone = codes or {}, gone
        self.asked: list[tuple[str, int]] = []

    async def invoke(
        self, address: str, code: int, ext: Mapping[str, str], *, body: bytes = b"", timeout: float
    ) -> RemotingCommand:
        assert timeout > 0
        self.asked.append((address, code))
        if address in self._gone:
            raise ConnectionFailed(f"{address} is gone")
        answer = self._codes.get(address, ResponseCode.SUCCESS)
        return RemotingCommand(code=answer, opaque=1, ext={}, body=dumps([]), remark=f"from {address}")


def requests(pool: Pool, brokers: Mapping[str, BrokerInfo] = BROKERS) -> ServerRequests:
    return ServerRequests(cast("Any", pool), ["n1", "n2"], brokers)


async def test_changes_need_a_master() -> None:
    pool = Pool()
    await requests(pool).ask_master("a", 1)
    assert pool.asked == [("a0", 1)]
    with pytest.raises(Unreachable, match="broker b has no master at present"):
        await requests(pool).ask_master("b", 1)


async def test_reads_go_to_the_slave_with_the_lowest_id_without_a_master() -> None:
    pool = Pool()
    answers = await requests(pool).ask_every_broker(7)
    assert sorted(pool.asked) == [("a0", 7), ("b2", 7)]
    assert {broker: answer.remark for broker, answer in answers.items()} == {"a": "from a0", "b": "from b2"}


async def test_unreachable_broker_fails_the_whole_read() -> None:
    with pytest.raises(ConnectionFailed, match="b2 is gone"):
        await requests(Pool(gone=frozenset({"b2"}))).ask_every_broker(7)


async def test_next_name_server_is_used_for_an_unreachable_one() -> None:
    pool = Pool(gone=frozenset({"n1"}))
    assert (await requests(pool).ask_name_server(5)).remark == "from n2"
    with pytest.raises(ConnectionFailed, match="n1 is gone"):
        await requests(Pool(gone=frozenset({"n1", "n2"}))).ask_name_server(5)


def test_unknown_broker_is_named_with_the_known_ones() -> None:
    with pytest.raises(NotFound, match="no broker z, only a, b"):
        requests(Pool()).require("z")


@pytest.mark.parametrize("text", ["n1:1;n2:2", "n1:1, n2:2", " n1:1\tn2:2;"])
def test_addresses_are_separated_by_punctuation_or_spaces(text: str) -> None:
    assert split_addresses(text) == ["n1:1", "n2:2"]


MASTERS = {"a": BROKERS["a"]}
RULE = Rule("alice", "Topic:t", ("Pub",), (), "Allow")


async def put_rule(pool: Pool) -> Users:
    users = Users(requests(pool, MASTERS))
    await users.discover()
    await users.put_rule(RULE)
    return users


async def test_servers_without_users_are_skipped() -> None:
    pool = Pool({"n1": ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "n2": ResponseCode.REQUEST_CODE_NOT_SUPPORTED})
    users = await put_rule(pool)
    assert [server.address for server in users.without] == ["n1", "n2"]
    assert pool.asked[-1] == ("a0", RequestCode.AUTH_CREATE_ACL)


async def test_no_server_with_users_is_an_error() -> None:
    codes = dict.fromkeys(("n1", "n2", "a0"), int(ResponseCode.REQUEST_CODE_NOT_SUPPORTED))
    with pytest.raises(AdminError, match="no server of this cluster keeps users"):
        await put_rule(Pool(codes))


async def test_users_need_the_master_of_every_broker() -> None:
    with pytest.raises(Unreachable, match="no master: b"):
        await Users(requests(Pool())).discover()


class Refusing(Pool):
    """A pool that refuses changes at one server."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._refusing = address

    async def invoke(
        self, address: str, code: int, ext: Mapping[str, str], *, body: bytes = b"", timeout: float
    ) -> RemotingCommand:
        answer = await super().invoke(address, code, ext, body=body, timeout=timeout)
        if address == self._refusing and code == RequestCode.AUTH_CREATE_ACL:
            return RemotingCommand(code=ResponseCode.NO_PERMISSION, opaque=1, remark="no right")
        return answer


async def test_refused_change_names_the_servers_already_changed() -> None:
    with pytest.raises(NotPermitted, match="name server n2: no right; changed already: name server n1"):
        await put_rule(Refusing("n2"))
