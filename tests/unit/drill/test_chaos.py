"""What the program that plays campaigns makes of their faults."""

from __future__ import annotations

from training.drill.campaign import Campaign
from training.drill.chaos import _result
from training.drill.driver import RunOutcome
from training.injection.outside import Kill, KillInjector, LocalRun, Victim
from training.journal.history import replay
from training.journal.records import AttemptStarted, Placed
from training.specs.drill import DrillFault, DrillKind, DrillPoint

QUIET = replay(
    [
        Placed(at_s=1.0, placement=1, members=(), avoid=(), epoch=1),
        AttemptStarted(at_s=2.0, placement=1, attempt=1, epoch=1, from_step=0),
    ]
)


def test_a_fault_that_did_not_happen_is_a_problem_and_one_that_could_not_is_told(tmp_path):
    campaign = Campaign(
        steps=20,
        faults=(
            DrillFault(kind=DrillKind.KILL, rank=0, step=4),
            DrillFault(kind=DrillKind.LINK, rank=1, step=8, point=DrillPoint.REDUCING),
            DrillFault(kind=DrillKind.KILL, rank=2, step=9, point=DrillPoint.RECOVERY),
        ),
        kills=(Kill(victim=Victim.FORK_SERVER, step=16),),
    )
    played = RunOutcome(
        history=QUIET, curve={}, state={}, fired_s={0: [1.0]}, left_over=(), ended="completed"
    )
    result = _result(
        campaign, played, played, KillInjector(LocalRun(tmp_path, "r"), campaign.kills), took_s=1.0
    )
    assert result.fired == 1
    assert result.problems == ("did not happen: link of rank 1 at reducing of step 8",)
    assert result.excused == (
        "kill of rank 2 at recovery of step 9: no recovery inside the processes came so late",
        "kill of fork server 0 at step 16: the run was over before somebody could look again",
    )
