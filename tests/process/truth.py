"""Whether a Prefect server shows of a run what the run's ledger says."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from perdure.storage.address import open_store
from perdure.storage.checkpoint import CheckpointStore
from perdure.tasks.orphaned_task_runs import end_of_task
from perdure.tasks.story import CONTINUED
from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.history import RunHistory
from perdure.training.recovery.rungs import RUNGS
from perdure.training.reporting.rows import story_rows
from perdure.training.reporting.summary import attempts_table, attempts_title
from tests.process.harness import Running
from tests.process.rest import BUSY_S, Api, ask

TERMINAL = frozenset({"COMPLETED", "FAILED", "CRASHED", "CANCELLED"})
STATE_TYPES = {"completed": "COMPLETED", "failed": "FAILED", "cancelled": "CANCELLED"}
# Of flow runs that the end of the run is not about: they found the run taken, came too early, or
# another one took the run after their process was gone.
NOT_ITS_END = frozenset({"AlreadySupervised", "Skipped", "Adopted"})
# A task run whose supervisor died has the end that was known then.
SUPERSEDED = frozenset({"Adopted", "SupervisorLost"})


def task_runs(api: Api, name: str) -> list[dict[str, Any]]:
    """Task runs of every flow run of a name, whatever their number."""
    found: list[dict[str, Any]] = []
    while True:
        wanted = {"flow_runs": {"name": {"any_": [name]}}, "limit": 200, "offset": len(found)}
        page = ask("POST", f"{api.url}/task_runs/filter", wanted).json()
        found += page
        if len(page) < 200:
            return found


def contradictions(api: Api, running: Running) -> list[str]:
    """What the server shows of an ended run though its ledger says otherwise; [] when all fits."""
    history = running.history
    assert history.ended is not None, "the run goes on"
    name = running.job.run_id
    shown = api.artifacts(f"{name}-")
    return [
        *_flow_runs(api, name, history),
        *_task_runs(api, name, history),
        *_tables(shown, running, history),
        *_reports(shown, name, history),
        *_order(shown, name),
    ]


def assert_true(api: Api, running: Running) -> None:
    """That every flow run, task run and artifact of a run says what its ledger says.

    A server that has much to do shows the last states and reports late.
    """
    deadline_s = time.monotonic() + BUSY_S
    while (found := contradictions(api, running)) and time.monotonic() < deadline_s:
        time.sleep(0.5)
    assert not found, "\n".join(found)


def _flow_runs(api: Api, name: str, history: RunHistory) -> Iterator[str]:
    assert history.ended is not None
    wanted = STATE_TYPES[history.ended.outcome]
    states = [one["state"] for one in api.flow_runs(name)]
    supervised = [state for state in states if state["name"] not in NOT_ITS_END]
    if not supervised:
        yield f"no flow run has the end of the run: {[state['name'] for state in states]}"
    for state in supervised:
        if state["type"] != wanted:
            yield f"a flow run is {state['name']}, the run has {history.ended.outcome}"


def _task_runs(api: Api, name: str, history: RunHistory) -> Iterator[str]:
    found = task_runs(api, name)
    for one in found:
        if one["state_type"] not in TERMINAL:
            yield f"task run {one['name']!r} is {one['state_name']}, though the run has ended"
    for placed in history.placements:
        prefix = f"placement {placed.placement} on "
        names = {one["state_name"] for one in found if one["name"].startswith(prefix)}
        wanted = end_of_task(prefix, history, adopted_by=None).name
        if names - SUPERSEDED - {"Continued"} - {wanted}:
            yield f"task runs of {prefix}... are {sorted(names)}, the ledger says {wanted}"
        nodes = ",".join(member.node for member in placed.members)
        ends = [one["name"] for one in found if one["state_name"] not in SUPERSEDED]
        ends = [end for end in ends if end.startswith(prefix)]
        if not all(end.removesuffix(CONTINUED) == prefix + nodes for end in ends):
            yield f"the placement was on {nodes} at its end, the task runs are {ends}"
    for view in history.attempts:
        prefix = "attempt {}.{} ".format(*view.key)
        names = {one["state_name"] for one in found if f"{one['name']} ".startswith(prefix)}
        if not names:
            yield f"no task run for {prefix}"
        elif names - SUPERSEDED != {_state_name(view)}:
            yield f"task runs of {prefix}are {sorted(names)}, the ledger says {_state_name(view)}"


def _order(shown: dict[str, dict[str, Any]], name: str) -> Iterator[str]:
    """Both UIs list the artifacts of a flow run by their ids, the highest at the top (3.8.8)."""
    top = shown[f"{name}-needs-you"]
    for key, artifact in shown.items():
        if (
            artifact["flow_run_id"] == top["flow_run_id"]
            and artifact["latest_id"] > top["latest_id"]
        ):
            yield f"{key} stands above what needs a person"


def _state_name(view: AttemptView) -> str:
    assert view.ended is not None
    if view.ended.outcome == "completed":
        return "Completed"
    if view.decision is None:
        return "StoppedOnRequest"
    return RUNGS[view.decision.rung].state_name


def _tables(
    shown: dict[str, dict[str, Any]], running: Running, history: RunHistory
) -> Iterator[str]:
    assert history.ended is not None
    name = running.job.run_id
    attempts = shown[f"{name}-attempts"]
    wanted = attempts_table(story_rows(history))
    if attempts["description"] != attempts_title(history):
        yield f"attempts: {attempts['description']!r} is not {attempts_title(history)!r}"
    if json.loads(attempts["data"]) != wanted:
        yield f"attempts: {attempts['data']} is not {wanted}"
    progress = shown[f"{name}-progress"]["description"]
    if not progress.startswith(f"{history.ended.outcome}, step"):
        yield f"progress: {progress!r}, the run has {history.ended.outcome}"
    checkpoints = CheckpointStore(open_store(running.job.storage), name)
    table = shown.get(f"{name}-checkpoints")
    rows = json.loads(table["data"]) if table is not None else []
    if sorted(int(row["step"]) for row in rows) != checkpoints.steps():
        yield f"checkpoints: {rows}, the store has {checkpoints.steps()}"


def _reports(shown: dict[str, dict[str, Any]], name: str, history: RunHistory) -> Iterator[str]:
    needs = shown[f"{name}-needs-you"]["data"]
    for node in history.isolated:
        if f"Node {node} is isolated" not in needs:
            yield f"needs-you does not name {node}, which is isolated"
    if not history.isolated and "Release" in needs:
        yield f"needs-you: {needs!r}, no node is isolated"
    for view in history.attempts:
        placement, attempt = view.key
        base = f"{name}-fault-p{placement}-a{attempt}"
        numbers = [f"-r{one.began.number}" for one in view.recoveries]
        failed = view.ended is not None and view.ended.fault is not None
        for key in [f"{base}{number}" for number in numbers] + [base] * failed:
            if key not in shown:
                yield f"no report {key}"
            elif "under way" in shown[key]["description"]:
                yield f"{key} is still under way"
