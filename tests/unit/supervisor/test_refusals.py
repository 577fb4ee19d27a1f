"""A platform that refuses: it is waited for, costs no budget, and the end of a run is on record."""

from __future__ import annotations

import logging

import pytest

from perdure.training.engines.base import Placement
from perdure.training.errors import EngineError, NoCapacity
from perdure.training.journal.records import PlacementCreated, RunEnded, RungFailed
from perdure.training.journal.waits import Wait, WaitKind
from perdure.training.supervisor import placing
from perdure.training.supervisor.job_registry import job_path
from perdure.training.supervisor.runbook import cancel
from tests.unit.supervisor.cluster import Cluster, ClusterRun, FakeFleet, supervise

pytestmark = pytest.mark.usefixtures("without_waits")


class Refused(EngineError):  # noqa: N818 a state of affairs
    """An answer of a platform that passes."""

    @property
    def is_refusal(self) -> bool:
        return True


FORBIDDEN = Refused("POST /pods: pods is forbidden")


@pytest.fixture
def run(job, tmp_path, monkeypatch) -> ClusterRun:
    monkeypatch.setattr(placing, "SPARE_POLL_S", 0.0)
    monkeypatch.setattr(placing, "LONGEST_PAUSE_S", 0.0)
    run = ClusterRun(job, home=tmp_path / "home")
    run.cluster = Cluster(["node lost", "done"])
    return run


def refuse(monkeypatch, method: str, error: EngineError, *, after: int, times: int) -> list[int]:
    """Have calls of a method of the fleet refused, some after the first ones."""
    calls: list[int] = []
    do = getattr(FakeFleet, method)

    def refused(fleet: FakeFleet, *args: object, **settings: object) -> object:
        calls.append(len(calls))
        if after <= calls[-1] < after + times:
            raise error
        return do(fleet, *args, **settings)

    monkeypatch.setattr(FakeFleet, method, refused)
    return calls


@pytest.mark.parametrize("times", [1, 5, 20])
@pytest.mark.parametrize("method", ["replace", "adopt"])
def test_a_refusal_is_waited_out_on_one_record_and_uses_no_budget(run, monkeypatch, method, times):
    waits: list[Wait | None] = []
    run.on_wait = waits.append
    calls = refuse(
        monkeypatch, method, FORBIDDEN, after=0 if method == "replace" else 1, times=times
    )
    supervise(run)
    history = run.refresh()
    assert history.ended is not None
    assert history.ended.outcome == "completed"
    assert len(calls) > times
    records = run.ledger._records
    assert [r for r in records if isinstance(r, RungFailed)] == []
    placed = [r.placement for r in records if isinstance(r, PlacementCreated)]
    assert placed == [1, 2]
    kinds = [wait.kind if wait is not None else None for wait in waits]
    assert set(kinds) == {WaitKind.PLATFORM, None}
    assert kinds[-1] is None
    assert waits[0] is not None
    assert str(FORBIDDEN) in waits[0].text


def test_before_a_first_attempt_a_refusal_is_the_answer(run, monkeypatch):
    refuse(monkeypatch, "submit", FORBIDDEN, after=0, times=1)
    supervise(run)
    end = run.refresh().ended
    assert end is not None
    assert (end.outcome, end.message) == ("failed", f"no placement: {FORBIDDEN}")


def test_a_cancel_ends_the_wait_for_a_refusal(run, monkeypatch, tmp_path):
    def refused(_fleet: FakeFleet, _action: Placement, *_: object, **_settings: object) -> None:
        job_path(tmp_path / "home", run.job.run_id).with_name("cancel-wanted").touch()
        raise FORBIDDEN

    monkeypatch.setattr(FakeFleet, "replace", refused)
    supervise(run)
    end = run.refresh().ended
    assert end is not None
    assert (end.outcome, end.message) == ("cancelled", "stopped on request")


def test_a_placement_that_finds_no_room_is_on_record_once_however_often_it_is_tried(
    run, monkeypatch
):
    run.job = run.job.model_copy(
        update={"restart": run.job.restart.model_copy(update={"spare_wait_s": 1e6})}
    )
    refuse(monkeypatch, "replace", NoCapacity("0/3 nodes are available"), after=0, times=30)
    supervise(run)
    records = run.ledger._records
    placed = [(r.placement, r.waited_s > 0) for r in records if isinstance(r, PlacementCreated)]
    assert placed == [(1, False), (2, False), (2, True)]
    assert [r for r in records if isinstance(r, RungFailed)] == []


@pytest.mark.parametrize("outcome", ["done", "user"])
def test_the_end_of_a_run_is_on_record_where_taking_down_is_refused(run, monkeypatch, outcome):
    run.cluster.outcomes = [outcome]
    refuse(monkeypatch, "cancel", FORBIDDEN, after=0, times=2)
    monkeypatch.setattr(FakeFleet, "leftovers", lambda _fleet: ["pods/perdure-walk-m0"])
    supervise(run)
    end = run.refresh().ended
    assert end is not None
    assert end.outcome == ("completed" if outcome == "done" else "failed")
    assert end.leftovers == f"pods/perdure-walk-m0: {FORBIDDEN}"
    assert not run.ledger.is_supervised()
    with pytest.raises(EngineError, match="not all of it is taken down: pods/perdure-walk-m0"):
        cancel(run)
    assert not run.ledger.is_supervised(), "a cancel that failed gives its lease back"
    text = f"walk: has ended already: {end.outcome}; what was left over is taken down"
    assert cancel(run) == text
    later = run.refresh().ended
    assert later is not None
    assert (later.outcome, later.message, later.leftovers) == (end.outcome, end.message, "")
    assert cancel(run) == f"walk: has ended already: {end.outcome}"
    assert len([r for r in run.ledger._records if isinstance(r, RunEnded)]) == 3


def test_a_run_that_is_cancelled_without_a_supervisor_names_what_is_leftovers(
    run, monkeypatch, caplog
):
    run.take()
    run.place()
    run.leave()
    refuse(monkeypatch, "cancel", FORBIDDEN, after=0, times=1)
    with (
        caplog.at_level(logging.WARNING, logger="perdure.supervisor"),
        pytest.raises(EngineError, match="walk: cancelled, but not all of it is taken down"),
    ):
        cancel(run)
    assert f"the containers cannot be taken down: {FORBIDDEN}" in caplog.text
    assert "was left over is taken down" in cancel(run)
