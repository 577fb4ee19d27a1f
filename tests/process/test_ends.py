"""Exit code 0 of what has not come to its end, in real processes; and runs that are reopened."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from perdure.training.config.job import Job
from perdure.training.drill.driver import RunDriver, RunOutcome
from perdure.training.recovery.faults import Fault
from tests.jobs import small_job
from tests.process.harness import faulty_job

pytestmark = pytest.mark.process

PROGRAM = """
import os, signal, sys, time
first = os.environ["MA_PROC_START_CNT"] == "1"
for iteration in range(1, 41):
    print(f"iteration {iteration:8d}/ {40:8d} | lm loss: {1 / iteration:.4f}", flush=True)
    if iteration == 15 and "survived" in sys.argv:
        try:
            raise ConnectionResetError("the tracker is gone")
        except ConnectionResetError:
            import traceback; traceback.print_exc()
    if iteration == 15 and first and "raises" in sys.argv:
        raise TypeError("forward() missing 1 required positional argument: 'targets'")
    if iteration == 15 and first and "killed" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    if iteration == 15 and "leaves" in sys.argv:
        sys.exit(0)
"""


@pytest.fixture
def program(tmp_path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def command_job(home: Path, run_id: str, script: str, **sections: Any) -> Job:
    """A job whose command is a script of a shell."""
    own = {
        "worker": {"command": ["bash", "-c", script]},
        "engine": {"nodes": 1, "slots_per_node": 1, "spares": 1, "grace_s": 1},
        "preflight": {"nodes": False},
    }
    return small_job(home, run_id=run_id, **{**own, **sections})


def piped(program: Path, how: str) -> str:
    return f"{sys.executable} {program} {how} 2>&1 | tee -a {program.parent}/train.log"


def faults_of(played: RunOutcome) -> list[Fault]:
    """Of the attempts that have failed."""
    ends = (view.ended for view in played.history.attempts)
    return [end.fault for end in ends if end is not None and end.fault is not None]


def test_a_crash_behind_a_pipe_ends_the_run_with_its_fault(tmp_path, program):
    played = RunDriver(tmp_path).run(command_job(tmp_path, "raises", piped(program, "raises")))
    assert "TypeError" in (tmp_path / "train.log").read_text(), "it happened"
    assert played.ended == "user_code_error is for the user to fix"
    (fault,) = faults_of(played)
    assert (fault.fault_class, fault.node) == ("user_code_error", "node-0")
    assert "forward() missing 1 required" in fault.evidence
    assert "set -o pipefail" in fault.explanation


@pytest.mark.long
def test_a_program_that_survives_an_error_has_ended_well(tmp_path, program):
    played = RunDriver(tmp_path).run(command_job(tmp_path, "survives", piped(program, "survived")))
    log = (tmp_path / "train.log").read_text()
    assert "ConnectionResetError: the tracker is gone" in log
    assert (played.ended, len(played.history.attempts)) == ("completed", 1)


@pytest.mark.long
def test_a_script_that_ends_before_its_torchrun_in_the_background_is_its_users_to_mend(tmp_path):
    program = tmp_path / "train.py"
    program.write_text("import time; time.sleep(600)")
    launch = f"{sys.executable} -m torch.distributed.run --standalone {program}"
    script = f"nohup {launch} > {tmp_path}/train.log 2>&1 & sleep 5"
    played = RunDriver(tmp_path).run(command_job(tmp_path, "background", script))
    assert played.ended == "launch_misconfigured is for the user to fix"
    (fault,) = faults_of(played)
    assert "torch.distributed.run" in fault.evidence
    assert fault.evidence.endswith("was still running")
    assert "`wait`" in fault.action
    assert played.leftovers == ()


@pytest.mark.long
def test_a_program_that_is_killed_behind_a_pipe_is_started_again_and_completes(tmp_path, program):
    # The shell does not say a word about it: only the count of iterations shows it.
    played = RunDriver(tmp_path).run(command_job(tmp_path, "killed", piped(program, "killed")))
    counts = (tmp_path / "train.log").read_text().split("iteration")[1:]
    assert [int(one.split("/")[0]) for one in counts] == [*range(1, 16), *range(1, 41)]
    assert played.ended == "completed"
    (fault,) = faults_of(played)
    assert fault.evidence == "ended at iteration 15 of 40 with exit code 0"
    decisions = [view.decision for view in played.history.attempts]
    assert [one and one.rung for one in decisions] == ["in_place_restart", None]


@pytest.mark.long
def test_a_program_that_leaves_at_the_same_step_again_is_its_users_to_mend(tmp_path, program):
    played = RunDriver(tmp_path).run(command_job(tmp_path, "leaves", piped(program, "leaves")))
    assert played.ended == (
        "ended at iteration 15 of 40 with exit code 0; user_code_error is for the user to fix"
    )
    first, second = faults_of(played)
    assert (first.fault_class, second.fault_class) == ("unknown", "user_code_error")
    assert "twice at the same step" in second.explanation


@pytest.mark.long
def test_a_crash_behind_a_pipe_does_not_leave_the_other_nodes_waiting(tmp_path, program):
    script = f'[ "$VC_TASK_INDEX" = 0 ] && exec sleep 3600; {piped(program, "raises")}'
    engine = {"nodes": 2, "slots_per_node": 1, "spares": 0, "grace_s": 1}
    played = RunDriver(tmp_path).run(command_job(tmp_path, "one-of-two", script, engine=engine))
    (fault,) = faults_of(played)
    assert (fault.fault_class, fault.node) == ("user_code_error", "node-1")
    assert played.leftovers == ()


@pytest.mark.long
def test_a_command_that_is_stopped_on_request_has_not_completed_by_exiting_with_0(tmp_path):
    script = f"trap 'touch {tmp_path}/asked; exit 0' TERM; sleep 600 & wait"
    played = RunDriver(tmp_path, limit_s=20).run(command_job(tmp_path, "stopped", script))
    assert (tmp_path / "asked").exists()
    assert played.ended == "not ended after 20 s"
    assert played.leftovers == ()


HEARTBEATS = """
import os, sys, time
from pathlib import Path
from perdure.training.liveness.heartbeat import HeartbeatWriter
beat = HeartbeatWriter(Path(os.environ["PERDURE_HEARTBEAT"]))
for step in range(int(sys.argv[1])):
    beat.beat(step=step)
    time.sleep(0.1)
