"""Steps that an agent reads from what a command prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure.storage.local import LocalStore
from perdure.training.agent.hang_check import HangCheck
from perdure.training.commands.progress import GrowingLog, StepFollower
from perdure.training.config.job import Job
from perdure.training.journal.steps import read_kept_steps
from perdure.training.liveness.heartbeat import Phase
from tests.jobs import small_job
from tests.unit.agent.conftest import agent_config, start_order
from tests.values import not_none
from tests.waiting import wait_for

PROGRESS = {"patterns": [r"^step (?P<step>\d+)(?:/(?P<target>\d+))? loss (?P<loss>\S+)"]}


def write(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


@pytest.fixture
def log(tmp_path) -> Path:
    path: Path = tmp_path / "stdout.log"
    return path


def job_of(folder: Path) -> Job:
    worker = {"command": ["true"], "progress": PROGRESS}
    return small_job(folder, run_id="run", worker=worker)


@pytest.fixture
def shown(tmp_path, log) -> StepFollower:
    order = start_order(tmp_path, "true", is_command=True, job=job_of(tmp_path))
    return not_none(StepFollower.of(order, tmp_path, [log]))


def test_only_whole_lines_count(log):
    growing = GrowingLog.from_its_end(log)
    assert list(growing.lines()) == []
    write(log, "one\ntw")
    assert list(growing.lines()) == ["one"]
    write(log, "o\n")
    assert list(growing.lines()) == ["two"]


def test_what_was_printed_before_is_of_another_attempt(log):
    write(log, "before\n")
    growing = GrowingLog.from_its_end(log)
    write(log, "after\n")
    assert list(growing.lines()) == ["after"]


def test_a_bar_that_stands_still_is_a_line(log):
    growing = GrowingLog.from_its_end(log)
    write(log, "\r 1/9 [00:01<")
    assert list(growing.lines()) == []
    assert list(growing.lines()) == [" 1/9 [00:01<"]
    assert list(growing.lines()) == []
    write(log, "\r 2/9 [00:02<\r 3/9 [00:03<")
    assert list(growing.lines()) == [" 2/9 [00:02<"]


def test_of_a_flood_of_output_the_newest_is_read(log, monkeypatch):
    monkeypatch.setattr("perdure.training.commands.progress.MAX_READ_BYTES", 8)
    growing = GrowingLog.from_its_end(log)
    write(log, "x" * 100 + "\nlast\n")
    assert list(growing.lines())[-1] == "last"


def test_a_job_that_does_not_say_how_to_read_steps_has_none(tmp_path, log):
    job = small_job(worker={"command": ["true"]})
    order = start_order(tmp_path, "true", is_command=True, job=job)
    assert StepFollower.of(order, tmp_path, [log]) is None


def test_steps_are_in_the_attempts_log_and_in_the_store(shown, log, tmp_path):
    write(log, "step 1 loss 3\nstep 2 loss 2\n")
    shown.poll()
    assert (shown.newest.step, shown.newest.target) == (2, None)
    store = LocalStore(tmp_path / "store")
    shown.upload(store)
    write(log, "step 3/9 loss 1\n")
    shown.finish()
    assert (shown.newest.step, shown.newest.target) == (3, 9)
    assert shown.newest.first_step == 1
    assert shown.newest.first_age_s >= shown.newest.age_s
    shown.upload(store)
    assert {s: record.loss for s, record in read_kept_steps(store, "run").items()} == {
        1: 3,
        2: 2,
        3: 1,
    }
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_two_steps_give_a_pace_and_the_last_one_an_end(shown, log):
    write(log, "step 10/20 loss 3\n")
    shown.poll()
    assert shown.beat() is None
    write(log, "step 15/20 loss 2\n")
    shown.poll()
    beat = not_none(shown.beat())
    assert (beat.phase, beat.step, beat.stride) == (Phase.STEP, 15, 5)
    write(log, "step 20/20 loss 2\n")
    shown.poll()
    assert not_none(shown.beat()).phase is Phase.DONE


def test_a_command_that_prints_and_shows_no_further_step_hangs(new_group, tmp_path):
    chatter = "import time\nfor n in (1, 2): print(f'step {n} loss 1'); time.sleep(0.2)\n"
    chatter += "while True: print('waiting'); time.sleep(0.05)"
    group: Any = new_group(
        sys.executable, "-u", "-c", chatter, is_command=True, job=job_of(tmp_path)
    )
    group.start({}, proc_start_cnt=1)
    config = agent_config(hang_timeout_s=3.0, command_quiet_s=600.0)
    check = HangCheck(config, is_command=True, marker=str(tmp_path))

    def hang() -> Any:
        group.step_follower.poll()
        return check.check(group)

    hang_report = wait_for(hang)
    assert (hang_report.step, hang_report.rank, hang_report.limit_s) == (2, None, 3.0)
    assert hang_report.why == "no step after 2 in its output"
