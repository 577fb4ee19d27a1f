"""Campaigns: drawn from a seed, written down, read back."""

from __future__ import annotations

import pytest

from training.drill.campaign import (
    FIRST_STEP,
    POINTS,
    SAVE_EVERY_STEPS,
    Campaign,
    draw,
    read_campaign,
    write_campaign,
)
from training.drill.job import NUM_RANKS, drill_job
from training.errors import InputError
from training.injection.outside import Kill, Victim
from training.specs.drill import DrillFault, DrillKind, DrillPoint
from training.specs.model import ParallelKind

KINDS = (ParallelKind.DDP, ParallelKind.HSDP, ParallelKind.FSDP2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_draws_the_same_campaign_and_another_seed_another(kind):
    assert draw(7, num_faults=50, kind=kind) == draw(7, num_faults=50, kind=kind)
    assert draw(7, num_faults=50, kind=kind) != draw(8, num_faults=50, kind=kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_every_campaign_is_a_job_that_is_broken_as_often_as_asked(tmp_path, seed, kind):
    campaign = draw(seed, num_faults=50, kind=kind)
    assert campaign.size == 50
    faults = {"drill": {"faults": [one.model_dump() for one in campaign.faults]}}
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
    drawn = [draw(seed, num_faults=50, kind=ParallelKind.DDP) for seed in range(20)]
    faults = [fault for campaign in drawn for fault in campaign.faults]
    assert {fault.kind for fault in faults} == set(DrillKind)
    assert {fault.point for fault in faults} == set(DrillPoint)
    assert {kill.victim for campaign in drawn for kill in campaign.kills} == set(Victim)


def test_every_other_seed_has_broken_links_mended_under_the_operations():
    drawn = [draw(seed, num_faults=3, kind=ParallelKind.HSDP) for seed in (1, 2, 3, 4)]
    assert [one.overrides["comm"]["link_retry"] for one in drawn] == [False, True, False, True]


def test_an_abnormal_step_never_comes_back_for_it_would_be_accepted():
    drawn = [draw(seed, num_faults=50, kind=ParallelKind.DDP) for seed in range(20)]
    gradients = [
        fault for campaign in drawn for fault in campaign.faults if fault.kind is DrillKind.GRADIENT
    ]
    assert {fault.times for fault in gradients} == {1}


def test_a_part_of_a_campaign_has_the_faults_of_these_places_alone():
    whole = Campaign(
        steps=9,
        faults=tuple(DrillFault(kind=DrillKind.KILL, rank=r, step=5) for r in range(3)),
        kills=(
            Kill(victim=Victim.NODE, index=1, step=7),
            Kill(victim=Victim.CHECKPOINT_SERVER, step=8),
        ),
    )
    part = whole.only([0, 2, 4])
    assert [fault.rank for fault in part.faults] == [0, 2]
    assert [kill.victim for kill in part.kills] == [Victim.CHECKPOINT_SERVER]


def test_a_person_starts_the_run_again_after_each_error_of_the_program():
    error = DrillFault(kind=DrillKind.EXCEPTION, rank=0, step=5, times=2)
    assert Campaign(steps=9, faults=(error,)).starts == 3


def test_a_campaign_is_read_back_as_it_was_written(tmp_path):
    campaign = draw(3, num_faults=20, kind=ParallelKind.HSDP)
    write_campaign(tmp_path / "kept" / "one.json", campaign)
    assert read_campaign(tmp_path / "kept" / "one.json") == campaign


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "No such file"),
        ("{", "is not JSON"),
        ('{"faults": []}', "steps: Field required"),
        ('{"steps": 9, "kills": [{"victim": "cat", "step": 1}]}', "kills.0.victim"),
    ],
)
def test_a_file_that_is_no_campaign_is_refused_in_one_line(tmp_path, text, told):
    path = tmp_path / "campaign.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError) as refused:
        read_campaign(path)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)
