"""Message keys with a chosen hash: CRC-32 is linear, so an attacker solves a linear system instead of searching."""

from zlib import crc32

_BASE = bytes([0x40] * 9)
_BITS = range(5 * len(_BASE))


def _flipped(mask: int) -> bytes:
    word = bytearray(_BASE)
    for bit in _BITS:
        word[bit // 5] ^= (mask >> bit & 1) << bit % 5
    return bytes(word)


def colliding_words(topic: str, wanted: int) -> list[str]:
    """Return distinct printable keys whose hash in this topic is `wanted`; there are more than 4,000."""
    start = crc32(f"{topic}#".encode())
    base = crc32(_BASE, start)
    pivots: dict[int, tuple[int, int]] = {}
    kernel: list[int] = []
    for bit in _BITS:
        value, mask = crc32(_flipped(1 << bit), start) ^ base, 1 << bit
        while value and value.bit_length() in pivots:
            pivot, pivot_mask = pivots[value.bit_length()]
            value, mask = value ^ pivot, mask ^ pivot_mask
        if value:
            pivots[value.bit_length()] = value, mask
        else:
            kernel.append(mask)
    left, solution = base ^ wanted, 0
    while left:
        pivot, pivot_mask = pivots[left.bit_length()]
        left, solution = left ^ pivot, solution ^ pivot_mask
    words = []
    for chosen in range(1 << len(kernel)):
        mask = solution
        for number, one in enumerate(kernel):
            mask ^= one * (chosen >> number & 1)
        words.append(_flipped(mask).decode())
    assert crc32(words[-1].encode(), start) == wanted
    return words
