"""How the watch of an attempt answers what its watchers find."""

from __future__ import annotations

import time
from typing import Any

import pytest

from perdure.training.engines.base import Snapshot
from perdure.training.journal.events import StepRecord
from perdure.training.supervisor.attempt_watch import AttemptWatch
from perdure.training.supervisor.watch import AttemptStart, EndKind, Progress, WatchResult
from perdure.training.wire.agent_status import (
    AgentState,
    AgentStatus,
    SavedCheckpoint,
    ShownStep,
    WorkerStatus,
)
from tests.jobs import small_job
from tests.unit.supervisor.cluster import Cluster, FakeFleet


@pytest.fixture
def stopped_watch(monkeypatch):
    """A watch whose run is asked to stop; an end is the word for its kind."""
    watch = AttemptWatch(
        FakeFleet(Cluster(["done"]), lambda _call: None),  # type: ignore[arg-type]
        small_job(),
        AttemptStart((1, 1), 0.0),
        stop_wanted=lambda: True,
        on_progress=lambda _progress: None,
    )
    monkeypatch.setattr(watch, "wind_up", lambda **_options: "fault")
    monkeypatch.setattr(watch, "_end_on_request", lambda _request: "request")
    return watch


class FleetOfTheAttemptBefore(FakeFleet):
    """Agents that refused the second attempt, and still report the first."""

    def poll(self) -> Snapshot:
        worker = WorkerStatus(rank=0, local_rank=0, pid=1, exit_code=1, ended_s=5.0, error="old")
        saved = SavedCheckpoint(step=40, path="/c/40", size_bytes=1, written_s=4.0)
        status = AgentStatus(
            node="node-0", member=0, state=AgentState.ENDED, schedule_cnt=1, proc_start_cnt=1,
            placement=1, attempt=1, workers=(worker,), is_command=True, saved=(saved,),
            shown=ShownStep(step=45, age_s=1.0), unwritable="No space left on device: /scratch",
        )  # fmt: skip
        return Snapshot({0: status})

    def metrics(self, offset: int, *, of_attempt: tuple[int, int] | None = None) -> tuple[str, int]:
        assert of_attempt == (1, 2), "the log of the attempt before is none of this one"
        return "", offset


def test_nothing_of_the_attempt_before_is_taken_for_an_attempt_that_was_refused():
    progress: list[Progress] = []
    watch = AttemptWatch(
        FleetOfTheAttemptBefore(Cluster(["done"]), lambda _call: None),  # type: ignore[arg-type]
        small_job(),
        AttemptStart((1, 2), 0.0),
        stop_wanted=lambda: False,
        on_progress=progress.append,
    )
    end = watch.wind_up(refusal="refused rendezvous")
    assert (end.kind, end.last_step, end.stepped_s) == (EndKind.FAILED, None, None)
    assert end.evidence.workers == ()
    assert end.evidence.unwritable == {"node-0": "No space left on device: /scratch"}
    assert all(not poll.saved and not poll.checkpoints for poll in progress)
    assert end.evidence.lost_nodes == ()


@pytest.mark.parametrize(
    ("result", "end"),
    [
        (WatchResult(EndKind.FAILED, is_fault=True), "fault"),
        (WatchResult(EndKind.FAILED), "request"),
        (WatchResult(EndKind.RESTARTED), "request"),
    ],
    ids=["failed move", "false success", "restart"],
)
def test_a_failed_move_comes_before_a_stop_and_a_false_success_after_it(result, end, stopped_watch):
    assert stopped_watch._end_after([result], is_late=False) == end


class FleetThatStops(FakeFleet):
    """Ranks that train until they are ordered to stop."""

    num_stops = 0

    def poll(self) -> Snapshot:
        code = 75 if self.num_stops else None
        worker = WorkerStatus(
            rank=0, local_rank=0, pid=1, exit_code=code, stopped_by_agent=bool(self.num_stops)
        )
        status = AgentStatus(
            node="node-0", member=0, schedule_cnt=1, proc_start_cnt=1, placement=1, attempt=1,
            state=AgentState.ENDED if self.num_stops else AgentState.RUNNING, workers=(worker,),
        )  # fmt: skip
        return Snapshot({0: status})

    def stop(self, grace_s: float) -> None:
        self.num_stops += 1


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_request_that_comes_while_the_store_is_silent_ends_the_processes_once(is_wanted):
    fleet = FleetThatStops(Cluster(["done"]), lambda _call: None)
    watch = AttemptWatch(
        fleet,  # type: ignore[arg-type]
        small_job(),
        AttemptStart((1, 1), 0.0),
        stop_wanted=lambda: is_wanted,
        on_progress=lambda _progress: None,
    )
    watch.stop_where_wanted()
    watch.stop_where_wanted()
    assert fleet.num_stops == int(is_wanted)
    if is_wanted:
        assert watch.run().kind is EndKind.STOPPED, "an end on request is no fault"


def test_the_first_step_of_a_command_is_that_of_its_output_however_late_it_is_polled():
    def polled(shown: ShownStep, **changes: Any) -> Progress:
        status = AgentStatus(
            node="node-0", member=0, state=AgentState.RUNNING, schedule_cnt=1, proc_start_cnt=1,
            placement=1, attempt=2, is_command=True, shown=shown,
        )  # fmt: skip
        return Progress(snapshot=Snapshot({0: status}), **changes)

    late = ShownStep(step=13, age_s=0.0, first_step=11, first_age_s=2.0)
    first = polled(late).first_step
    assert first is not None
    assert (first.step, round(time.time() - first.at_s)) == (11, 2)
    of_older_agent = polled(ShownStep(step=13, age_s=0.0)).first_step
    assert of_older_agent is not None
    assert of_older_agent.step == 13
    logged = StepRecord(11, 1.0, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1, 0, 1, 2)
    assert polled(ShownStep(step=13, age_s=0.0), steps=[logged]).first_step is logged
