"""Programs with tensor or pipeline parallelism of their own: ranks are repaired from replicas."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from perdure.training.config.drill import DrillFault, DrillKind, DrillPoint
from perdure.training.config.model import ParallelKind
from perdure.training.drill.driver import RunDriver, RunOutcome
from perdure.training.drill.evaluation import list_recoveries
from perdure.training.drill.job import drill_job
from perdure.training.recovery.rungs import Rung
from tests.process.harness import REPO, assert_as_undisturbed

pytestmark = [pytest.mark.process, pytest.mark.alone, pytest.mark.long]

STEPS = 24


def _kill(step: int, rank: int, point: DrillPoint = DrillPoint.PREPARED) -> DrillFault:
    return DrillFault(kind=DrillKind.KILL, rank=rank, step=step, point=point)


def faults(of_both_parts: tuple[int, int], replicas: tuple[int, int]) -> list[DrillFault]:
    """Of one rank, of its device's memory, of one whole copy of the model, of all of a part."""
    one, _ = of_both_parts
    lost, holder = replicas
    memory = DrillFault(kind=DrillKind.DEVICE_MEMORY, rank=one, step=10, point=DrillPoint.PREPARED)
    return [
        _kill(6, one),
        memory,
        *(_kill(13, rank) for rank in of_both_parts),
        _kill(20, lost),
        # In the same step one death would mostly prevent the other.
        _kill(20, holder, DrillPoint.RECOVERY),
    ]


# With tensor parallelism [0, 1] and [2, 3] are copies of the model, [0, 2] and [1, 3] replicas;
# with a pipeline it is the other way round.
ACROSS = faults((2, 3), (1, 3))
NEIGHBOURS = faults((1, 3), (2, 3))
SPLIT, STAGED = "tests.recipes.split:main", "tests.recipes.staged:main"
PROGRAMS: list[tuple[str, dict[str, str], dict[str, Any], list[DrillFault]]] = [
    (SPLIT, {"STYLE": "dtensor", "LAYOUT": "own"}, {}, ACROSS),
    (SPLIT, {"STYLE": "plain"}, {"tensor": 2}, ACROSS),
    (STAGED, {}, {}, NEIGHBOURS),
]


def play(
    home: Path,
    name: str,
    recipe: str,
    env: Mapping[str, str],
    parallelism: Mapping[str, Any],
    faults: list[DrillFault],
) -> RunOutcome:
    changes = {
        "worker": {"recipe": recipe, "cwd": str(REPO)},
        "env": env,
        "checkpoint": {"every_steps": 8},
        "watch": {"consistency_every_steps": 1},
        "parallelism": parallelism,
        "drill": {"faults": faults},
    }
    return RunDriver(home).run(
        drill_job(home, name, kind=ParallelKind.DDP, steps=STEPS, changes=changes)
    )


@pytest.mark.parametrize(
    ("recipe", "env", "parallelism", "faults"),
    PROGRAMS,
    ids=["tensor, the session's layout", "tensor, the job's layout", "pipeline"],
)
def test_a_rank_of_a_split_model_gets_its_state_from_its_replica(
    home, request, recipe, env, parallelism, faults
):
    name = request.node.callspec.id.replace(", the ", "-").replace(" ", "-").replace("'", "")
    played = play(home, f"broken-{name}", recipe, env, parallelism, faults)
    assert [len(played.fired_s[number]) for number in range(len(faults))] == [1] * len(faults)
    rungs = [one.rung for one in list_recoveries(played.history)]
    assert rungs[:2] == [Rung.PROCESS_REPLACE, Rung.STEP_RETRY]
    # The last two kills leave no rank with the part: all go back to the last checkpoint.
    first, second = played.history.attempts
    assert first.decision is not None
    assert first.decision.rung is Rung.IN_PLACE_RESTART
    assert second.from_step == 16
    whole = play(home, f"whole-{name}", recipe, env, parallelism, [])
    assert_as_undisturbed(played, whole, steps=STEPS)
