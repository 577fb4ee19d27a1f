"""Campaigns: drawn from a seed, written to a file, and what of them did not fire."""

from __future__ import annotations

import pytest

from perdure.training.config.drill import DrillFault, DrillKind, DrillPoint, Kill, Victim
from perdure.training.config.model import ParallelKind
from perdure.training.drill.campaign import (
    FIRST_STEP,
    POINTS,
    SAVE_EVERY_STEPS,
    Campaign,
)
from perdure.training.drill.job import NUM_RANKS, drill_job
from perdure.training.errors import InputError
from perdure.training.journal.history import RunHistory, replay
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.rungs import Rung
from tests.unit.journal.histories import began, ended, placed, seen, started, stepped

KINDS = (ParallelKind.DDP, ParallelKind.HSDP, ParallelKind.FSDP2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_draws_the_same_campaign_and_another_seed_another(kind):
    assert Campaign.draw(7, num_faults=50, kind=kind) == Campaign.draw(7, num_faults=50, kind=kind)
    assert Campaign.draw(7, num_faults=50, kind=kind) != Campaign.draw(8, num_faults=50, kind=kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_every_campaign_is_a_job_that_is_broken_as_often_as_asked(tmp_path, seed, kind):
    campaign = Campaign.draw(seed, num_faults=50, kind=kind)
    assert campaign.size == 50
    faults = {"drill": {"faults": [fault.model_dump() for fault in campaign.faults]}}
    job = drill_job(
        tmp_path,
        "chaos",
        kind=kind,
        steps=campaign.steps,
        changes={**campaign.overrides, **faults},
    )
    assert job.drill.faults == campaign.faults
    for fault in campaign.faults:
        assert fault.rank < NUM_RANKS
        assert FIRST_STEP - SAVE_EVERY_STEPS < fault.step <= campaign.steps
        assert fault.point in POINTS[fault.kind]
        if fault.point is DrillPoint.SAVE:
            assert fault.step % SAVE_EVERY_STEPS == 0


def test_twenty_seeds_break_everything_that_can_be_broken():
    drawn = [Campaign.draw(seed, num_faults=50, kind=ParallelKind.DDP) for seed in range(20)]
    faults = [fault for campaign in drawn for fault in campaign.faults]
    assert {fault.kind for fault in faults} == set(DrillKind)
    assert {fault.point for fault in faults} == set(DrillPoint) - {DrillPoint.RESTORE}
    assert {kill.victim for campaign in drawn for kill in campaign.kills} == set(Victim)


def test_on_devices_nothing_is_drawn_that_only_gloo_has():
    drawn = [
        Campaign.draw(seed, num_faults=50, kind=ParallelKind.DDP, is_of_gloo=False)
        for seed in range(20)
    ]
    faults = [fault for campaign in drawn for fault in campaign.faults]
    assert {fault.kind for fault in faults} == set(DrillKind) - {DrillKind.LINK}
    never = {DrillPoint.RESTORE, DrillPoint.REDUCING}
    assert {fault.point for fault in faults} == set(DrillPoint) - never
    assert not any(campaign.overrides["comm"]["link_retry"] for campaign in drawn)


def test_every_other_seed_has_operator_retry_on():
    drawn = [Campaign.draw(seed, num_faults=3, kind=ParallelKind.HSDP) for seed in (1, 2, 3, 4)]
    assert [campaign.overrides["comm"]["link_retry"] for campaign in drawn] == [
        False,
        True,
        False,
        True,
    ]


def test_an_abnormal_step_fires_once_because_the_second_time_is_accepted():
    drawn = [Campaign.draw(seed, num_faults=50, kind=ParallelKind.DDP) for seed in range(20)]
    gradients = [
        fault for campaign in drawn for fault in campaign.faults if fault.kind is DrillKind.GRADIENT
    ]
    assert {fault.times for fault in gradients} == {1}


def test_a_part_of_a_campaign_has_only_the_chosen_faults():
    whole = Campaign(
        steps=9,
        faults=tuple(DrillFault(kind=DrillKind.KILL, rank=r, step=5) for r in range(3)),
        kills=(
            Kill(victim=Victim.NODE, index=1, step=7),
            Kill(victim=Victim.CHECKPOINT_SERVER, step=8),
        ),
    )
    part = whole.select([0, 2, 4])
    assert [fault.rank for fault in part.faults] == [0, 2]
    assert [kill.victim for kill in part.kills] == [Victim.CHECKPOINT_SERVER]


def test_the_run_is_started_again_after_each_error_of_the_program():
    error = DrillFault(kind=DrillKind.EXCEPTION, rank=0, step=5, times=2)
    assert Campaign(steps=9, faults=(error,)).starts == 3


def test_a_campaign_is_read_back_as_it_was_written(tmp_path):
    campaign = Campaign.draw(3, num_faults=20, kind=ParallelKind.HSDP)
    campaign.write(tmp_path / "kept" / "one.json")
    assert Campaign.read(tmp_path / "kept" / "one.json") == campaign


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "No such file"),
        ("{", "is not JSON"),
        ('{"faults": []}', "steps: Field required"),
        ('{"steps": 9, "kills": [{"victim": "cat", "step": 1}]}', "kills.0.victim"),
    ],
)
def test_a_file_that_is_no_campaign_is_refused_in_one_line(tmp_path, text, problem):
    path = tmp_path / "campaign.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError) as refused:
        Campaign.read(path)
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)


