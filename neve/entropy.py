"""Randomness as a dependency: the only module of the product that throws the machine's dice."""

from __future__ import annotations

import os
from collections.abc import Callable

Entropy = Callable[[int], bytes]
"""So many bytes that nobody can foresee."""


def system_entropy(size: int) -> bytes:
    """The machine's own."""
    return os.urandom(size)


def unique_name(entropy: Entropy) -> str:
    """32 hex digits that nobody else has."""
    return entropy(16).hex()


def salt(entropy: Entropy) -> int:
    """A number of 31 bits, what an i32 holds, that tells one process's ids from another's."""
    return int.from_bytes(entropy(4)) & 0x7FFFFFFF
