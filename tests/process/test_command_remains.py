"""What a killed command leaves: torn and damaged checkpoints, shared memory, processes of its own.

The program stands for a training program: it prints steps, saves, and notes each of its lives.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from perdure.training.config.job import Job, parse_job
from perdure.training.drill.driver import RunDriver, RunOutcome
from perdure.training.recovery.faults import FaultClass
from perdure.training.recovery.rungs import Rung
from perdure.training.supervisor.checkpoints import program_saves
from tests.jobs import job_document
from tests.local_run import LocalRun
from tests.values import not_none
from tests.waiting import wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

STEPS = 40
PROGRAM = """
import json, os, pathlib, re, signal, subprocess, sys, time

out, deed, resume = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
lives = out / "lives"
is_first = not lives.exists()
out.mkdir(exist_ok=True)

def save(step):
    if deed in ("torn", "damaged"):
        folder = out / f"checkpoint-{step}"
        folder.mkdir(exist_ok=True)
        (folder / "model.bin").write_text(json.dumps([step] * 1000))
        if deed == "torn" and is_first and step == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        state = folder / "trainer_state.json"
        state.write_text(json.dumps({"global_step": step}))
        if deed == "damaged" and is_first and step == 20:
            (folder / "model.bin").write_bytes(bytes(5000))
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        (out / f"ckpt-{step}.bin").write_text(json.dumps([step] * 1000))

def load():
    found = {int(re.search(r"(\\\\d+)(?:.bin)?$", path.name)[1]): path for path in out.glob("c*-*")}
    is_told = resume and deed != "shared-memory"
    path = pathlib.Path(resume[0]) if is_told else found[max(found)] if found else None
    if path is None:
        return 0
    if not path.is_dir():
        return json.loads(path.read_text())[0]
    with open(path / "trainer_state.json") as file:
        json.load(file)
    return json.loads((path / "model.bin").read_text())[0]

step = load()
with lives.open("a") as file:
    file.write(f"{os.getpid()} from {step}\\\\n")
if deed == "shared-memory":
    os.open(sys.argv[3], os.O_CREAT | os.O_EXCL | os.O_RDWR)
if deed == "orphan":
    code = "import os, time\\\\nwhile True: print(os.getpid(), flush=True); time.sleep(0.1)"
    launcher = ["sh", "-c", '"$@" & exit', "sh", "env", "-i", "setsid", sys.executable, "-c", code]
    subprocess.Popen(launcher, stdout=(out / "writers").open("a"))
while step < STEPS:
    step += 1
    time.sleep(0.1)
    print(f"step {step}/STEPS loss 2.0", flush=True)
    if step % 10 == 0:
        save(step)
        if deed == "leaves" and step < STEPS:
            sys.exit(85)
        if deed == "shared-memory" and is_first and step == 20:
            os.kill(os.getpid(), signal.SIGKILL)
