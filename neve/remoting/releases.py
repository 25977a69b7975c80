"""Which release of RocketMQ's a client is of, or came to be: the number in each of its requests."""

from typing import NamedTuple

# From here on a version's number goes up by two for each release, without an exception: 4.9.4.
_VERSIONS_FROM, _VERSION_4_0_0 = 401, 213


class Release(NamedTuple):
    """As RocketMQ counts them: each part below ten."""

    major: int
    minor: int
    patch: int
    is_snapshot: bool


def release_of(version: int) -> Release | None:
    """None: older than 4.9.4, or nobody's."""
    if version < _VERSIONS_FROM:
        return None
    releases = (version - _VERSION_4_0_0 + 1) // 2
    is_snapshot = (version - _VERSION_4_0_0) % 2 == 1
    return Release(4 + releases // 100, releases // 10 % 10, releases % 10, is_snapshot)
