"""What a program keeps beside its weights, through replaced ranks and restarts in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure.training.drill.driver import RunDriver, RunOutcome
from tests.process.framework_runs import fault
from tests.process.harness import REPO, assert_as_undisturbed, faulty_job

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 20
# A replaced rank before its gradient is reduced and behind its vote, then a restart in place.
FAULTS = (
    fault("kill", 1, 5), fault("kill", 0, 9, "voted"), fault("kill", 0, 15), fault("kill", 1, 15),
)  # fmt: skip


def play(home: Path, name: str, *faults: dict[str, Any]) -> RunOutcome:
    changes: dict[str, Any] = {
        "worker": {"recipe": "tests.recipes.average:main", "cwd": str(REPO)},
        "checkpoint": {"every_steps": 4},
        "drill": {"faults": list(faults)},
        "engine": {"kind": "local", "nodes": 1, "slots_per_node": 2, "spares": 0, "warm_spares": 0},
        "batch": {"global_batch_size": 8, "micro_batch_size": 4},
    }
    return RunDriver(home).run(faulty_job(home, name, steps=STEPS, **changes))


def averages(home: Path, name: str) -> set[str]:
    return {path.read_text() for path in (home / f"marks-{name}").glob("average-*")}


def test_an_average_of_weights_in_buffers_of_the_model_outlives_ranks_and_processes(home):
    undisturbed = play(home, "average-alone")
    killed = play(home, "average-killed", *FAULTS)
    assert len(killed.history.attempts) > 1
    assert_as_undisturbed(killed, undisturbed, steps=STEPS)
    assert averages(home, "average-killed") == averages(home, "average-alone")
    assert len(averages(home, "average-alone")) == 1
