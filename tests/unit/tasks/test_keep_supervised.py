"""What keep-supervised notes of runs that are over, and what it claims to have done."""

from __future__ import annotations

import logging
import os
from uuid import uuid4

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.logging import disable_run_logger

from perdure.tasks import keep_supervised
from perdure.tasks.hooks import take_down_run
from perdure.tasks.keep_supervised import (
    RunCase,
    Unseen,
    _contained,
    _of_known,
    may_begin,
    note_end,
)
from perdure.training.journal.ledger import Identity
from perdure.training.journal.records import NodeReleased, RunCreated, RunEnded
from perdure.training.supervisor.job_registry import remember_job, unended_runs
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.supervisor.run_supervisor import RunSupervisor
from tests.jobs import small_job

DEAD = (1 << 22) + 1  # no pid of Linux is so large
LOG = logging.getLogger("test")


@pytest.fixture
def run(tmp_path, perdure_home) -> RunHandle:
    """A run that has been taken and given up."""
    job = small_job(tmp_path)
    made = RunHandle(job, home=perdure_home)
    made.ledger.take(Identity.of_this_process(flow_run=str(uuid4())))
    made.ledger.append(RunCreated, job=job.model_dump(mode="json"), cwd=str(tmp_path))
    remember_job(perdure_home, job)
    return made


@pytest.mark.parametrize(
    ("started", "may"),
    [
        (None, False),
        (str(DEAD), False),
        (f"host:{DEAD}", False),
        (str(os.getpid()), True),
        (f"host:{os.getpid()}", True),
        ("namespace:pretrain-x7k2p", True),
    ],
    ids=["none", "dead", "dead of a host", "alive", "alive on a host", "pod"],
)
def test_a_pending_flow_run_begins_when_its_process_lives_or_its_container_may(started, may):
    flow_run = FlowRun(flow_id=uuid4(), infrastructure_pid=started)
    assert may_begin(flow_run) is may


def end(run: RunHandle, outcome: str = "completed") -> None:
    run.ledger.append(RunEnded, outcome=outcome, message="")
    run.ledger.release()


def test_a_run_that_is_over_is_looked_at_once_also_when_a_node_was_released_since(
    run, perdure_home
):
    end(run)
    run.ledger.note(NodeReleased, node="node-1")
    assert unended_runs(perdure_home) == ["run"]
    nowhere = SyncPrefectClient("http://127.0.0.1:9/api")  # it is not asked
    with disable_run_logger():
        assert _of_known(nowhere, "run") is None
    assert unended_runs(perdure_home) == []


def test_a_run_that_is_taken_at_the_moment_of_the_mark_keeps_none(run, perdure_home):
    end(run, "failed")
    run.refresh()
    other = RunHandle(run.job, home=perdure_home)
    other.ledger.take(Identity.of_this_process())
    note_end(run)
    assert unended_runs(perdure_home) == ["run"]


def other_process() -> Identity:
    parent = psutil.Process(os.getppid())
    facts = {"pid": parent.pid, "process_started_s": parent.create_time()}
    return Identity.of_this_process().model_copy(update=facts)


def test_a_run_that_another_took_in_the_meantime_is_not_called_taken_down(tmp_path, perdure_home):
    looked_at = RunSupervisor(small_job(tmp_path), home=perdure_home)
    taker = RunHandle(looked_at.job, home=perdure_home)
    taker.ledger.take(other_process())
    taker.ledger.append(RunCreated, job=taker.job.model_dump(mode="json"), cwd=str(tmp_path))
    assert looked_at.ledger.is_supervised()
    assert take_down_run(looked_at, uuid4(), LOG) is False
    assert looked_at.refresh().ended is None


def test_what_is_damaged_is_named_and_keeps_no_other_from_its_supervisor():
    def damaged() -> None:
        raise ValueError("badly formed hexadecimal UUID string")

    found = _contained("a-run", damaged)
    assert found == Unseen(
        "a-run", "cannot be looked at: ValueError: badly formed hexadecimal UUID string"
    )


def test_a_run_that_has_left_something_over_is_looked_at_again(run, perdure_home, monkeypatch):
    monkeypatch.setattr(keep_supervised, "_flow_run_of", lambda *_: None)
    run.ledger.append(RunEnded, outcome="failed", message="", leftovers="pods/a: forbidden")
    run.ledger.release()
    nowhere = SyncPrefectClient("http://127.0.0.1:9/api")  # it is not asked
    with disable_run_logger():
        case = _of_known(nowhere, "run")
    assert isinstance(case, RunCase)
    assert unended_runs(perdure_home) == ["run"]
