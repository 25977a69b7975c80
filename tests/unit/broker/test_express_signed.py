"""With authentication, the fast path of sends takes only sends that their user may make and has signed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from access.model import DISABLED, SUPER, Policy, PolicyEntry, User
from access.store import AuthTables
from neve.remoting.codes import ResponseCode
from neve.remoting.command import decode_command
from neve.remoting.headers import SignedSendV2Frame, covered
from neve.remoting.signature import SigningKey, signed
from tests.unit.broker.send_frames import NOT_PLAIN, PLAIN, TOPIC, UNIQUE, SendTarget, frame, with_broker

ROOT, ALICE = partial(signed, "root", "root's secret"), partial(signed, "alice", "alice's secret")
AUTHENTICATED: dict[str, Any] = {
    "authentication_enabled": True,
    "init_authentication_user": '{"username":"root","password":"root\'s secret"}',
}
AUTHORIZED = {**AUTHENTICATED, "authorization_enabled": True}
MAY_SEND = Policy("Custom", (PolicyEntry(f"Topic:{TOPIC}", ("Pub",)),))


def set_user(user: User | None, *policies: Policy) -> Any:
    """Change a user and its policies, as an administrator does."""

    def edit(tables: AuthTables) -> None:
        tables.users.pop("alice", None)
        tables.policies.pop("User:alice", None)
        if user is not None:
            tables.users["alice"] = user
        if policies:
            tables.policies["User:alice"] = list(policies)

    return edit


def change(broker: SendTarget, user: User | None, *policies: Policy) -> None:
    store: Any = broker.controller.guard
    store.store.change_now(set_user(user, *policies))


def code_of(broker: SendTarget, lane: bool, *, ext: dict[str, Any] | None = None) -> int:
    """Send once, check whether the fast path took it, and return the answer's code."""
    broker.dispatched = 0
    answer, stored = broker.send(ext or {}, b"body", express=True)
    assert broker.dispatched == (0 if lane else 1)
    assert len(stored) == (answer[0] == ResponseCode.SUCCESS)
    return int(answer[0])


@pytest.mark.parametrize("flag", [0, 2], ids=["two-way", "one-way"])
def test_signed_plain_send_equals_one_by_the_general_path(tmp_path: Path, flag: int) -> None:
    def work(broker: SendTarget) -> None:
        for name, ext in PLAIN.items():
            known = {field: value for field, value in ext.items() if field != "zz"}
            fast = broker.send(known, name.encode(), express=True, flag=flag)
            assert broker.dispatched == 0, name
            assert len(fast[1]) == 1, name
            assert fast == broker.send(known, name.encode(), express=False, flag=flag), name
            broker.dispatched = 0

    with_broker(tmp_path, work, signer=ROOT, **AUTHENTICATED)


def test_signed_send_that_is_not_plain_is_left_to_the_general_path(tmp_path: Path) -> None:
    def work(broker: SendTarget) -> None:
        for name, ext in NOT_PLAIN.items():
            broker.send(ext, b"body", express=True)
            assert broker.dispatched == 1, name
            broker.dispatched = 0

    with_broker(tmp_path, work, signer=ROOT, **AUTHENTICATED)


def test_field_unknown_to_the_fast_path_is_covered_by_the_signature(tmp_path: Path) -> None:
    def work(broker: SendTarget) -> None:
        assert code_of(broker, lane=False, ext={"zz": "?"}) == ResponseCode.SUCCESS
        broker.signer = lambda ext, body: {**ROOT(ext, body), "zz": "added by another"}
        assert code_of(broker, lane=False) == ResponseCode.NO_PERMISSION

    with_broker(tmp_path, work, signer=ROOT, **AUTHENTICATED)


def test_send_without_a_valid_signature_is_refused(tmp_path: Path) -> None:
    def work(broker: SendTarget) -> None:
        for signer in (
            None,
            partial(signed, "root", "another secret"),
            partial(signed, "nobody", "root's secret"),
            lambda ext, body: ROOT(ext, body + b"!"),
            lambda ext, body: {**ROOT(ext, body), "e": "3"},
            lambda ext, body: {**ROOT(ext, body), "Signature": "ü"},
            lambda ext, body: {name: text for name, text in ROOT(ext, body).items() if name != "Signature"},
        ):
            broker.signer = signer
            assert code_of(broker, lane=False) == ResponseCode.NO_PERMISSION
        broker.signer = ROOT
        assert code_of(broker, lane=True) == ResponseCode.SUCCESS

    with_broker(tmp_path, work, signer=ROOT, **AUTHENTICATED)


