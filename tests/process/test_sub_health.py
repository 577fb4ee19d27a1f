"""A node whose connections broke is used no more when the run is placed anew."""

from __future__ import annotations

import pytest

from perdure.training.config.drill import DrillFault, DrillKind, DrillPoint
from perdure.training.config.model import ParallelKind
from perdure.training.drill.driver import RunDriver, RunOutcome
from perdure.training.drill.job import drill_job
from perdure.training.journal.records import Placed
from perdure.training.recovery.rungs import Rung
from tests.process.harness import assert_as_undisturbed

pytestmark = [pytest.mark.process, pytest.mark.alone, pytest.mark.long]

STEPS = 16
LINK = DrillFault(kind=DrillKind.LINK, rank=1, step=4, point=DrillPoint.REDUCING)
NAN = DrillFault(kind=DrillKind.NOT_A_NUMBER, rank=3, step=9)


@pytest.fixture(scope="module")
def play(home):
    def play(name: str, *faults: DrillFault) -> RunOutcome:
        changes = {
            "checkpoint": {"every_steps": 6},
            "comm": {"link_retry": True},
            # What is left for an abnormal step places the run anew, and blames no node.
            "restart": {"process_replace": False, "in_place": False},
            "drill": {"faults": list(faults)},
        }
        kind = ParallelKind.DDP
        return RunDriver(home).run(drill_job(home, name, kind=kind, steps=STEPS, changes=changes))

    return play


@pytest.fixture(scope="module")
def undisturbed(play) -> RunOutcome:
    return play("whole")


def nodes_of(placed: Placed) -> set[str]:
    return {member.node for member in placed.members}


def test_a_new_placement_leaves_a_node_whose_link_broke_for_a_spare_and_says_why(play, undisturbed):
    played = play("link-and-nan", LINK, NAN)
    assert [len(played.fired_s[number]) for number in range(2)] == [1, 1]
    first, second = played.history.placements
    assert nodes_of(first) == {"node-0", "node-1"}
    (recovery,) = played.history.attempts[0].recoveries
    assert (recovery.began.decision.rung, recovery.began.fault.node) == (
        Rung.OPERATOR_RETRY,
        "node-0",
    )
    assert played.history.attempts[0].decision is not None
    assert played.history.attempts[0].decision.rung is Rung.JOB_RESCHEDULE
    assert nodes_of(second) == {"node-1", "node-2"}
    assert second.sub_healthy == {"node-0": "its connections broke and were made again at step 3"}
    assert played.history.isolated == ()
    assert_as_undisturbed(played, undisturbed, steps=STEPS)


def test_without_the_broken_link_the_run_is_placed_where_it_was(play, undisturbed):
    played = play("nan", NAN)
    assert len(played.fired_s[0]) == 1
    first, second = played.history.placements
    assert nodes_of(first) == nodes_of(second) == {"node-0", "node-1"}
    assert second.sub_healthy == {}
    assert_as_undisturbed(played, undisturbed, steps=STEPS)
