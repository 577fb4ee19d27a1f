"""Which samples each step trains, in frameworks whose loaders have workers, with ranks killed.

Compared are the samples themselves, batch by batch on every rank, and the losses, with an
undisturbed run of the same program. A checkpoint is saved after every step, and 60 samples on two
ranks give each epoch a short last batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perdure.training.config.job import parse_job
from perdure.training.drill.driver import RunDriver, RunOutcome
from tests.process.framework_runs import fault
from tests.process.harness import RECIPES

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 12
# Of the steps in an epoch, 3 with accumulation and 8 without, all are killed in somewhere.
KILLS = (fault("kill", 0, 2), fault("kill", 1, 3), fault("kill", 0, 7), fault("kill", 1, 9))
RESTARTED = {"process_replace": False, "end_of_life_checkpoint": False}

Samples = Mapping[str, Mapping[tuple[int, int], list[int]]]


@dataclass(frozen=True)
class OrderRun:
    """A run that is over, and the samples that its steps have trained, by rank, step and batch."""

    played: RunOutcome
    samples: Samples


def play(home: Path, name: str, script: str, **changes: Any) -> OrderRun:
    out = home / name
    job = parse_job(
        {
            "run_id": name,
            "storage": {"address": f"file://{home / 'store'}"},
            "steps": STEPS,
            "seed": 11,
            "worker": {
                "script": ["sample_order.py", *script.split(), "--out", str(out)],
                "cwd": str(RECIPES),
            },
            "checkpoint": {"every_steps": 1},
            "preflight": {"nodes": False},
            "engine": {"nodes": 1, "slots_per_node": 2, "spares": 0, "warm_spares": 0},
            **changes,
        }
    )
    return OrderRun(RunDriver(home).run(job), read_samples(out))


def read_samples(folder: Path) -> Samples:
    """The last execution of each batch counts: a step may be done again."""
    by_rank: dict[str, dict[tuple[int, int], list[int]]] = {}
    for path in sorted(folder.glob("order-*.jsonl")):
        lines = map(json.loads, path.read_text().splitlines())
        by_rank[path.stem] = {(step, batch): samples for step, batch, samples in lines}
    return by_rank


def assert_same(run: OrderRun, undisturbed: OrderRun) -> None:
    assert (run.played.ended, undisturbed.played.ended) == ("completed", "completed")
    for rank, samples in undisturbed.samples.items():
        assert {step for step, _ in samples} == set(range(1, STEPS + 1))
        assert run.samples[rank] == samples
    assert run.samples.keys() == undisturbed.samples.keys() == {"order-0", "order-1"}
    assert run.played.curve == undisturbed.played.curve


@pytest.mark.parametrize(
    "script",
    [
        "lightning --workers 2 --persistent --accumulate 3",
        "lightning --workers 4 --drop_last",
        "lightning --stream --workers 1 --accumulate 2",
        "trainer --workers 2 --accumulate 3",
        "trainer --workers 1 --persistent --drop_last",
        "trainer --stream --workers 2 --accumulate 2 --max_steps 12",
        "accelerate --workers 2 --persistent --accumulate 3",
        "accelerate --workers 1 --drop_last",
        "accelerate --stream --workers 2 --accumulate 2",
    ],
)
def test_a_run_that_is_restarted_anywhere_in_its_epochs_trains_the_same_samples(home, script):
    name = script.replace(" --", "-").replace(" ", "-").replace("_", "-")
    undisturbed = play(home, f"{name}-still", script)
    killed = play(home, f"{name}-killed", script, drill={"faults": KILLS}, restart=RESTARTED)
    assert [view.from_step for view in killed.played.history.attempts] == [0, 1, 2, 6, 8]
    assert_same(killed, undisturbed)


@pytest.mark.parametrize("framework", ["lightning", "trainer", "accelerate"])
def test_a_replaced_rank_draws_the_samples_of_the_one_before_it(home, framework):
    script = f"{framework} --workers 2 --persistent --accumulate 3"
    undisturbed = play(home, f"{framework}-alone", script)
    # At the end of an epoch the first rank is killed behind its vote.
    faults = [fault("kill", 1, 2), fault("kill", 0, 3, "voted"), fault("kill", 1, 8)]
    replaced = play(home, f"{framework}-replaced", script, drill={"faults": faults})
    (attempt,) = replaced.played.history.attempts
    assert len(attempt.recoveries) == len(faults)
    assert_same(replaced, undisturbed)