def test_changed_or_deleted_user_or_policy_applies_to_the_next_send(tmp_path: Path) -> None:
    alice = User("alice's secret")

    def work(broker: SendTarget) -> None:
        change(broker, alice, MAY_SEND)
        broker.signer = ALICE
        steps: list[tuple[User | None, tuple[Policy, ...]]] = [
            (alice, ()),
            (alice, (Policy("Custom", (PolicyEntry("Topic:another", ("Pub",)),)),)),
            (alice, (Policy("Custom", (PolicyEntry(f"Topic:{TOPIC}", ("Sub",)),)),)),
            (alice, (Policy("Custom", (PolicyEntry(f"Topic:{TOPIC}", ("Pub",), ("10.9.0.0/16",)),)),)),
            (User("alice's secret", user_status=DISABLED), (MAY_SEND,)),
            (User("a new secret"), (MAY_SEND,)),
            (None, (MAY_SEND,)),
        ]
        for user, policies in steps:
            assert code_of(broker, lane=True) == ResponseCode.SUCCESS
            change(broker, user, *policies)
            assert code_of(broker, lane=False) == ResponseCode.NO_PERMISSION, (user, policies)
            change(broker, alice, MAY_SEND)
        change(broker, User("alice's secret", SUPER))
        assert code_of(broker, lane=True) == ResponseCode.SUCCESS

    with_broker(tmp_path, work, signer=ROOT, **AUTHORIZED)


def test_signatures_of_sends_in_one_read_are_checked_individually(tmp_path: Path) -> None:
    def work(broker: SendTarget) -> None:
        change(broker, User("alice's secret"))  # may not send
        connection, outside = broker.connect(express=True)
        signers = (ROOT, ROOT, ALICE, ROOT, partial(signed, "root", "wrong"), ROOT)
        sends = (frame({}, b"%d" % n, 0, signer) for n, signer in enumerate(signers))
        numbered = (one.replace(b'"opaque":77', b'"opaque":%d' % (10 + n)) for n, one in enumerate(sends))
        connection.data_received(b"".join(numbered))
        answers, position = [], 0
        while position < len(outside.written):
            end = position + 4 + int.from_bytes(outside.written[position : position + 4], "big")
            answers.append(decode_command(outside.written[position + 4 : end]))
            position = end
        refused = ResponseCode.NO_PERMISSION
        assert [(answer.opaque, answer.code) for answer in answers] == [
            (10, 0), (11, 0), (12, refused), (13, 0), (14, refused), (15, 0),
        ]  # fmt: skip
        assert broker.dispatched == 2

    with_broker(tmp_path, work, signer=ROOT, **AUTHORIZED)


def test_unreadable_users_file_refuses_all_sends(tmp_path: Path) -> None:
    def work(broker: SendTarget) -> None:
        assert code_of(broker, lane=True) == ResponseCode.SUCCESS
        path = tmp_path / "store" / "config" / "auth" / "auth.json"
        path.write_text("{")
        assert code_of(broker, lane=False) == ResponseCode.NO_PERMISSION

    with_broker(tmp_path, work, signer=ROOT, **AUTHENTICATED)


_TEXT = st.one_of(st.text(max_size=4), st.text(min_size=300, max_size=400))
_NUMBER, _TRUTH = st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 1100), st.sampled_from(["true", "false"])
_LONG = st.integers(-(2**63), 2**63 - 1)
_MUST = {"a": _TEXT, "b": _TEXT, "c": _TEXT, "d": _NUMBER, "e": _NUMBER, "f": _NUMBER, "g": _LONG, "h": _NUMBER}
_MAY = {"i": _TEXT, "j": _NUMBER, "k": _TRUTH, "l": _NUMBER, "m": _TRUTH, "n": _TEXT}


@given(st.fixed_dictionaries(_MUST, optional=_MAY), _TEXT)
def test_fast_path_signs_the_same_text_as_any_client(fields: dict[str, Any], user: str) -> None:
    whole = signed(user, "secret", {name: str(value) for name, value in fields.items()}, b"body")
    frame = msgspec.json.encode({"flag": 0, "opaque": 1, "extFields": whole})
    read = msgspec.json.decode(frame, type=SignedSendV2Frame, strict=False)
    assert read.header.access_key == user
    text = "".join(whole[name] for name in sorted(whole) if name != "Signature")
    assert covered([read.header, read.header]) == [text, text]
    assert SigningKey("secret").verify(read.header.signature, text, b"body")


_SENT = {"i": f"TAGS\x01a\x02UNIQ_KEY\x01{UNIQUE}\x02", "j": 0, "k": "false", "l": 16, "m": "false", "n": "broker-a"}
_CHANGED = {
    "a": "another", "c": "TBW103", "d": "9", "e": "3", "f": "1", "g": "1700000000001", "h": "1", "j": "1", "k": "true",
    "l": "17", "n": "broker-b", "i": f"TAGS\x01b\x02UNIQ_KEY\x01{UNIQUE}\x02", "AccessKey": "alice",
}  # fmt: skip


