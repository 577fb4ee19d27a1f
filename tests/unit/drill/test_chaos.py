"""The result of a campaign, and the fewest faults that still fail."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from perdure.training.config.drill import DrillFault, DrillKind, DrillPoint, Kill, Victim
from perdure.training.drill.campaign import Campaign
from perdure.training.drill.chaos import _result, shrink
from perdure.training.drill.driver import RunOutcome
from perdure.training.injection.outside import KillInjector
from perdure.training.journal.history import replay
from tests.unit.journal.histories import placed, started

QUIET = replay([placed(num_nodes=0), started(1, 0)])


def test_a_fault_that_did_not_fire_is_a_problem_and_one_that_could_not_is_excused(tmp_path):
    campaign = Campaign(
        steps=20,
        faults=(
            DrillFault(kind=DrillKind.KILL, rank=0, step=4),
            DrillFault(kind=DrillKind.LINK, rank=1, step=8, point=DrillPoint.REDUCING),
            DrillFault(kind=DrillKind.KILL, rank=2, step=9, point=DrillPoint.RECOVERY),
        ),
        kills=(Kill(victim=Victim.FORK_SERVER, step=16),),
    )
    outcome = RunOutcome(
        history=QUIET, curve={}, state={}, fired_s={0: [1.0]}, leftovers=(), ended="completed"
    )
    result = _result(
        campaign,
        outcome,
        outcome,
        KillInjector(campaign.kills),
        took_s=1.0,
    )
    assert result.fired == 1
    assert result.problems == ("did not fire: link of rank 1 at reducing of step 8",)
    assert result.excused == (
        "kill of rank 2 at recovery of step 9: no recovery inside the processes came so late",
        "kill of fork server 0 at step 16: the run was over before the next poll",
    )


NUM = 40


@given(st.sets(st.integers(0, NUM - 1), max_size=4))
def test_what_fails_together_is_all_that_is_left(culprits):
    def fails(part: Sequence[int]) -> bool:
        return culprits <= set(part)

    assert shrink(range(NUM), fails) == sorted(culprits)


@given(st.lists(st.sets(st.integers(0, NUM - 1), min_size=1, max_size=3), min_size=1, max_size=3))
def test_of_several_reasons_one_is_left_and_nothing_of_it_can_go(reasons):
    def fails(part: Sequence[int]) -> bool:
        return any(reason <= set(part) for reason in reasons)

    left = shrink(range(NUM), fails)
    assert fails(left)
    assert not any(fails([number for number in left if number != dropped]) for dropped in left)


def test_what_fails_without_any_fault_is_shrunk_to_nothing():
    sizes: list[int] = []

    def fails(part: Sequence[int]) -> bool:
        sizes.append(len(part))
        return True

    assert shrink(range(NUM), fails) == []
    assert sizes == [0]


def test_one_culprit_among_fifty_is_found_in_a_few_runs():
    sizes: list[int] = []

    def fails(part: Sequence[int]) -> bool:
        sizes.append(len(part))
        return 37 in part

    assert shrink(range(50), fails) == [37]
    assert len(sizes) < 20
