"""The end of an allocation: SIGTERM to every process of a run at once, and the next start."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import psutil
import pytest

from perdure.storage.address import open_store
from perdure.storage.checkpoint import CheckpointStore
from perdure.tasks.termination import EXIT_BY_PLATFORM
from perdure.training.supervisor.checkpoints import program_saves
from tests.process.harness import Running, Workbench
from tests.values import not_none
from tests.waiting import wait_for
from tests.workplace import kill_leftovers

pytestmark = pytest.mark.process
ENDED = "ended from outside"


@pytest.fixture
def bare(bench, tmp_path, migrated) -> Iterator[Workbench]:
    """A home without a server, in an environment that names none."""
    home = tmp_path / "home"
    (home / "prefect").mkdir(parents=True, mode=0o700)
    shutil.copyfile(migrated, home / "prefect" / "prefect.db")
    yield Workbench(home, "", bench.corpus)
    kill_leftovers(home)


def everything(running: Running) -> Iterator[psutil.Process]:
    """All processes of a run, its supervisor included."""
    if running.process is not None and running.process.poll() is None:
        yield psutil.Process(running.process.pid)
    yield from running.local.processes()
    if not running.bench.api_url:  # else the server is the tests' own
        yield from (process for process in psutil.process_iter() if is_of(process, running.bench))


def is_of(process: psutil.Process, bench: Workbench) -> bool:
    """Whether a process belongs to the Prefect server of a home."""
    with suppress(psutil.Error):
        return process.environ().get("PREFECT_HOME") == str(bench.home / "prefect")
    return False


def end_allocation(running: Running) -> None:
    """Have the platform end everything; no process is killed by force."""
    for process in list(everything(running)):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    assert running.finish(hurry=False) == EXIT_BY_PLATFORM, running.out
    wait_for(lambda: not running.local.processes(), what=f"the end of all: {running.out}")


def assert_free_of_charge(running: Running) -> None:
    """That no attempt that ended from outside was called a fault, or has cost anything."""
    history = running.history
    assert [view.ended.fault for view in history.attempts if view.ended is not None] == [
        None
    ] * len(history.attempts)
    assert running.rungs() == []
    assert history.isolated == ()
    assert history.recoveries() == []


@pytest.mark.parametrize("ends", [(7,), pytest.param((7, 15), marks=pytest.mark.long)])
def test_several_allocations_train_as_one(bench, undisturbed_pair, ends):
    job = bench.pair(f"allocations-{len(ends)}", checkpoint={"every_steps": 1000})
    starts = []
    for step in ends:
        running = bench.start(job)
        running.reach(step)
        end_allocation(running)
        last = running.history.attempts[-1]
        assert last.ended is not None
        assert last.ended.outcome == ENDED
        assert running.history.ended is None
        assert running.history.committed_step == last.ended.to_step == running.step() >= step
        assert "ended by the platform" in running.out
        starts.append(running.history.committed_step)
    running = bench.start(job)
    running.complete(undisturbed_pair)
    assert [view.from_step for view in running.history.attempts] == [0, *starts]
    assert_free_of_charge(running)


@pytest.mark.long
@pytest.mark.prefect
def test_the_server_that_ends_with_the_allocation_delays_nothing(bare, undisturbed_pair):
    job = bare.pair("serverless", checkpoint={"every_steps": 1000})
    for step in (5, 11):
        running = bare.start(job)
        running.reach(step)
        end_allocation(running)
        assert not [process for process in psutil.process_iter() if is_of(process, bare)]
    running = bare.start(job)
    running.complete(undisturbed_pair)
    assert len(running.history.attempts) == 3
    assert_free_of_charge(running)


@pytest.mark.long
def test_a_signal_in_the_middle_of_a_save_loses_no_step(bench, undisturbed_pair):
    job = bench.pair("in-a-save", checkpoint={"every_steps": 1})
    running = bench.start(job)
    running.reach(6)
    end_allocation(running)
    store = CheckpointStore(open_store(running.job.storage), "in-a-save")
    assert store.latest() == running.history.committed_step == running.step()
    bench.start(job).complete(undisturbed_pair)


@pytest.mark.long
def test_what_the_platform_kills_before_its_end_is_on_record_is_no_lost_node(
    bench, undisturbed_pair
):
    job = bench.pair("killed-early")
    running = bench.start(job)
    running.reach(12)
    running.kill_supervisor()
    end_by_force(running)
    again = bench.start(job)
    again.complete(undisturbed_pair)
    assert_free_of_charge(again)
    assert [view.ended.outcome for view in again.history.attempts if view.ended] == [
        ENDED,
        "completed",
    ]


def end_by_force(running: Running) -> None:
    """SIGTERM to all, then SIGKILL once the agents have noted it."""
    processes = running.local.processes()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    marks = running.folder.glob("nodes/*/*/terminated")
    wait_for(lambda: any(marks), what="the agents' marks")
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.long
def test_a_command_that_saves_on_sigterm_and_exits_with_0_goes_on_where_it_saved(bench, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    job = {
        "run_id": "command-allocations",
        "storage": {"address": f"file://{bench.home}/store"},
        "worker": {"command": [sys.executable, str(script), str(tmp_path / "state")]},
        "engine": {"nodes": 1, "slots_per_node": 1, "spares": 0, "grace_s": 10},
        "preflight": {"nodes": False},
    }
    for number in (1, 2):
        running = bench.start(job)
        wait_for(partial(has_begun, tmp_path, number), what="its start")
        end_allocation(running)
    (tmp_path / "state.go").touch()
    running = bench.start(job)
    running.complete()
    assert log_of(tmp_path).split() == ["begins", "saved", "begins", "saved", "begins", "ends"]
    assert_free_of_charge(running)


def has_begun(tmp_path, times: int) -> bool:
    return log_of(tmp_path).count("begins") == times


def log_of(tmp_path) -> str:
    log = tmp_path / "state.log"
    return log.read_text() if log.exists() else ""


PROGRAM = """
import os, signal, sys, time
state = sys.argv[1]
def note(word):
    with open(state + ".log", "a") as file:
        file.write(word + "\\n")