def test_changed_added_removed_or_moved_field_invalidates_the_signature(tmp_path: Path) -> None:
    def without(name: str) -> Any:
        return lambda ext, body: {field: text for field, text in ROOT(ext, body).items() if field != name}

    def swapped(one: str, other: str) -> Any:
        def swap(ext: Any, body: bytes) -> Any:
            fields = ROOT(ext, body)
            return {**fields, one: fields[other], other: fields[one]}

        return swap

    def work(broker: SendTarget) -> None:
        change(broker, User("alice's secret", SUPER))
        for name, text in _CHANGED.items():
            broker.signer = lambda ext, body, name=name, text=text: {**ROOT(ext, body), name: text}
            assert code_of(broker, lane=False, ext=_SENT) == ResponseCode.NO_PERMISSION, name
            broker.signer = without(name)
            assert code_of(broker, lane=False, ext=_SENT) == ResponseCode.NO_PERMISSION, name
            unsent = {**_SENT, name: None}
            if name in _SENT:  # the other fields are always present
                broker.signer = lambda ext, body, name=name: {**ROOT(ext, body), name: _SENT[name]}
                assert code_of(broker, lane=False, ext=unsent) == ResponseCode.NO_PERMISSION, name
        for one, other in (("a", "c"), ("e", "d"), ("h", "l"), ("j", "e"), ("i", "n")):
            broker.signer = swapped(one, other)
            assert code_of(broker, lane=False, ext=_SENT) == ResponseCode.NO_PERMISSION, (one, other)
        broker.signer = ROOT
        assert code_of(broker, lane=True, ext=_SENT) == ResponseCode.SUCCESS

    with_broker(tmp_path, work, signer=ROOT, **AUTHORIZED)


def test_signature_of_a_duplicate_field_covers_the_value_that_is_used(tmp_path: Path) -> None:
    def work(broker: SendTarget) -> None:
        whole = frame(_SENT, b"body", 0, ROOT)
        header = whole[8 : 8 + int.from_bytes(whole[4:8], "big")]
        for old, new, queue_id in (
            (b'"e":"2"', b'"e":"2"', 2),
            (b'"d":"8","e":"2"', b'"e":"2","d":"8"', 2),
            (b'"e":"2"', b'"e":"3","e":"2"', 2),
            (b'"Signature"', b'"Signature":"","Signature"', 2),
            (b'"e":"2"', b'"e":"2","e":"3"', None),
            (b'"Signature"', b'"e":"3","Signature"', None),
            (b'"Signature"', b'"AccessKey":"alice","Signature"', None),
            (b'"d":"8","e":"2"', b'"d":"82","e":""', None),  # the signed text is the same
        ):
            assert old in header
            other = header.replace(old, new, 1)
            content = len(other).to_bytes(4, "big") + other + b"body"
            connection, _ = broker.connect(express=True)
            start = broker.store.max_physical_offset
            connection.data_received(len(content).to_bytes(4, "big") + content)
            stored = [record.queue_id for record in broker.stored_from(start)]
            assert stored == ([] if queue_id is None else [queue_id]), new

    with_broker(tmp_path, work, signer=ROOT, **AUTHENTICATED)


@pytest.mark.parametrize("bad", [{"signer": "wrong"}, {"ext": {"i": "DELAY\x013\x02"}}], ids=["wrong key", "delayed"])
@pytest.mark.parametrize("share", [1, 2, 7], ids=["all", "every second", "every seventh"])
def test_fast_path_parses_ahead_no_more_than_it_takes(tmp_path: Path, bad: dict[str, Any], share: int) -> None:
    """A client that sends many requests for the general path causes no additional work per request."""

    def work(broker: SendTarget) -> None:
        lane = cast("Any", broker.controller.router.express).__self__
        decode, looked = lane._decode, []

        def counted(header: bytes) -> Any:
            looked.append(header)
            return decode(header)

        lane._decode = counted
        connection, _ = broker.connect(express=True)
        plain = frame({}, b"body", 0, ROOT)
        other = frame(
            bad.get("ext", {}), b"body", 0, partial(signed, "root", bad["signer"]) if "signer" in bad else ROOT
        )
        for count in (100, 100):
            connection.data_received(plain * count)
        assert len(looked) == 200
        looked.clear()
        before = broker.controller.store.max_physical_offset
        connection.data_received(b"".join(other if n % share == 0 else plain for n in range(300)))
        connection.eof_received()  # frames left for later turns are served now
        assert broker.dispatched == -(-300 // share)
        # The frames parsed ahead of the first one, once. Afterwards at most as many as the fast path took.
        assert len(looked) <= 300 + 300 + 300
        assert broker.controller.store.max_physical_offset > before or share == 1

    with_broker(tmp_path, work, signer=ROOT, **AUTHENTICATED)


def test_value_in_another_notation_is_left_to_the_general_path(tmp_path: Path) -> None:
    def work(broker: SendTarget) -> None:
        assert code_of(broker, lane=False, ext={"m": "False"}) == ResponseCode.SUCCESS

    with_broker(tmp_path, work, signer=ROOT, **AUTHENTICATED)