"""


@pytest.mark.long
@pytest.mark.parametrize(("num_steps", "ended"), [(12, "ended at 11 of 30"), (30, "completed")])
def test_heartbeats_short_of_the_target_of_the_job_are_no_completion(tmp_path, num_steps, ended):
    program = tmp_path / "train.py"
    program.write_text(HEARTBEATS)
    script = f"{sys.executable} {program} {num_steps} | cat"
    job = command_job(tmp_path, f"beats-{num_steps}", script, steps=30)
    played = RunDriver(tmp_path).run(job)
    assert played.ended.startswith(ended)
    if ended != "completed":
        assert faults_of(played)[-1].evidence == f"ended at {num_steps - 1} of 30 with exit code 0"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "faults", "env", "words"),
    [
        ("sys-exit", "sys_exit:0:6,sys_exit:1:6,sys_exit:2:6,sys_exit:3:6", {},
         "the recipe called sys.exit() at step 5 of 30"),
        ("os-exit", "os_exit:1:6", {}, "the process ended with exit code 0 at step 5 of 30"),
        ("left", "", {"LEAVE_AT": "10"}, "the recipe returned at step 10 of 30"),
        ("left-at-the-end", "", {"LEAVE_AT": "30"}, "the recipe returned at step 30 of 30"),
    ],
)  # fmt: skip
def test_a_recipe_that_ends_before_its_loop_is_a_fault(home, name, faults, env, words):
    job = faulty_job(home, name, steps=30, faults=faults, env=env, pace_s=0.02)
    played = RunDriver(home).run(job)
    marks = sorted((home / f"marks-{name}").iterdir())
    assert len(marks) == len(faults.split(",") if faults else []), "they fired"
    assert "user_code_error" in played.ended
    (fault,) = faults_of(played)
    assert fault.fault_class == "user_code_error"
    assert words in fault.evidence
    assert played.leftovers == ()


TORCHRUN = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
for iteration in range(1, 31):
    if dist.get_rank() == 0:
        print(f"iteration {iteration:8d}/ {30:8d} | lm loss: {1 / iteration:.4f}", flush=True)
    dist.barrier()
    if iteration == 15 and dist.get_rank() == 1 and os.environ["MA_PROC_START_CNT"] == "1":
        os.kill(os.getpid(), 11)
dist.destroy_process_group()
"""
SCRIPT = """
torchrun --nproc_per_node=$MA_NUM_GPUS --master_addr=$MASTER_ADDR --master_port=$MASTER_PORT \\
    train.py 2>&1 | tee -a train.log
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_script_that_pipes_torchrun_into_tee_recovers_from_a_rank_that_crashes(bench, tmp_path):
    (tmp_path / "train.py").write_text(TORCHRUN)
    (tmp_path / "train.sh").write_text(SCRIPT)
    job = {
        "run_id": "piped-torchrun",
        "storage": {"address": f"file://{bench.home}/store"},
        "worker": {"command": ["bash", "train.sh"], "cwd": str(tmp_path)},
        "engine": {"nodes": 1, "slots_per_node": 2, "spares": 0, "grace_s": 2},
        "preflight": {"nodes": False},
    }
    running = bench.start(job)
    assert running.finish(timeout_s=400) == 0, running.out
    assert "exitcode: -11" in (tmp_path / "train.log").read_text(), "it crashed"
    assert running.rungs() == ["in_place_restart"]
    first, second = running.history.attempts
    assert first.ended is not None
    assert first.ended.fault is not None
    assert first.ended.fault.fault_class == "native_crash"
    assert "set -o pipefail" in first.ended.fault.explanation
    assert second.ended is not None
    assert second.ended.outcome == "completed"
    running.leave_nothing()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_completed_command_goes_on_when_it_is_reopened_and_a_changed_one_is_not_ignored(
    bench, tmp_path
):
    def job(word: str, **changes: Any) -> dict[str, Any]:
        return {
            "run_id": "reopened",
            "storage": {"address": f"file://{bench.home}/store"},
            "worker": {"command": ["bash", "-c", f"echo {word} >> {tmp_path}/words"]},
            "engine": {"nodes": 1, "slots_per_node": 1, "spares": 0, "grace_s": 1},
            "preflight": {"nodes": False},
            **changes,
        }

    def words_after(exit_code: int, document: dict[str, Any], *options: str) -> list[str]:
        running = bench.start(document, *options)
        assert running.finish() == exit_code, running.out
        running.leave_nothing()
        return (tmp_path / "words").read_text().split()

    assert words_after(0, job("one")) == ["one"]
    assert words_after(1, job("two")) == ["one"]
    assert "was completed with another worker.command" in bench.look(job("two")).out
    assert words_after(0, job("two"), "--reopen") == ["one", "two"]
    assert words_after(0, job("three", steps=9)) == ["one", "two", "three"]


SAVING = """
import os, pathlib, signal, sys, threading, time
folder, how, steps = pathlib.Path(sys.argv[1]), sys.argv[2], 40
folder.mkdir(exist_ok=True)
tracker = folder / "latest_checkpointed_iteration.txt"
is_asked = False
def ask(number, frame):
    global is_asked
    is_asked = True
