"""The hook of an attempt decides, once, and the server names the attempt after the decision."""

from __future__ import annotations

import dataclasses
import json
import signal

import pytest

from perdure.storage.address import open_store
from tests.process.test_restart_policy import crashing, states
from tests.process.truth import task_runs
from tests.waiting import wait_for

pytestmark = [pytest.mark.process, pytest.mark.prefect]

DECIDED = ["Pending", "Running", "Undecided", "RestartInPlace"]
FIRST = "attempt 1.1 from step 0"


def decisions(running) -> list[tuple[int, int]]:
    """The attempts of all decisions in the ledger."""
    store = open_store(running.job.storage)
    documents = [
        json.loads(store.get(info.key)) for info in store.list(f"runs/{running.job.run_id}/ledger/")
    ]
    return [
        (document["placement"], document["attempt"])
        for document in documents
        if document["kind"] == "decided"
    ]


def shown(api, name: str) -> set[str]:
    """Names of the first attempt's states, in whatever flow run."""
    return {
        one["state_name"] for one in task_runs(api, name) if one["name"].startswith("attempt 1.1")
    }


def test_where_the_hook_fails_the_task_around_it_decides_and_names_the_attempt(bench, api):
    unlucky = dataclasses.replace(bench, program=("-m", "tests.process.unlucky_supervisor", "hook"))
    running = unlucky.start(crashing(bench, "hook-fails", crashes=1, delay_s=0))
    assert running.finish() == 0, running.out
    assert "the hook could not decide" in running.out
    assert decisions(running) == [(1, 1)]
    api.wait_for_tasks("hook-fails", {FIRST: "RestartInPlace"})
    assert states(api, "hook-fails", FIRST) == DECIDED
    assert len(api.wait_for_events("hook-fails", "recovery", count=1)) == 1


@pytest.mark.long
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_supervisor_killed_around_the_decision_leaves_one_decision_and_its_name(
    bench, api, moment
):
    name = f"killed-{moment}"
    unlucky = dataclasses.replace(bench, program=("-m", "tests.process.unlucky_supervisor", moment))
    document = crashing(bench, name, crashes=1, delay_s=0)
    assert unlucky.start(document).finish() == -signal.SIGKILL
    running = bench.start(document)
    assert running.finish() == 0, running.out
    assert decisions(running) == [(1, 1)]
    assert running.rungs() == ["in_place_restart"]
    wait_for(lambda: shown(api, name) == {"RestartInPlace"}, what="the name of the decision")
    running.leave_nothing()
