"""The flow process as supervisor: how it takes a run, and hands it over."""

from __future__ import annotations

import logging

import pytest
from prefect.exceptions import Abort

from tasks import supervision as module
from tasks.supervision import Supervision
from training.errors import RunConflict
from training.job import parse_job
from training.wire.requests import read_control, write_control


@pytest.fixture
def supervision(tmp_path, caplog):
    job = parse_job(
        {
            "run_id": "small",
            "storage": {"address": f"file://{tmp_path}/store"},
            "data": {"sources": ["/corpus"]},
        }
    )
    caplog.set_level(logging.INFO)
    return Supervision(job, logging.getLogger("test"))


class HandedOverTo:
    cancel_wanted = False
    is_handed_over = True


def test_a_supervisor_leaves_when_its_flow_run_is_another_processs(supervision, monkeypatch):
    assert not supervision.stop_wanted()
    monkeypatch.setattr(supervision, "_requests", HandedOverTo())
    with pytest.raises(Abort, match="another process supervises the run"):
        supervision.stop_wanted()


def test_what_is_handed_over_can_be_taken_at_once(supervision, monkeypatch, caplog):
    supervision._take()
    monkeypatch.setattr(supervision, "_requests", HandedOverTo())
    supervision._interrupted(Abort)
    assert list(supervision.run.store.list("runs/small/supervisor.json")) == []
    assert supervision.run.refresh().ended is None
    assert "another process supervises" in caplog.text


@pytest.fixture
def resumed(supervision, monkeypatch):
    """A supervisor of a flow run that was resumed; waits without time passing."""
    monkeypatch.setattr(supervision, "flow_run_id", "an id")
    monkeypatch.setattr(module, "_is_resumed", lambda _id: True)
    monkeypatch.setattr(module, "HANDOVER_POLL_S", 0.0)
    return supervision


def conflicts(supervision, monkeypatch, number: int) -> None:
    """The supervisor before needs a moment to leave."""
    take, left = supervision.run.take, iter(range(number))

    def taken():
        if next(left, None) is not None:
            raise RunConflict("one supervisor at a time")
        return take()

    monkeypatch.setattr(supervision.run, "take", taken)


def test_a_resumed_flow_run_waits_for_the_supervisor_before_to_leave(resumed, monkeypatch):
    write_control(resumed.run.store, "small", pause=True)
    conflicts(resumed, monkeypatch, 3)
    resumed._take()
    assert not read_control(resumed.run.store, "small").pause, "and has the run go on"


def test_a_supervisor_that_does_not_leave_is_a_conflict_in_the_end(resumed, monkeypatch):
    monkeypatch.setattr(module, "HANDOVER_S", 0.0)
    conflicts(resumed, monkeypatch, 10**6)
    with pytest.raises(RunConflict):
        resumed._take()


def test_a_run_that_is_merely_started_again_does_not_wait_for_another_supervisor(
    supervision, monkeypatch
):
    conflicts(supervision, monkeypatch, 1)
    with pytest.raises(RunConflict):
        supervision._take()


def test_a_paused_run_that_is_started_again_stays_paused_with_a_warning(supervision, caplog):
    write_control(supervision.run.store, "small", pause=True)
    supervision._take()
    assert read_control(supervision.run.store, "small").pause
    assert "its ranks wait for `perdure resume small`" in caplog.text