wanted = []
signal.signal(signal.SIGTERM, lambda *_: wanted.append(1))
note("begins")
while not os.path.exists(state + ".go"):
    time.sleep(0.05)
    if wanted:
        time.sleep(1)
        note("saved")
        sys.exit(0)
note("ends")
"""


STEPPING = """
import os, signal, sys, time
out = sys.argv[1]
wanted, step = [], 0
signal.signal(signal.SIGTERM, lambda *_: wanted.append(1))
while not wanted:
    step += 1
    print(f"step {step}/100000 loss 2.0", flush=True)
    time.sleep(0.1)
with open(f"{out}/ckpt-{step}.bin", "w") as file:
    file.write("weights" * 1000)
"""


@pytest.mark.long
def test_ctrl_c_puts_the_last_save_of_a_program_on_record(bench, tmp_path):
    script = tmp_path / "stepping.py"
    script.write_text(STEPPING)
    job = {
        "run_id": "interrupted",
        "storage": {"address": f"file://{bench.home}/store"},
        "worker": {
            "command": [sys.executable, str(script), str(tmp_path)],
            "progress": {"patterns": [r"^step (?P<step>\d+)/(?P<target>\d+)"]},
            "checkpoints": {"kind": "glob", "path": f"{tmp_path}/ckpt-*.bin"},
        },
        "engine": {"nodes": 1, "slots_per_node": 1, "spares": 0, "grace_s": 10},
        "preflight": {"nodes": False},
    }
    running = bench.start(job)
    logs = bench.home / "runs" / "interrupted" / "nodes"
    wait_for(
        lambda: any("step 5/" in path.read_text() for path in logs.rglob("command-*stdout*")),
        what="its fifth step",
    )
    running.process.send_signal(signal.SIGINT)
    assert running.finish(hurry=False) == 1
    assert "cancelled" in running.out
    (save,) = tmp_path.glob("ckpt-*.bin")
    step = int(save.stem.removeprefix("ckpt-"))
    (view,) = running.history.attempts
    end = not_none(view.ended)
    assert (end.outcome, end.to_step) == ("stopped", step)
    assert [save.step for save in program_saves(running.history)] == [step]
    running.leave_nothing()


def test_sigterm_before_the_first_attempt_leaves_no_agent_behind(bench):
    job = bench.pair("too-early", preflight={"nodes": True})
    running = bench.start(job)
    wait_for(running.local.processes, what="an agent")
    assert running.process is not None
    running.process.send_signal(signal.SIGTERM)
    assert running.finish(hurry=False) == EXIT_BY_PLATFORM, running.out
    wait_for(lambda: not running.local.processes(), what="the end of the agents")
    assert running.history.attempts == []
    assert running.history.ended is None
    running.leave_nothing()


@pytest.mark.long
def test_sigterm_to_the_supervisor_alone_ends_nothing_else(bench, undisturbed_pair):
    job = bench.pair("alone")
    running = bench.start(job)
    running.reach(5)
    assert running.process is not None
    running.process.send_signal(signal.SIGTERM)
    assert running.finish(hurry=False) == EXIT_BY_PLATFORM, running.out
    assert "attempt 1.1 goes on" in running.out
    at_end = running.step()
    wait_for(lambda: running.step() > at_end + 2, what="steps without a supervisor")
    again = bench.start(job)
    again.complete(undisturbed_pair)
    assert len(again.history.attempts) == 1


@pytest.mark.long
@pytest.mark.prefect
def test_two_first_commands_at_once_start_one_server_and_one_training(bare):
    job = bare.pair("twins", steps=6)
    first, second = bare.start(job), bare.start(job)
    codes = sorted([first.finish(), second.finish()])
    assert codes == [0, 1], first.out
    assert "AlreadySupervised: run twins is still training" in first.out
    assert len(first.history.attempts) == 1
    first.leave_nothing()
