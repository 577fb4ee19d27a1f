"""Faults of a campaign that did not happen, and whether there is a reason."""

from __future__ import annotations

from typing import Any

import pytest

from training.drill.campaign import Campaign
from training.drill.unfired import missed
from training.injection.outside import Kill, Victim
from training.journal.history import RunHistory, replay
from training.journal.records import AnyRecord, AttemptStarted, FirstStep, Noted, Placed
from training.recovery.decision import Decision
from training.recovery.events import RecoveryBegan, RecoveryEnded
from training.recovery.faults import Fault, FaultClass
from training.recovery.rungs import Rung
from training.specs.drill import DrillFault, DrillKind, DrillPoint

EPOCH = 1
FAULT = Fault(fault_class=FaultClass.LINK_DOWN, at_s=3.0, evidence="gloo")


def fault(step: int, point: DrillPoint = DrillPoint.PREPARED, times: int = 1) -> DrillFault:
    return DrillFault(kind=DrillKind.LINK, rank=1, step=step, point=point, times=times)


def history(
    *, rung: Rung = Rung.STEP_RETRY, goes_on_from: int | None = None, restarted_from: int = 0
) -> RunHistory:
    """A run with one recovery inside its processes, and then perhaps a restart."""
    one: dict[str, Any] = {"placement": 1, "attempt": 1, "epoch": EPOCH}
    two = {**one, "attempt": 2}
    notes = (
        RecoveryBegan(
            at_s=3.0, number=1, generation=1, fault=FAULT, decision=Decision(rung, None, "r")
        ),
        RecoveryEnded(at_s=4.0, number=1, generation=2, succeeded=True, step=goes_on_from),
    )
    records: list[AnyRecord] = [
        Placed(at_s=1.0, placement=1, members=(), avoid=(), epoch=EPOCH),
        AttemptStarted(at_s=2.0, from_step=0, **one),
        *(Noted(at_s=note.at_s, note=note, **one) for note in notes),
    ]
    if restarted_from:
        first = restarted_from + 1
        records += [
            AttemptStarted(at_s=5.0, from_step=restarted_from, **two),
            FirstStep(at_s=6.0, step=first, stepped_s=6.0, **two),
        ]
    return replay(records)


def reasons(campaign: Campaign, past: RunHistory, **given) -> list[str | None]:
    told = {"fired": (), "killed": (), "looks": {}, **given}
    return [one.reason for one in missed(campaign, past, **told)]


def test_what_happened_is_not_missed_though_it_might_have_come_again():
    campaign = Campaign(
        steps=20, faults=(fault(5, times=2),), kills=(Kill(victim=Victim.NODE, step=7),)
    )
    assert missed(campaign, history(), fired=[0], killed=[0], looks={0: 9}) == []


@pytest.mark.parametrize(
    ("one", "past", "is_excused"),
    [
        pytest.param(fault(8), history(goes_on_from=7), False, id="its step was done again"),
        pytest.param(fault(8), history(goes_on_from=8), True, id="others had done its step"),
        pytest.param(fault(8), history(restarted_from=8), True, id="a save held its step"),
        pytest.param(fault(9), history(restarted_from=8), False, id="its step came after a save"),
        pytest.param(
            fault(8), history(rung=Rung.OPERATOR_RETRY, goes_on_from=8), False, id="new links alone"
        ),
        pytest.param(
            fault(8, DrillPoint.RECOVERY), history(goes_on_from=6), True, id="no late recovery"
        ),
        pytest.param(
            fault(8, DrillPoint.RECOVERY), history(goes_on_from=7), False, id="a late recovery"
        ),
    ],
)
def test_a_fault_is_excused_where_its_rank_could_not_come_to_its_point(one, past, is_excused):
    (reason,) = reasons(Campaign(steps=20, faults=(one,)), past)
    assert (reason is not None) == is_excused


@pytest.mark.parametrize(("looks", "is_excused"), [(0, True), (1, True), (2, False)])
def test_a_kill_is_excused_only_when_the_run_was_over_before_a_second_look(looks, is_excused):
    kill = Kill(victim=Victim.FORK_SERVER, index=1, step=5)
    (reason,) = reasons(Campaign(steps=20, kills=(kill,)), history(), looks={0: looks})
    assert (reason is not None) == is_excused


def test_what_was_missed_is_told_for_a_person():
    kill = Kill(victim=Victim.FORK_SERVER, index=1, step=5)
    found = missed(
        Campaign(steps=20, faults=(fault(8),), kills=(kill,)),
        history(), fired=(), killed=(), looks={},
    )  # fmt: skip
    assert [one.what for one in found] == [
        "link of rank 1 at prepared of step 8",
        "kill of fork server 1 at step 5",
    ]
