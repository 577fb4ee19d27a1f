"""`perdure nodes`: what keeps nodes out of a run, and letting one back in."""

from __future__ import annotations

import json

import pytest

from perdure.training.journal.events import AlertKind
from perdure.training.journal.records import NodeRefused
from perdure.training.recovery.rungs import Rung
from perdure.training.supervisor.job_registry import remember_job
from perdure.training.supervisor.run_handle import RunHandle
from tests.jobs import small_job
from tests.unit.journal.histories import BEGINNING, HOT, NOW, decided, over, seen
from tests.unit.perdure.commands import append, error_line, perdure

ISOLATED = (over(1), decided(1, Rung.POD_RESCHEDULE, isolate="node-1"))
SLOW = HOT.model_copy(update={"point": AlertKind.STRAGGLER})
REFUSED = NodeRefused(**NOW, placement=1, node="node-2", why="devices: device 0: Alarm")


@pytest.fixture
def run(tmp_path, perdure_home) -> RunHandle:
    job = small_job(tmp_path, run_id="small")
    remember_job(perdure_home, job)
    return RunHandle(job, home=perdure_home)


def test_isolated_nodes_are_listed_with_the_reason(run):
    append(run, *BEGINNING, *ISOLATED, REFUSED)
    text = perdure("nodes", "small")
    assert "native_crash: SIGKILL" in text
    assert "failed its checks: devices: device 0: Alarm" in text
    assert "1970-01-01 00:00:00" in text
    assert "perdure nodes small --release NODE" in text
    found = json.loads(perdure("nodes", "small", "--json"))
    assert [one["node"] for one in found["isolated"]] == ["node-1", "node-2"]
    assert found["in_use"] == ["node-0", "node-1"]


def test_a_released_node_is_isolated_no_more(run):
    append(run, *BEGINNING, *ISOLATED, REFUSED)
    text = perdure("nodes", "small", "--release", "node-1")
    assert text == "small: node-1 is released; the next placement may use it\n"
    assert run.refresh().isolated == ("node-2",)
    found = json.loads(perdure("nodes", "small", "--release", "node-2", "--json"))
    assert (found["isolated"], found["released"]) == ([], "node-2")
    assert perdure("nodes", "small") == "small: no node is isolated\n"


def test_a_sub_healthy_node_is_listed_with_the_reason_and_can_be_taken_as_healthy(run):
    append(run, *BEGINNING, *seen(SLOW))
    text = perdure("nodes", "small")
    assert "small: no node is isolated" in text
    assert "straggler: memory at 98 %" in text
    (found,) = json.loads(perdure("nodes", "small", "--json"))["sub_healthy"]
    assert (found["node"], found["why"]) == ("node-1", "straggler: memory at 98 %")
    perdure("nodes", "small", "--release", "node-1")
    assert json.loads(perdure("nodes", "small", "--json"))["sub_healthy"] == []


def test_only_a_node_that_is_left_out_or_taken_last_can_be_released(run, capsys):
    append(run, *BEGINNING, *ISOLATED)
    line = error_line(capsys, "nodes", "small", "--release", "node-7")
    assert line == (
        "perdure: --release: 'node-7' is neither isolated nor sub-healthy; nodes that are: node-1"
    )


def test_a_run_that_never_started_has_no_nodes(run, capsys):
    assert "never started" in error_line(capsys, "nodes", "small")
