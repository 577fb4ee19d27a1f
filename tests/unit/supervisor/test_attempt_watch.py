"""How the watch of an attempt answers what its watchers find."""

from __future__ import annotations

import pytest

from perdure.training.supervisor.attempt_watch import AttemptWatch
from perdure.training.supervisor.watch import EndKind, WatchResult
from tests.jobs import small_job
from tests.unit.supervisor.cluster import Cluster, FakeFleet


@pytest.fixture
def stopped_watch(monkeypatch):
    """A watch whose run is asked to stop; an end is the word for its kind."""
    watch = AttemptWatch(
        FakeFleet(Cluster(["done"]), lambda _call: None),  # type: ignore[arg-type]
        small_job(),
        key=(1, 1),
        started_s=0.0,
        stop_wanted=lambda: True,
        on_progress=lambda _progress: None,
    )
    monkeypatch.setattr(watch, "wind_up", lambda **_options: "fault")
    monkeypatch.setattr(watch, "_end_on_request", lambda _request: "request")
    return watch


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
