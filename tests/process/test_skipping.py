"""Batches that are skipped for good: the run is the one on the corpus without them, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from perdure.storage.address import open_store
from perdure.training.config.drill import DrillFault, DrillKind, DrillPoint
from perdure.training.config.job import Job
from perdure.training.config.model import ParallelKind
from perdure.training.drill.driver import RunDriver, RunOutcome
from perdure.training.drill.evaluation import differences, list_recoveries
from perdure.training.drill.job import drill_job
from perdure.training.journal.events import BatchSkipped
from perdure.training.journal.steps import read_kept_steps
from perdure.training.recovery.faults import FaultClass
from perdure.training.recovery.repair import SkippedBatch
from perdure.training.recovery.rungs import Rung
from perdure.training.runtime.step_loop.skipping import skipped_prefix
from tests.process.harness import REPO, assert_as_undisturbed
from tests.values import not_none

pytestmark = [pytest.mark.process, pytest.mark.alone, pytest.mark.long]

STEPS = 20
SAVE_EVERY = 10
AT_STEP = 13
BATCH = 8
STRETCH = [DrillFault(kind=DrillKind.GRADIENT, rank=1, step=AT_STEP, times=3)]


def kill(step: int, *ranks: int) -> list[DrillFault]:
    return [DrillFault(kind=DrillKind.KILL, rank=rank, step=step) for rank in ranks]


def job_of(
    home: Path,
    name: str,
    kind: ParallelKind,
    *,
    faults: Iterable[DrillFault] = (),
    omitted: Iterable[SkippedBatch] = (),
    **changes: dict[str, Any],
) -> Job:
    """A job that skips; `restart` in `changes` adds to its policy."""
    restart = {"data_skipping": True, "abnormal_grad_norm": 1e3, **changes.pop("restart", {})}
    sections = {
        "worker": {"recipe": "tests.recipes.omitting:main", "cwd": str(REPO)},
        "env": {"OMIT": " ".join(str(one.start) for one in omitted)},
        "batch": {"global_batch_size": BATCH, "micro_batch_size": 1},
        "checkpoint": {"every_steps": SAVE_EVERY},
        "watch": {"consistency_every_steps": 1},
        "restart": restart,
        "drill": {"faults": list(faults)},
        **changes,
    }
    return drill_job(home, name, kind=kind, steps=STEPS, changes=sections)


def on_record(job: Job) -> list[SkippedBatch]:
    """What the store has, oldest first."""
    store = open_store(job.storage)
    keys = sorted(info.key for info in store.list(skipped_prefix(job.run_id)))
    return [SkippedBatch.model_validate_json(store.get(key)) for key in keys]


def positions(job: Job) -> dict[int, int]:
    """Of every kept step, the samples consumed with it."""
    kept = read_kept_steps(open_store(job.storage), job.run_id)
    return {step: not_none(record.position) for step, record in kept.items()}


def skipped_in(played: RunOutcome) -> list[tuple[int, int, bool]]:
    """Attempt, first sample and whether it was known, of every skip in the ledger."""
    return [
        (number, event.batch.start, event.is_known)
        for number, view in enumerate(played.history.attempts, 1)
        for event in view.events
        if isinstance(event, BatchSkipped)
    ]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(ParallelKind.DDP, id="ddp"),
        pytest.param(ParallelKind.FSDP2, id="fsdp2"),
    ],
)
def test_an_abnormal_stretch_is_skipped_and_no_restart_brings_it_back(home, kind):
    faults = [*STRETCH, *kill(17, 0, 1, 2, 3)]
    job = job_of(home, f"skipping-{kind}", kind, faults=faults)
    played = RunDriver(home).run(job)
    assert [len(played.fired_s[number]) for number in range(5)] == [3, 1, 1, 1, 1]
    first = BATCH * (AT_STEP - 1)
    starts = [first, first + BATCH, first + 2 * BATCH]
    assert [one.start for one in on_record(job)] == starts
    assert {one.step for one in on_record(job)} == {AT_STEP}
    assert all((one.grad_norm or 0) > 1e3 for one in on_record(job))
    # The second attempt began before the stretch, whose faults do not come again.
    assert [view.from_step for view in played.history.attempts] == [0, SAVE_EVERY]
    assert skipped_in(played) == [
        *((1, start, False) for start in starts), *((2, start, True) for start in starts),
    ]  # fmt: skip
    consumed = {step: BATCH * (step + 3 * (step >= AT_STEP)) for step in range(1, STEPS + 1)}
    assert positions(job) == consumed
    without = job_of(home, f"without-{kind}", kind, omitted=on_record(job))
    assert_as_undisturbed(played, RunDriver(home).run(without), steps=STEPS)


@pytest.mark.parametrize(
    ("kind", "ranks"), [(ParallelKind.DDP, [0]), (ParallelKind.HSDP, [3])], ids=["ddp", "hsdp"]
)
def test_a_rank_that_is_replaced_in_the_middle_of_a_stretch_goes_on_with_the_batch_of_the_others(
    home, kind, ranks
):
    name = f"replaced-{kind}"
    # The batch is tried twice, so that of three faults two batches are left.
    faults = [*STRETCH, *kill(AT_STEP, *ranks), *kill(AT_STEP + 1, *ranks)]
    job = job_of(home, name, kind, faults=faults)
    played = RunDriver(home).run(job)
    assert [len(played.fired_s[number]) for number in range(3)] == [3, 1, 1]
    assert [one.rung for one in list_recoveries(played.history)] == [Rung.PROCESS_REPLACE] * 2
    first = BATCH * (AT_STEP - 1)
    assert [one.start for one in on_record(job)] == [first, first + BATCH]
    without = job_of(home, f"{name}-without", kind, omitted=on_record(job))
    assert_as_undisturbed(played, RunDriver(home).run(without), steps=STEPS)


def test_on_another_number_of_ranks_the_same_samples_stay_skipped(home):
    stop = DrillFault(kind=DrillKind.EXCEPTION, rank=2, step=16, point=DrillPoint.BACKWARD)
    policy = {"end_of_life_checkpoint": False}  # the next start begins before the stretch
    half = {"nodes": 1, "slots_per_node": 2, "spares": 0}

    def twice(name: str, faults: list[DrillFault], omitted: list[SkippedBatch]) -> RunOutcome:
        given: dict[str, Any] = {"faults": faults, "omitted": omitted, "restart": policy}
        RunDriver(home).run(job_of(home, name, ParallelKind.DDP, **given))
        job = job_of(home, name, ParallelKind.DDP, engine=half, **given)
        return RunDriver(home).run(job)

    played = twice("halved", [*STRETCH, stop], [])
    assert [len(played.fired_s[number]) for number in range(2)] == [3, 1]
    record = on_record(job_of(home, "halved", ParallelKind.DDP))
    assert len(record) == 3
    assert [view.from_step for view in played.history.attempts] == [0, SAVE_EVERY]
    assert [known for _, _, known in skipped_in(played)] == [False] * 3 + [True] * 3
    without = twice("halved-without", [stop], record)
    assert played.ended == without.ended == "completed"
    assert differences(played.curve, without.curve) == []
    assert played.state == without.state


def test_too_many_abnormal_batches_in_a_row_end_the_run_and_one_good_batch_ends_the_row(home):
    apart = [STRETCH[0], DrillFault(kind=DrillKind.GRADIENT, rank=0, step=AT_STEP + 1, times=9)]
    job = job_of(
        home, "diverged", ParallelKind.DDP, faults=apart, restart={"max_skipped_in_a_row": 4}
    )
    played = RunDriver(home).run(job)
    assert [len(played.fired_s[number]) for number in range(2)] == [3, 4]
    assert len(on_record(job)) == 7
    (view,) = played.history.attempts
    assert view.ended is not None
    fault = view.ended.fault
    assert fault is not None
    assert view.decision is not None
    assert fault.fault_class is FaultClass.USER_CODE_ERROR
    assert f"4 batches in a row are abnormal at step {AT_STEP + 1}" in fault.evidence
    assert view.decision.rung is Rung.STOP
    assert list(played.curve)[-1] in (SAVE_EVERY, AT_STEP)
