"""Proof that both ends of the HA port know the same secret: each answers the other's nonce. Pure.

    slave   HELLO, its nonce              ->
                                          <-  HELLO, its nonce, PROOF          master
    slave   HELLO once more, PROOF        ->

PROOF is an HMAC over the side, both nonces, and the HELLO that contains it. A recorded proof is therefore useless on
another connection, and for the other side. It does not encrypt anything: with authentication enabled, the port accepts
TLS only.
"""

from __future__ import annotations

import hmac

import msgspec
from msgspec.structs import replace

from broker.ha.frames import Hello

MASTER, SLAVE = "master", "slave"


def proven(hello: Hello, side: str, secret: bytes) -> Hello:
    """Return a HELLO that answers a nonce, with its proof."""
    assert secret and hello.answers
    return replace(hello, proof=_proof(hello, side, secret))


def is_proven(hello: Hello, side: str, secret: bytes) -> bool:
    """Return whether the proof was made with the secret. The caller checks which nonce it answers."""
    return hmac.compare_digest(hello.proof, _proof(hello, side, secret))


def _proof(hello: Hello, side: str, secret: bytes) -> str:
    said = msgspec.json.encode([side, replace(hello, proof="")])
    return hmac.new(secret, said, "sha256").hexdigest()
