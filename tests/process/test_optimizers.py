"""Several optimizers and batches of any form, through every way in which a state is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.storage.address import open_store
from perdure.training.config.drill import DrillFault, DrillKind, DrillPoint
from perdure.training.config.model import ParallelKind
from perdure.training.drill.driver import RunDriver, RunOutcome
from perdure.training.drill.evaluation import list_recoveries
from perdure.training.drill.job import drill_job
from perdure.training.journal.steps import read_kept_steps
from perdure.training.recovery.rungs import Rung
from tests.process.harness import REPO, assert_as_undisturbed
from tests.recipes.two_optimizers import rate
from tests.values import not_none

pytestmark = [pytest.mark.process, pytest.mark.alone, pytest.mark.long]

STEPS = 32
RETRY, REPLACE, IN_PLACE = Rung.STEP_RETRY, Rung.PROCESS_REPLACE, Rung.IN_PLACE_RESTART


def _fault(
    kind: DrillKind, step: int, rank: int, point: DrillPoint = DrillPoint.BACKWARD
) -> DrillFault:
    return DrillFault(kind=kind, rank=rank, step=step, point=point)


# From a replica, from a snapshot, into a new process, and from a checkpoint.
FAULTS = {
    ParallelKind.DDP: (
        [
            _fault(DrillKind.DEVICE_MEMORY, 6, 2),
            _fault(DrillKind.GRADIENT, 11, 1),
            _fault(DrillKind.KILL, 16, 3),
            # The others are in the collective behind apply(), and have moved their schedules.
            _fault(DrillKind.KILL, 19, 0, DrillPoint.APPLIED),
            *(_fault(DrillKind.KILL, 27, rank) for rank in range(4)),
        ],
        [RETRY, RETRY, REPLACE, REPLACE],
    ),
    ParallelKind.FSDP2: (
        [_fault(DrillKind.GRADIENT, 11, 1), _fault(DrillKind.KILL, 27, 2)],
        [RETRY],
    ),
}


def play(home: Path, name: str, kind: ParallelKind, faults: list[DrillFault]) -> RunOutcome:
    changes = {
        "worker": {"recipe": "tests.recipes.two_optimizers:main", "cwd": str(REPO)},
        "env": {"WRAP": kind},
        "checkpoint": {"every_steps": 8},
        "restart": {"numeric_retry": True, "snapshot_every_steps": 4, "abnormal_grad_norm": 1e3},
        "watch": {"consistency_every_steps": 1},
        "drill": {"faults": faults},
    }
    return RunDriver(home).run(drill_job(home, name, kind=kind, steps=STEPS, changes=changes))


def rates(home: Path, name: str) -> dict[int, float]:
    """The learning rate on record of every step that was kept."""
    store = drill_job(home, name, kind=ParallelKind.DDP, steps=STEPS, changes={}).storage
    return {
        step: not_none(record.lr)
        for step, record in read_kept_steps(open_store(store), name).items()
    }


@pytest.mark.parametrize("kind", list(FAULTS))
def test_two_optimizers_and_batches_with_names_come_through_faults_bit_for_bit(home, kind):
    faults, rungs = FAULTS[kind]
    played = play(home, f"broken-{kind}", kind, faults)
    assert [len(played.fired_s[number]) for number in range(len(faults))] == [1] * len(faults)
    first, second = played.history.attempts
    assert [one.rung for one in list_recoveries(played.history)][: len(rungs)] == rungs
    assert first.decision is not None
    assert first.decision.rung is IN_PLACE
    assert second.from_step == 24
    assert_as_undisturbed(played, play(home, f"whole-{kind}", kind, []), steps=STEPS)
    for name in (f"broken-{kind}", f"whole-{kind}"):
        assert rates(home, name) == {step: rate(step) for step in range(1, STEPS + 1)}