""".replace("STEPS", str(STEPS)).replace("\\\\", "\\")


def run(home: Path, deed: str, *arguments: str, hook: Any = None, **worker: Any) -> RunOutcome:
    return RunDriver(home).run(job_of(home, deed, *arguments, **worker), hook=hook)


def job_of(home: Path, deed: str, *arguments: str, **worker: Any) -> Job:
    program = home / "program.py"
    program.write_text(PROGRAM)
    return parse_job(
        job_document(
            run_id=deed,
            storage={"address": f"file://{home}/store"},
            preflight={"nodes": False},
            worker={
                "command": [sys.executable, str(program), str(home / deed), deed, *arguments],
                "progress": {"patterns": [r"^step (?P<step>\d+)/(?P<target>\d+)"]},
                **worker,
            },
            engine={"kind": "local", "nodes": 1, "slots_per_node": 1, "spares": 1, "grace_s": 5},
        )
    )


def starts(home: Path, deed: str) -> list[int]:
    """The steps from which the lives of a run went on."""
    return [int(line.split()[-1]) for line in (home / deed / "lives").read_text().splitlines()]


def fault_classes(outcome: RunOutcome) -> list[FaultClass | None]:
    ends = [not_none(view.ended).fault for view in outcome.history.attempts]
    return [fault.fault_class if fault is not None else None for fault in ends]


def test_a_torn_folder_that_the_program_would_find_itself_is_set_aside(home):
    layout = {"kind": "transformers", "path": str(home / "torn")}
    outcome = run(home, "torn", checkpoints=layout)
    assert outcome.ended == "completed"
    assert starts(home, "torn") == [0, 10]
    assert fault_classes(outcome) == [FaultClass.NATIVE_CRASH, None]
    (kept,) = (home / "torn").glob("set-aside-*")
    assert (kept / "model.bin").exists()
    assert [save.step for save in program_saves(outcome.history)] == [10, 20, 30, 40]


@pytest.mark.long
def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(home):
    layout = {"kind": "transformers", "path": str(home / "damaged")}
    resume = {"args": ["${PERDURE_CHECKPOINT}"]}
    outcome = run(home, "damaged", checkpoints=layout, resume=resume)
    assert outcome.ended == "completed"
    assert starts(home, "damaged") == [0, 10]
    classes = [FaultClass.NATIVE_CRASH, FaultClass.CHECKPOINT_CORRUPT, None]
    assert fault_classes(outcome) == classes
    fault = not_none(not_none(outcome.history.attempts[1].ended).fault)
    assert f"{home}/damaged/checkpoint-20 of step 20" in fault.explanation
    assert (home / "damaged" / "set-aside-checkpoint_20.perdure" / "model.bin").exists()


@pytest.mark.long
def test_each_life_goes_on_from_the_step_at_which_the_last_one_left(home):
    layout = {"kind": "glob", "path": f"{home}/leaves/ckpt-*.bin"}
    resume = {"args": ["${PERDURE_CHECKPOINT}"]}
    outcome = run(home, "leaves", checkpoints=layout, resume=resume)
    assert outcome.ended == "completed"
    assert starts(home, "leaves") == [0, 10, 20, 30]
    saves = program_saves(outcome.history)
    assert [(save.step, save.attempt) for save in saves] == [
        (10, "1.1"), (20, "1.2"), (30, "1.3"), (40, "1.4")
    ]  # fmt: skip
    outcome.history.budgets_from = 0
    assert [recovery.progressed for recovery in outcome.history.recoveries()] == [True] * 3


@pytest.mark.long
def test_shared_memory_that_a_killed_life_left_is_removed_and_a_cause_of_its_own(home):
    name = Path(f"/dev/shm/perdure-test-{os.getpid()}x")  # noqa: S108 where such names are
    outcome = run(home, "shared-memory", str(name))
    try:
        assert outcome.ended == "completed"
        classes = [FaultClass.NATIVE_CRASH, FaultClass.LEFTOVER, None]
        assert fault_classes(outcome) == classes
        view = outcome.history.attempts[1]
        assert str(name) in not_none(not_none(view.ended).fault).explanation
        assert not_none(view.decision).rung is Rung.JOB_RESCHEDULE
    finally:
        name.unlink(missing_ok=True)


@pytest.mark.long
def test_a_process_without_parents_and_environment_ends_before_the_next_life(home):
    job = job_of(home, "orphan")
    killed: list[int] = []

    def kill_node(_run: Any, progress: Any) -> None:
        newest = progress.command_step
        if killed or newest is None or newest.step < 15:
            return
        local = LocalRun(home, job.run_id)
        record = home / "runs" / job.run_id / "nodes"
        wait_for(lambda: list(record.glob("*/*/unmarked.json")), what="the record of the agent")
        killed.extend(local.kill_node("node-0"))

    outcome = RunDriver(home).run(job, hook=kill_node)
    assert killed
    assert outcome.ended == "completed"
    lines = (home / "orphan" / "writers").read_text().split()
    writers = list(dict.fromkeys(lines))
    assert len(writers) == 2
    first, second = writers
    assert lines.index(second) > len(lines) - 1 - lines[::-1].index(first), "one after the other"
    assert not [pid for pid in map(int, writers) if psutil.pid_exists(pid)]
