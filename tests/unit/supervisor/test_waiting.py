"""Waits of a run: what is noted, who reads it, and requests that come meanwhile."""

from __future__ import annotations

import logging
import os
import threading

import pytest

from perdure.storage.errors import StorageError, Throttled, TimedOut
from perdure.training.engines.base import Snapshot
from perdure.training.errors import PerdureError
from perdure.training.journal.history import RunHistory
from perdure.training.journal.waits import Wait, WaitKind
from perdure.training.supervisor.cancelling import (
    CancelPoll,
    cancel_on_this_machine,
    forget_cancel,
)
from perdure.training.supervisor.store_outage import StoreOutage
from perdure.training.supervisor.waiting import AgentSilence, wait_of
from perdure.training.supervisor.watch import Progress
from perdure.training.wire.agent_status import AgentState, AgentStatus
from perdure.training.wire.requests import request_cancel
from perdure.training.wire.store_wait import (
    StoreWaitNote,
    Waiter,
    read_store_wait,
    read_wait,
    write_wait,
)
from tests.jobs import small_job
from tests.unit.journal.histories import GOES_ON, STANDS, history_of
from tests.waiting import wait_for

SLOW = Throttled("s3://bucket/a: PutObject answered 503 SlowDown")
SILENT = TimedOut("s3://bucket/b: no answer: Read timeout")


def status(node: str, wait: Wait | None) -> AgentStatus:
    return AgentStatus(
        node=node, member=0, state=AgentState.RUNNING, schedule_cnt=1, proc_start_cnt=1,
        placement=1, attempt=1, store_wait=wait,
    )  # fmt: skip


def wait_since(at_s: float, why: str = "SlowDown") -> Wait:
    return Wait(kind=WaitKind.STORE, since_s=at_s, why=why)


def test_a_process_that_waits_says_since_when_and_the_last_answer(tmp_path):
    note = StoreWaitNote(tmp_path, "checkpoint-server", clock=lambda: 1_000.0)
    note.failed(SILENT, 60.0)
    note.failed(SLOW, 65.0)
    wait = read_store_wait(tmp_path)
    assert wait == Wait(kind=WaitKind.STORE, since_s=940.0, why=str(SLOW))
    assert wait.text == f"waiting for the store since 1970-01-01 00:15:40 UTC: {SLOW}"
    note.passed()
    assert read_store_wait(tmp_path) is None
    note.failed(SLOW, 0.0)
    assert read_store_wait(tmp_path) == wait_since(1_000.0, str(SLOW))


def test_the_longest_wait_of_a_container_counts_and_a_dead_process_waits_no_more(tmp_path):
    for name, at_s in (("rank-0", 500.0), ("rank-1", 400.0)):
        StoreWaitNote(tmp_path, name, clock=iter([at_s]).__next__).failed(SLOW, 0.0)
    assert read_store_wait(tmp_path) == wait_since(400.0, str(SLOW))
    path = tmp_path / "store-wait-rank-1.json"
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    path.write_text(path.read_text().replace(str(os.getpid()), str(child)))
    assert read_store_wait(tmp_path) == wait_since(500.0, str(SLOW))
    path.write_text("{")
    assert read_store_wait(tmp_path) == wait_since(500.0, str(SLOW))


def test_a_note_that_cannot_be_written_costs_nothing(tmp_path):
    note = StoreWaitNote(tmp_path / "gone", "rank-0")
    note.failed(SLOW, 0.0)
    note.passed()


@pytest.mark.parametrize(
    ("history", "waits", "kind", "since_s"),
    [
        (RunHistory(), [None, None], None, None),
        (RunHistory(), [wait_since(9.0), wait_since(5.0)], WaitKind.STORE, 5.0),
        (history_of(STANDS), [None], WaitKind.RESUME, STANDS.at_s),
        (history_of(STANDS), [wait_since(1.0)], WaitKind.RESUME, STANDS.at_s),
        (history_of(STANDS, GOES_ON), [None], None, None),
    ],
)
def test_the_wait_of_a_run_is_that_of_a_person_or_the_longest_for_the_store(
    history, waits, kind, since_s
):
    agents = Snapshot({i: status(f"node-{i}", wait) for i, wait in enumerate(waits)})
    wait = wait_of(history, agents)
    assert (wait.kind if wait else None, wait.since_s if wait else None) == (kind, since_s)


def test_a_wait_of_the_supervisor_is_read_on_its_machine(tmp_path):
    wait = Wait(kind=WaitKind.NODE, since_s=7.0, why="2 nodes are needed, 1 is free")
    write_wait(tmp_path, wait)
    assert read_wait(tmp_path) == wait
    assert wait.text.startswith("waiting for a free node since 1970-01-01 00:00:07 UTC: 2 nodes")
    write_wait(tmp_path, None)
    write_wait(tmp_path, None)
    assert read_wait(tmp_path) is None


