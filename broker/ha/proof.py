"""That both ends of the HA port know one secret: each answers the other's nonce. Pure.

    slave   HELLO, its nonce              ->
                                          <-  HELLO, its nonce, PROOF          master
    slave   HELLO once more, PROOF        ->

PROOF is an HMAC over which end it is, both nonces, and the HELLO that it stands in: what one end has said is of no use
to who repeats it on another connection, nor as the other end. It hides nothing: where users are asked who they are, the
port speaks TLS alone.
"""

from __future__ import annotations

import hmac

import msgspec
from msgspec.structs import replace

from broker.ha.frames import Hello

MASTER, SLAVE = "master", "slave"


def proven(hello: Hello, side: str, secret: bytes) -> Hello:
    """A HELLO that answers a nonce, with its proof."""
    assert secret and hello.answers
    return replace(hello, proof=_proof(hello, side, secret))


def is_proven(hello: Hello, side: str, secret: bytes) -> bool:
    """Whether it was made by who knows the secret; whose nonce it answers the caller looks at."""
    return hmac.compare_digest(hello.proof, _proof(hello, side, secret))


def _proof(hello: Hello, side: str, secret: bytes) -> str:
    said = msgspec.json.encode([side, replace(hello, proof="")])
    return hmac.new(secret, said, "sha256").hexdigest()
