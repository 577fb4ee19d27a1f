"""What became of task runs whose supervisor died, by the ledger."""

from __future__ import annotations

import pytest
from prefect.client.schemas.objects import StateType

from perdure.tasks.orphaned_task_runs import end_of_task
from perdure.training.journal.history import replay
from perdure.training.journal.records import AnyRecord, RunEnded
from perdure.training.recovery.rungs import Rung
from tests.unit.journal.histories import BEGINNING, NOW, decided, over, placed, started

CANCELLED = RunEnded(**NOW, outcome="cancelled", message="")
CASES: dict[str, tuple[tuple[AnyRecord, ...], str, StateType, str, str]] = {
    "an attempt that lives": (
        (), "attempt 1.1 from step 0", StateType.CANCELLED, "Adopted",
        "its supervisor is gone; attempt 1.1 went on and was adopted by supervisor 2",
    ),
    "its placement": (
        (), "placement 1 on node-0,node-1", StateType.CANCELLED, "Adopted", "attempt 1.1 went on",
    ),
    "an adopted attempt that was lost again": (
        (), "attempt 1.1 (adopted)", StateType.CANCELLED, "Adopted", "attempt 1.1 went on",
    ),
    "an attempt that failed": (
        (over(), decided()), "attempt 1.1 from step 0", StateType.FAILED, "RestartInPlace",
        "native_crash on rank 1 on node-0 at step 40: in_place_restart",
    ),
    "a placement that has a further attempt": (
        (over(), decided(), started(2)), "placement 1 on node-0", StateType.CANCELLED, "Adopted",
        "attempt 1.2 went on",
    ),
    "a placement that is over": (
        (over(), decided(1, Rung.POD_RESCHEDULE), placed(2)), "placement 1 on node-0",
        StateType.FAILED, "ReschedulePod", "pod_reschedule",
    ),
    "an attempt that failed without a decision": (
        (over(),), "attempt 1.1 from step 0", StateType.FAILED, "Failed", "native_crash",
    ),
    "an attempt that completed": (
        (over(1, "completed"),), "attempt 1.1 from step 0", StateType.COMPLETED, "Completed",
        "trained to step 40",
    ),
    "an attempt that was cancelled": (
        (over(1, "stopped"), CANCELLED), "placement 1 on node-0", StateType.COMPLETED,
        "StoppedOnRequest", "stopped on request",
    ),
    "a placement that was cancelled before its restart": (
        (over(), decided(), CANCELLED), "placement 1 on node-0", StateType.COMPLETED,
        "StoppedOnRequest", "stopped on request before the restart",
    ),
    "its attempt": (
        (over(), decided(), CANCELLED), "attempt 1.1 from step 0", StateType.FAILED,
        "RestartInPlace", "in_place_restart",
    ),
    "anything else": (
        (), "place", StateType.CRASHED, "SupervisorLost",
        "its supervisor is gone; supervisor 2 goes on from the ledger",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_task_run_ends_as_what_it_watched_did(case):
    records, name, kind, state, message = CASES[case]
    end = end_of_task(name, replay([*BEGINNING, *records]), adopted_by="supervisor 2")
    assert (end.type, end.name) == (kind, state)
    assert message in end.message


def test_without_a_new_supervisor_the_attempt_waits_to_be_adopted():
    end = end_of_task("attempt 1.1 from step 0", replay(BEGINNING), adopted_by=None)
    assert (end.type, end.name) == (StateType.CRASHED, "SupervisorLost")
    assert end.message == "its supervisor is gone; attempt 1.1 goes on and waits to be adopted"
