"""Signatures as RocketMQ's Java client (5.3.3, AclClientRPCHook) computes them."""

from neve.remoting.signature import sign, signed, verify

SECRET = "secret-12345"
SEND = {
    "a": "group-a", "b": "orders", "c": "TBW102", "d": "4", "e": "2", "f": "0", "g": "1700000000000", "h": "0",
    "i": "KEYS\x01k1\x02", "j": "0", "k": "false", "m": "false",
}  # fmt: skip


def test_a_send_is_signed_as_java_signs_it() -> None:
    fields = signed("alice", SECRET, SEND, "héllo".encode())
    assert fields["Signature"] == "znsVbvUJWfZG9bmL1xc8rGj9rL8="
    assert verify(SECRET, fields, "héllo".encode())


def test_a_request_without_fields_or_body_but_with_a_token() -> None:
    assert sign(SECRET, {"AccessKey": "alice", "SecurityToken": "token"}) == "/nEWfcoKBIL5adllOQgoXrZKCLU="


def test_any_change_is_seen() -> None:
    fields = signed("alice", SECRET, SEND, b"body")
    assert not verify("other", fields, b"body")
    assert not verify(SECRET, fields, b"bodY")
    assert not verify(SECRET, {**fields, "b": "other"}, b"body")
    assert not verify(SECRET, {**fields, "extra": "1"}, b"body")
    assert not verify(SECRET, {**fields, "Signature": "ü"}, b"body")
    assert not verify(SECRET, SEND, b"body")


def test_the_field_that_old_clients_add_late_is_tolerated() -> None:
    fields = signed("alice", SECRET, SEND)
    assert verify(SECRET, {**fields, "_UNIQUE_KEY_QUERY": "true"})
