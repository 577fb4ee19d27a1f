"""The end-of-life checkpoint of eight ranks in two replicas, of which some die for good.

Ranks 0 to 3 share one copy of the state, ranks 4 to 7 the other: [0, 4], [1, 5], [2, 6] and
[3, 7] hold the same. One run loses one of them, then one of each of three groups, then both of
one group at once, then the second of them while it saves in the first one's place; no process is
ever started in the place of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perdure.storage.address import open_store
from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.errors import NotFound
from perdure.training.config.drill import DrillFault, DrillKind, DrillPoint
from perdure.training.config.job import Job
from perdure.training.config.model import ParallelKind
from perdure.training.drill.driver import RunDriver, RunOutcome
from perdure.training.drill.evaluation import list_recoveries
from perdure.training.drill.job import drill_job
from perdure.training.journal.attempt_view import AttemptView
from perdure.training.recovery.rungs import Rung
from tests.process.harness import assert_as_undisturbed

pytestmark = [pytest.mark.process, pytest.mark.alone, pytest.mark.long]

STEPS = 46
SAVE_EVERY_STEPS = 12
NUM_RANKS = 8
ONE, SEVERAL, BOTH, SAVER = 8, 19, 31, 42  # steps in which ranks die, none right after a save


def kills(step: int, *ranks: int, at: DrillPoint = DrillPoint.BACKWARD) -> tuple[DrillFault, ...]:
    return tuple(DrillFault(kind=DrillKind.KILL, rank=rank, step=step, point=at) for rank in ranks)


FAULTS = (
    *kills(ONE, 1),
    *kills(SEVERAL, 2, 4, 7),
    *kills(BOTH, 1, 5),
    *kills(SAVER, 1),
    *kills(SAVER, 5, at=DrillPoint.RECOVERY),
)
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "engine": {"slots_per_node": NUM_RANKS // 2, "spares": 0},
    "checkpoint": {"every_steps": SAVE_EVERY_STEPS, "keep_last": 9},
    "restart": {"process_replace": False},
    "env": {"OMP_NUM_THREADS": "1"},
}


@dataclass(frozen=True)
class Ended:
    """A run of eight ranks and what it left."""

    job: Job
    played: RunOutcome

    @property
    def attempts(self) -> list[AttemptView]:
        """One after each of the deaths, and the first."""
        return list(self.played.history.attempts)

    def has_committed(self, step: int) -> bool:
        """Whether the store has a checkpoint of a step."""
        checkpoints = CheckpointStore(open_store(self.job.storage), self.job.run_id)
        try:
            return checkpoints.manifest(step).step == step
        except NotFound:
            return False


def play(home: Path, name: str, **changes: Any) -> Ended:
    job = drill_job(home, name, kind=ParallelKind.HSDP, steps=STEPS, changes={**CHANGES, **changes})
    return Ended(job, RunDriver(home).run(job))


@pytest.fixture(scope="module")
def bereaved(home) -> Ended:
    """The run that meets them all."""
    return play(home, "bereaved", drill={"faults": FAULTS})


def test_every_death_came_and_ended_the_processes(bereaved):
    assert bereaved.job.layout.replica_groups() == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert {n: len(times) for n, times in bereaved.played.fired_s.items()} == dict.fromkeys(
        range(len(FAULTS)), 1
    )
    assert [one.rung for one in list_recoveries(bereaved.played.history)] == [
        Rung.IN_PLACE_RESTART
    ] * 4
    assert [view.recoveries for view in bereaved.attempts] == [[]] * 5


@pytest.mark.parametrize(
    ("number", "step", "savers"),
    [
        pytest.param(0, ONE, (0, 2, 3, 5), id="one rank died"),
        pytest.param(1, SEVERAL, (0, 1, 3, 6), id="one of each of three groups died"),
    ],
)
def test_one_survivor_of_each_group_saves_and_the_next_attempt_goes_on_exactly_there(
    bereaved, number, step, savers
):
    saved = bereaved.attempts[number].last_save
    assert (saved.step, saved.ranks, saved.why) == (step - 1, savers, "")
    assert bereaved.has_committed(step - 1)
    assert bereaved.attempts[number + 1].from_step == step - 1
    assert list_recoveries(bereaved.played.history)[number].steps_lost == 0


def test_a_group_without_a_survivor_is_named_and_nothing_is_written(bereaved):
    saved = bereaved.attempts[2].last_save
    assert saved.step is None
    assert saved.why == "no rank of [1, 5] lives: their state is lost"
    assert not bereaved.has_committed(BOTH - 1)
    assert bereaved.attempts[3].from_step == BOTH - BOTH % SAVE_EVERY_STEPS


def test_what_the_others_have_saved_is_nothing_when_one_of_them_dies_over_it(bereaved):
    saved = bereaved.attempts[3].last_save
    assert (saved.step, saved.ranks) == (None, (0, 2, 3, 5))
    assert saved.why
    assert not bereaved.has_committed(SAVER - 1)
    assert bereaved.attempts[4].from_step == SAVER - SAVER % SAVE_EVERY_STEPS


def test_no_digit_of_the_run_differs_from_one_without_a_death(home, bereaved):
    undisturbed = play(home, "undisturbed").played
    assert_as_undisturbed(bereaved.played, undisturbed, steps=STEPS)
    assert len(bereaved.played.state) == NUM_RANKS


def test_the_step_is_on_record_that_the_first_rank_died_over_once_all_had_voted(home):
    quick = {"engine": {"slots_per_node": 2, "spares": 0}, "checkpoint": {"every_steps": 10}}
    died = kills(13, 0, at=DrillPoint.VOTED)
    bereaved, undisturbed = (
        play(home, name, drill={"faults": faults}, **quick).played
        for name, faults in (("first-voted", died), ("whole", ()))
    )
    assert len(bereaved.fired_s[0]) == 1
    saved = bereaved.history.attempts[0].last_save
    assert saved is not None
    assert saved.step == 13, "the others had completed it"
    assert_as_undisturbed(bereaved, undisturbed, steps=STEPS)