signal.signal(signal.SIGTERM, ask)
def save(step):
    (folder / f"iter_{step:07d}").mkdir(exist_ok=True)
    (folder / f"iter_{step:07d}" / "model.pt").write_text("x" * 100)
    tracker.write_text(str(step))
begin = int(tracker.read_text()) if tracker.exists() else 0
if begin and how == "empty":
    print(f"There seems not to be a single sample in your epoch_iterator, stopping at {begin}!")
    sys.exit(0)
for step in range(begin + 1, steps + 1):
    time.sleep(0.02)
    print(f" iteration {step:8d}/{steps:8d} | lm loss: 1.0E+00 |", flush=True)
    with (folder / "steps").open("a") as file:
        file.write(f"{step}\\n")
    if step == 15 and not begin:
        if how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        if how == "empty":
            save(10)
            os.kill(os.getpid(), signal.SIGKILL)
    if step == steps or is_asked:
        save(step)
    if is_asked:
        print("[exiting program after receiving SIGTERM.] datetime: now", flush=True)
        sys.exit(0)
    if step == 20 and how == "limit":
        print("[exiting program after 690 minutes] datetime: now", flush=True)
        sys.exit(0)
if how == "abort":
    print("terminate called without an active exception", file=sys.stderr, flush=True)
    os.abort()
