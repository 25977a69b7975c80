"""Tests of the verdict of the failover demo: lost and permitted messages."""

from __future__ import annotations

import pytest

from examples.failover import Acknowledged, Load, Lost, compare

PLACE, NEXT = (0, 7), (0, 8)
ELECTED_AT = 5.0


def load(*acknowledged: Acknowledged) -> Load:
    return Load(list(acknowledged), sent=3)


@pytest.mark.parametrize("there", [{}, {PLACE: b"2"}, {NEXT: b"1"}])
def test_acknowledged_message_is_read_at_its_offset_or_lost(there: dict[tuple[int, int], bytes]) -> None:
    one = Acknowledged(b"1", *PLACE, at=4.0)
    assert compare(load(one), {PLACE: b"1", NEXT: b"1"}, lost_until=0.0) == 0, "twice: it was sent again"
    with pytest.raises(Lost, match=r"b'1' was acknowledged at \(0, 7\)"):
        compare(load(one), there, lost_until=0.0)
    assert compare(load(one), there, lost_until=ELECTED_AT) == 1


def test_message_acknowledged_by_the_next_master_is_never_lost() -> None:
    before, after = Acknowledged(b"1", *PLACE, at=4.0), Acknowledged(b"2", *PLACE, at=6.0)
    assert compare(load(before, after), {PLACE: b"2"}, lost_until=ELECTED_AT) == 1, "the same place, given again"
    with pytest.raises(Lost):
        compare(load(before, after), {PLACE: b"1"}, lost_until=ELECTED_AT)


@pytest.mark.parametrize("body", [b"3", b"x", b""])
def test_unsent_message_is_reported(body: bytes) -> None:
    with pytest.raises(Lost, match="nobody sent"):
        compare(load(Acknowledged(b"1", *PLACE, at=4.0)), {PLACE: b"1", NEXT: body}, lost_until=ELECTED_AT)
