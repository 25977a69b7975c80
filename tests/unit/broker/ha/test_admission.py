"""The reason that a member of a broker set gives to refused producers."""

from __future__ import annotations

from typing import cast

import pytest

from broker.ha.admission import MemberAdmission
from broker.ha.confirm import Confirm, ConfirmRules, ReplicationMode, SyncStateSet
from broker.ha.ha_service import HaService
from broker.ha.member import Member
from broker.ha.member_events import SavedMember
from broker.ha.member_rules import MemberRules
from infra.clock import ManualClock

A, B = 1, 2
RULES = ConfirmRules(ReplicationMode.ASYNC, 1)


def leading(clock: ManualClock) -> tuple[MemberAdmission, Confirm]:
    member = Member(MemberRules(confirm=RULES), process="p", address="h:1")
    member.begin(SavedMember(broker_id=A), "h;1")
    in_sync = SyncStateSet(1, frozenset((A, B)))
    member.confirming = Confirm(
        RULES, A, 1, in_sync, epoch_start=0, own_end=0, confirm=0, now=clock.monotonic(), is_alone=False
    )
    admission = MemberAdmission(member, cast("HaService", None), clock)
    admission.leads = True
    return admission, member.confirming


@pytest.mark.parametrize("is_deposed", [False, True])
def test_refusal_distinguishes_a_deposed_master_from_an_isolated_one(*, is_deposed: bool) -> None:
    clock = ManualClock()
    admission, confirm = leading(clock)
    assert admission.acknowledged() == 0
    if is_deposed:
        confirm.read(2, SyncStateSet(2, frozenset((B,))), clock.monotonic())
    else:
        clock.advance(3_600_000)
    assert admission.acknowledged() == -1
    told = "this member is no longer the master"
    unheard = "neither a controller nor a slave responds: another may be master"
    assert admission.why_silent() == (told if is_deposed else unheard)