if how == "raises":
    open(folder / "best")
if how == "thread":
    threading.Thread(target=time.sleep, args=(100_000,)).start()
"""


def saving_job(home: Path, how: str, *, sections: bool = True, **changes: Any) -> Job:
    """A program in the form of Megatron-LM that resumes from what it has saved."""
    (home / "train.py").write_text(SAVING)
    worker: dict[str, Any] = {
        "command": [sys.executable, str(home / "train.py"), str(home / "saved"), how]
    }
    if sections:
        worker["progress"] = {"kind": "megatron"}
        worker["checkpoints"] = {"kind": "megatron", "path": str(home / "saved")}
    return command_job(home, f"saving-{how}", "", worker=worker, **changes)


def steps_done(home: Path) -> list[int]:
    return [int(line) for line in (home / "saved" / "steps").read_text().split()]


@pytest.mark.parametrize(
    "sections", [True, pytest.param(False, marks=pytest.mark.long)], ids=["known", "unknown"]
)
def test_a_program_that_saves_on_a_signal_and_exits_with_0_goes_on_from_its_save(
    tmp_path, sections
):
    played = RunDriver(tmp_path).run(saving_job(tmp_path, "signal", sections=sections))
    assert played.ended == "completed"
    assert steps_done(tmp_path) == list(range(1, 41)), "no step is lost, and none is done twice"
    (fault,) = faults_of(played)
    assert fault.fault_class == "preempted"
    assert fault.evidence.startswith("ended at iteration 15 of 40" if not sections else "ended at")
    assert "exiting program after receiving SIGTERM" in fault.evidence


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("abort", "terminate called without an active exception"),
        pytest.param("raises", "FileNotFoundError", marks=pytest.mark.long),
        pytest.param("thread", "shows no sign of life", marks=pytest.mark.long),
    ],
)
def test_a_failure_after_the_last_step_is_a_note_of_a_completed_run(tmp_path, how, words):
    # The save of the last step has been seen by then.
    played = RunDriver(tmp_path).run(saving_job(tmp_path, how, watch={"command_quiet_s": 12}))
    assert (played.ended, len(played.history.attempts)) == ("completed", 1)
    assert steps_done(tmp_path) == list(range(1, 41))
    ended = played.history.attempts[0].ended
    assert ended is not None
    assert (ended.to_step, ended.fault) == (40, None)
    (note,) = ended.notes
    assert note.startswith("all 40 steps are done and the checkpoint of step 40 is complete")
    assert words in note
    assert played.leftovers == ()


@pytest.mark.long
def test_a_stream_that_is_empty_on_resume_stops_the_run_the_second_time(tmp_path):
    played = RunDriver(tmp_path).run(saving_job(tmp_path, "empty"))
    assert played.ended.startswith("ended at 15 of 40 without a step")
    killed, first, second = faults_of(played)
    assert killed.fault_class == "native_crash"
    assert (first.fault_class, second.fault_class) == ("unknown", "launch_misconfigured")
    assert "its data ends before its target" in second.explanation


@pytest.mark.long
def test_a_limit_of_its_own_ends_a_run_that_says_how_far_it_came(tmp_path):
    played = RunDriver(tmp_path).run(saving_job(tmp_path, "limit"))
    assert played.ended.startswith("ended at 20 of 40: [exiting program after 690 minutes]")
    assert len(played.history.attempts) == 1


UNEVEN = """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(1, 31):
    if rank == 1 and step == 11:
        sys.exit(0)
    dist.all_reduce(torch.ones(1))
    if rank == 0:
        print(f"step {step}/30 loss 2.0", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("per", ["node", "device"])
def test_a_rank_without_further_data_is_the_first_cause_and_stops_the_run_when_it_leaves_again(
    tmp_path, per
):
    program = tmp_path / "train.py"
    program.write_text(UNEVEN)
    launch = (
        f"exec {sys.executable} -m torch.distributed.run --nproc_per_node=$MA_NUM_GPUS "
        f"--master_addr=$MASTER_ADDR --master_port=$MASTER_PORT {program}"
    )
    script = launch if per == "node" else f"exec {sys.executable} {program}"
    engine = {"nodes": 1, "slots_per_node": 2, "spares": 0, "grace_s": 1}
    worker = {"command": ["bash", "-c", script], "per": per}
    job = command_job(tmp_path, f"uneven-{per}", "", worker=worker, engine=engine)
    played = RunDriver(tmp_path).run(job)
    first, second = faults_of(played)
    assert [(fault.rank, fault.node, fault.code) for fault in (first, second)] == [
        (1, None, "RANK_ENDED")
    ] * 2
    assert second.fault_class == "user_code_error"
    assert "same number of batches" in second.action
    assert "rank 1 ended with exit code 0" in played.ended


IN_SLICES = """
import pathlib, sys
reached = pathlib.Path("reached")
step = int(reached.read_text()) if reached.exists() else 0
for step in range(step + 1, step + 6):
    print(f"step {step}/20 loss {1 / step:.4f}", flush=True)
    reached.write_text(str(step))
with open("lives", "a") as lives:
    lives.write(f"{step} ")
sys.exit(0 if step == 20 else 85)
"""
SHOWN = {"patterns": [r"^step (?P<step>\d+)/(?P<target>\d+) loss (?P<loss>\S+)"]}


def test_a_program_that_asks_to_be_started_again_is_no_fault_and_uses_no_budget(tmp_path):
    (tmp_path / "train.py").write_text(IN_SLICES)
    worker = {
        "command": [sys.executable, "train.py"],
        "cwd": str(tmp_path),
        "progress": SHOWN,
        "restart_codes": [85, 99],
    }
    limits = {"max_restarts": 0, "in_place_retries": 1}
    job = command_job(tmp_path, "slices", "", worker=worker, restart=limits)
    played = RunDriver(tmp_path).run(job)
    assert (tmp_path / "lives").read_text().split() == ["5", "10", "15", "20"]
    assert played.ended == "completed"
    asked = faults_of(played)
    assert [fault.fault_class for fault in asked] == ["restart_requested"] * 3
    assert all("exit code 85" in fault.evidence for fault in asked)
    decisions = [view.decision for view in played.history.attempts]
    assert [one and one.rung for one in decisions] == [*["in_place_restart"] * 3, None]


@pytest.mark.long
def test_a_program_that_asks_again_and_again_without_a_step_stops(tmp_path):
    worker = {"command": ["bash", "-c", "exit 85"], "restart_codes": [85]}
    limits = {"max_restarts": 0, "in_place_retries": 2}
    job = command_job(tmp_path, "stands", "", worker=worker, restart=limits)
    played = RunDriver(tmp_path).run(job)
    assert "in_place_restart: used 2 of 2 in a row" in played.ended
    assert len(played.history.attempts) == 3


@pytest.mark.long
def test_a_program_that_raises_and_whose_hook_at_exit_never_returns_ends_as_its_exception(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(
        "import atexit, time\natexit.register(time.sleep, 9999)\n"
        "print('step 1/9 loss 2.0', flush=True)\n"
        "raise ValueError('sample 3: expected 2048 tokens, got 0')\n"
    )
    played = RunDriver(tmp_path).run(
        command_job(tmp_path, "lingers", f"{sys.executable} {program} && true")
    )
    assert played.ended == "user_code_error is for the user to fix"
    (fault,) = faults_of(played)
    assert fault.evidence == "ValueError: sample 3: expected 2048 tokens, got 0"
    assert played.leftovers == ()
