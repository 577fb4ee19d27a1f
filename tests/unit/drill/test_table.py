"""The table of drills, and the names that the command line knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.drill.drilling import KINDS, Drilling, chosen, parallel_kind
from training.drill.job import NUM_RANKS
from training.drill.table import DRILLS, STEPS
from training.errors import InputError
from training.recovery.rungs import Rung


def test_names_are_unlike_and_all_means_every_one():
    names = [drill.name for drill in DRILLS]
    assert len(set(names)) == len(names)
    assert chosen("all") == DRILLS
    assert [drill.name for drill in chosen("tre")] == ["tre"]


def test_every_rung_has_a_drill_but_the_one_that_answers_what_nobody_can_explain():
    drilled = {rung for drill in DRILLS for rung in drill.expected.rungs}
    assert set(Rung) - drilled == {Rung.JOB_RESCHEDULE}


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.name)
def test_a_drill_breaks_something_within_the_run(drill):
    steps = [fault.step for fault in drill.faults]
    assert steps or drill.pauses_at
    assert all(1 < step < STEPS for step in steps)
    assert all(fault.rank < NUM_RANKS for fault in drill.faults)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.name)
def test_a_drill_is_a_job_with_each_kind_of_parallelism(tmp_path, drill, kind):
    job = Drilling(tmp_path, kind).job(drill)
    assert job.run_id == f"{drill.name}-{kind}"
    assert job.parallelism.kind is kind


def test_the_drill_of_a_state_that_is_lost_hits_every_rank_that_holds_it(tmp_path):
    (drill,) = chosen("replica-holder-dies")
    hit = {
        kind: sorted(fault.rank for fault in Drilling(tmp_path, kind).job(drill).drill.faults)
        for kind in KINDS
    }
    assert [hit[kind] for kind in KINDS] == [[0, 1, 2, 3], [0, 2], [0]]


def test_a_name_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(InputError, match=r"name: 'nope': no such drill; there are all, .*, pause"):
        chosen("nope")
    with pytest.raises(InputError, match=r"parallelism: 'tp': must be one of ddp, hsdp, fsdp2"):
        parallel_kind("tp")


def test_the_docs_have_every_drill_with_what_it_does():
    text = (Path(__file__).parents[3] / "docs" / "recovery.md").read_text(encoding="utf-8")
    for drill in DRILLS:
        assert f"| `{drill.name}` | {drill.injected} |" in text
