"""The RocketMQ release of a client, from the version number in its requests."""

from typing import NamedTuple

# From 4.9.4 on the version number increases by exactly two with each release.
_VERSIONS_FROM, _VERSION_4_0_0 = 401, 213


class Release(NamedTuple):
    """A release of RocketMQ; each part is below ten."""

    major: int
    minor: int
    patch: int
    is_snapshot: bool


def release_of(version: int) -> Release | None:
    """Return the release of a version number; None if it is older than 4.9.4."""
    if version < _VERSIONS_FROM:
        return None
    releases = (version - _VERSION_4_0_0 + 1) // 2
    is_snapshot = (version - _VERSION_4_0_0) % 2 == 1
    return Release(4 + releases // 100, releases // 10 % 10, releases % 10, is_snapshot)