FAULT = Fault(fault_class=FaultClass.LINK_DOWN, at_s=3.0, evidence="gloo")


def fault(step: int, point: DrillPoint = DrillPoint.PREPARED, times: int = 1) -> DrillFault:
    return DrillFault(kind=DrillKind.LINK, rank=1, step=step, point=point, times=times)


def history(
    *, rung: Rung = Rung.STEP_RETRY, goes_on_from: int | None = None, restarted_from: int = 0
) -> RunHistory:
    """A run with one recovery inside its processes, and then perhaps a restart."""
    events = (began(1, rung, FAULT), ended(1, goes_on_from))
    records = [placed(num_nodes=0), started(1, 0), *seen(*events)]
    if restarted_from:
        records += [started(2, restarted_from), stepped(2, restarted_from + 1, 6.0)]
    return replay(records)


def reasons(campaign: Campaign, past: RunHistory, **changes) -> list[str | None]:
    options = {"fired": (), "killed": (), "num_due": {}, **changes}
    return [unfired_fault.reason for unfired_fault in campaign.find_unfired(past, **options)]


def test_what_fired_once_counts_though_it_might_have_fired_again():
    campaign = Campaign(
        steps=20, faults=(fault(5, times=2),), kills=(Kill(victim=Victim.NODE, step=7),)
    )
    assert campaign.find_unfired(history(), fired=[0], killed=[0], num_due={0: 9}) == []


@pytest.mark.parametrize(
    ("one", "past", "is_excused"),
    [
        pytest.param(fault(8), history(goes_on_from=7), False, id="its step was executed again"),
        pytest.param(fault(8), history(goes_on_from=8), True, id="others had executed its step"),
        pytest.param(fault(8), history(restarted_from=8), True, id="a save held its step"),
        pytest.param(fault(9), history(restarted_from=8), False, id="its step came after a save"),
        pytest.param(
            fault(8),
            history(rung=Rung.OPERATOR_RETRY, goes_on_from=8),
            False,
            id="reconnected below the step",
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


@pytest.mark.parametrize(("num_due", "is_excused"), [(0, True), (1, True), (2, False)])
def test_a_kill_is_excused_only_when_the_run_was_over_before_a_second_poll(num_due, is_excused):
    kill = Kill(victim=Victim.FORK_SERVER, index=1, step=5)
    (reason,) = reasons(Campaign(steps=20, kills=(kill,)), history(), num_due={0: num_due})
    assert (reason is not None) == is_excused


def test_what_did_not_fire_has_a_description():
    kill = Kill(victim=Victim.FORK_SERVER, index=1, step=5)
    campaign = Campaign(steps=20, faults=(fault(8),), kills=(kill,))
    missing = campaign.find_unfired(
        history(), fired=(), killed=(), num_due={},
    )  # fmt: skip
    assert [unfired_fault.description for unfired_fault in missing] == [
        "link of rank 1 at prepared of step 8",
        "kill of fork server 1 at step 5",
    ]


def test_nothing_is_to_be_killed_twice_in_one_step():
    for seed in range(40):
        kills = Campaign.draw(seed, num_faults=50, kind=ParallelKind.DDP).kills
        assert len(set(kills)) == len(kills)
