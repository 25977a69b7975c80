"""Signatures as RocketMQ's Java client (5.3.3, AclClientRPCHook) computes them."""

import base64
import hmac

from hypothesis import given
from hypothesis import strategies as st

from neve.remoting.signature import SigningKey, sign, signed, verify

SECRET = "secret-12345"
SEND = {
    "a": "group-a", "b": "orders", "c": "TBW102", "d": "4", "e": "2", "f": "0", "g": "1700000000000", "h": "0",
    "i": "KEYS\x01k1\x02", "j": "0", "k": "false", "m": "false",
}  # fmt: skip


def test_send_signature_equals_the_java_client() -> None:
    fields = signed("alice", SECRET, SEND, "héllo".encode())
    assert fields["Signature"] == "znsVbvUJWfZG9bmL1xc8rGj9rL8="
    assert verify(SECRET, fields, "héllo".encode())


def test_request_without_fields_is_signed_with_its_token() -> None:
    assert sign(SECRET, {"AccessKey": "alice", "SecurityToken": "token"}) == "/nEWfcoKBIL5adllOQgoXrZKCLU="


def test_any_change_invalidates_the_signature() -> None:
    fields = signed("alice", SECRET, SEND, b"body")
    assert not verify("other", fields, b"body")
    assert not verify(SECRET, fields, b"bodY")
    assert not verify(SECRET, {**fields, "b": "other"}, b"body")
    assert not verify(SECRET, {**fields, "extra": "1"}, b"body")
    assert not verify(SECRET, {**fields, "Signature": "ü"}, b"body")
    assert not verify(SECRET, SEND, b"body")


def test_field_added_after_signing_by_old_clients_is_tolerated() -> None:
    fields = signed("alice", SECRET, SEND)
    assert verify(SECRET, {**fields, "_UNIQUE_KEY_QUERY": "true"})


@given(st.text(max_size=200), st.text(max_size=200), st.binary(max_size=300))
def test_prepared_key_signs_like_hmac(secret: str, fields: str, body: bytes) -> None:
    key = SigningKey(secret)
    for _ in range(2):  # the key is reusable
        expected = hmac.digest(secret.encode(), fields.encode() + body, "sha1")
        assert key.sign(fields, body) == base64.b64encode(expected)