def test_a_wait_before_a_run_is_taken_is_apart_from_its_supervisors(tmp_path):
    wait = Wait(kind=WaitKind.SERVER, since_s=7.0, why="http://127.0.0.1:4200 does not answer yet")
    write_wait(tmp_path, wait, by=Waiter.STARTER)
    assert read_wait(tmp_path) is None
    assert read_wait(tmp_path, by=Waiter.STARTER) == wait
    write_wait(tmp_path, None)
    assert read_wait(tmp_path, by=Waiter.STARTER) == wait


def test_what_a_process_that_was_killed_waited_for_is_no_wait_any_more(tmp_path):
    child = os.fork()
    if child == 0:
        write_wait(tmp_path, Wait(kind=WaitKind.NODE, since_s=7.0, why="1 is free"))
        os._exit(0)
    os.waitpid(child, 0)
    assert list(tmp_path.iterdir())
    assert read_wait(tmp_path) is None


def test_a_wait_of_a_run_that_this_machine_does_not_know_yet_costs_nothing(tmp_path):
    write_wait(tmp_path / "new", Wait(kind=WaitKind.SERVER, since_s=7.0, why="no answer"))
    assert not (tmp_path / "new").exists()


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home" / "runs" / "run").mkdir(parents=True)
    return tmp_path / "home"


def test_an_outage_tells_of_each_answer_and_of_its_end(home):
    outage = StoreOutage(home, "run", logging.getLogger("test"), clock=lambda: 1_000.0)
    told: list[Wait | None] = []
    outage.on_change = told.append
    outage.failed(SILENT, 60.0)
    outage.failed(SLOW, 70.0)
    outage.passed()
    outage.passed()
    assert told == [wait_since(940.0, str(SILENT)), wait_since(940.0, str(SLOW)), None]


def test_a_thread_that_waits_for_the_store_looks_for_requests_before_each_pause(home):
    outage = StoreOutage(home, "run", logging.getLogger("test"))
    looks = []
    outage.meanwhile = lambda: looks.append(threading.current_thread())
    outage.give_up()
    with pytest.raises(StorageError):
        outage.retry().run(_fail)
    assert looks == [threading.current_thread()]


def _fail(_tries: int) -> None:
    raise SLOW


def test_a_request_to_cancel_is_found_in_the_store(tmp_path, home):
    job = small_job(tmp_path, run_id="run")
    poll = CancelPoll(job, home, None)
    assert not poll.is_wanted
    request_cancel(poll._store, "run")
    poll._polled_s = float("-inf")
    wait_for(lambda: poll.is_wanted, what="the request to be read")


def test_a_request_to_cancel_reaches_a_supervisor_whose_store_is_silent(tmp_path, home):
    poll = CancelPoll(small_job(tmp_path, run_id="run"), home, None)

    def look(_seconds: float) -> None:
        assert poll.is_wanted

    said = cancel_on_this_machine(home, "run", SILENT, sleep=look)
    assert said.startswith("run: the store does not answer")
    assert poll.is_wanted


def test_a_request_that_no_supervisor_takes_is_an_error_and_is_taken_back(tmp_path, home):
    with pytest.raises(PerdureError, match="run: not cancelled: no supervisor on this machine"):
        cancel_on_this_machine(home, "run", SILENT, wait_s=3, sleep=lambda _s: None)
    assert not CancelPoll(small_job(tmp_path, run_id="run"), home, None).is_wanted


def test_a_run_that_was_never_started_here_is_refused_for_its_store(tmp_path):
    with pytest.raises(TimedOut, match="no answer: Read timeout"):
        cancel_on_this_machine(tmp_path, "run", SILENT)


def test_the_next_supervisor_forgets_a_request_to_the_one_before(tmp_path, home):
    (home / "runs" / "run" / "cancel-wanted").touch()
    forget_cancel(home, "run")
    assert not CancelPoll(small_job(tmp_path, run_id="run"), home, None).is_wanted


@pytest.mark.parametrize(
    ("snapshots", "shown"),
    [
        ([Snapshot(unanswered=("n1", "n2"))] * 20, [WaitKind.AGENTS] * 5),
        ([Snapshot(unanswered=("n1",), lost=("n2",))] * 20, []),
        ([Snapshot(unanswered=("n1",))] * 14 + [Snapshot(agents={0: status("n1", None)})] * 3, []),
        ([Snapshot(unanswered=("n1",))] * 17 + [Snapshot(agents={0: status("n1", None)})] * 3,
         [WaitKind.AGENTS, WaitKind.AGENTS, None]),
        ([Snapshot(agents={0: status("n1", None)}, unanswered=("n1",))] * 20, []),
    ],
    ids=["all", "one lost", "short", "over", "one silent"],
)  # fmt: skip
def test_the_silence_of_all_agents_whose_containers_run_is_shown(snapshots, shown):
    waits: list[Wait | None] = []
    silence = AgentSilence(waits.append)
    for second, snapshot in enumerate(snapshots):
        assert silence.check(Progress(snapshot=snapshot, at_s=1_000.0 + second)) is None
    assert [wait.kind if wait is not None else None for wait in waits] == shown
    assert {wait.since_s for wait in waits if wait is not None} <= {1_000.0}
