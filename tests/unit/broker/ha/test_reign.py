"""The reason that a member of a broker set gives to refused producers."""

from __future__ import annotations

from typing import cast

import pytest

from broker.ha.confirm import Confirm, ConfirmRules, Replication, SyncStateSet
from broker.ha.ha_service import HaService
from broker.ha.member import Member
from broker.ha.member_events import Saved
from broker.ha.member_rules import MemberRules
from broker.ha.reign import Reign
from infra.clock import ManualClock

A, B = 1, 2
RULES = ConfirmRules(Replication.ASYNC, 1)


def reigning(clock: ManualClock) -> tuple[Reign, Confirm]:
    member = Member(MemberRules(confirm=RULES), process="p", address="h:1")
    member.begin(Saved(broker_id=A), "h;1")
    in_sync = SyncStateSet(1, frozenset((A, B)))
    member.confirming = Confirm(
        RULES, A, 1, in_sync, epoch_start=0, own_end=0, confirm=0, now=clock.monotonic(), is_alone=False
    )
    reign = Reign(member, cast("HaService", None), clock)
    reign.leads = True
    return reign, member.confirming


@pytest.mark.parametrize("is_deposed", [False, True])
def test_refusal_distinguishes_a_deposed_master_from_an_isolated_one(*, is_deposed: bool) -> None:
    clock = ManualClock()
    reign, confirm = reigning(clock)
    assert reign.acknowledged() == 0
    if is_deposed:
        confirm.read(2, SyncStateSet(2, frozenset((B,))), clock.monotonic())
    else:
        clock.advance(3_600_000)
    assert reign.acknowledged() == -1
    told = "this member is not the master any more"
    unheard = "neither a controller nor a slave is heard: another may be master"
    assert reign.why_silent() == (told if is_deposed else unheard)
