"""Starts that need longer than their limit, and hangs that come again at the same place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure.training.drill.driver import RunDriver, RunOutcome
from perdure.training.recovery.faults import IDLE_START, Fault
from perdure.training.recovery.rungs import Rung
from tests.process.harness import REPO, faulty_job
from tests.values import not_none
from tests.waiting import BEYOND_A_TEST_S

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

QUIET_S = 4.0
# Is killed in its first life, and skips its data without a word in all others: in the second until
# it is ended.
SKIPPING = """
import os, pathlib, signal, time
saved, lives = pathlib.Path("saved-step"), pathlib.Path("lives")
with lives.open("a") as file:
    file.write("life\\n")
life = len(lives.read_text().split())
first_life = life == 1
step = 0 if first_life else int(saved.read_text())
if not first_life:
    print("resumes", flush=True)
    time.sleep(float(os.environ["SKIPS_S"]) if life > 2 else 100_000)
while step < 30:
    step += 1
    print(f"step {step}/30 loss 1.0", flush=True)
    saved.write_text(str(step))
    time.sleep(0.02)
    if first_life and step == 20:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def play_command(home: Path, name: str, *, skips_s: float) -> RunOutcome:
    folder = home / name
    folder.mkdir()
    (folder / "skipping.py").write_text(SKIPPING)
    job = faulty_job(
        home,
        name,
        steps=30,
        worker={"command": ["python3", "skipping.py"], "recipe": None, "cwd": str(folder)},
        watch={"command_quiet_s": QUIET_S},
        engine={"kind": "local", "nodes": 1, "slots_per_node": 1, "spares": 0, "warm_spares": 0},
        env={"SKIPS_S": str(skips_s)},
    )
    return RunDriver(home).run(job)


def faults_of(played: RunOutcome) -> list[Fault]:
    ended = [view.ended for view in played.history.attempts if view.ended is not None]
    return [end.fault for end in ended if end.fault is not None]


def test_a_start_that_skips_for_longer_than_its_limit_has_twice_the_time_in_its_next_life(home):
    played = play_command(home, "skips", skips_s=1.5 * QUIET_S)
    assert played.ended == "completed"
    crash, hang = faults_of(played)
    assert (crash.fault_class, hang.fault_class) == ("native_crash", "hang")
    assert hang.code == IDLE_START
    assert f"limit {QUIET_S:.0f} s (raise watch.command_quiet_s if it needs" in hang.evidence
    assert "processors were idle" in hang.evidence


@pytest.mark.long
def test_an_idle_start_that_hangs_again_at_the_same_place_stops_the_run(home):
    played = play_command(home, "never", skips_s=BEYOND_A_TEST_S)
    *_, last = faults_of(played)
    assert last.frame == "<module> (skipping.py)"
    assert len(played.history.attempts) == 3
    assert not_none(played.history.attempts[-1].decision).rung is Rung.STOP
    assert "raise watch.command_quiet_s" in played.ended


def play_session(home: Path, name: str, **env: str) -> RunOutcome:
    changes: dict[str, Any] = {
        "worker": {"recipe": "tests.recipes.lone_evaluation:main", "cwd": str(REPO)},
        "checkpoint": {"every_steps": 5},
        "restart": {"hang_timeout_s": 3},
        "engine": {"kind": "local", "nodes": 1, "slots_per_node": 2, "spares": 0, "warm_spares": 0},
        "batch": {"global_batch_size": 8, "micro_batch_size": 4},
    }
    environment = {"EVALUATE_BEFORE": "11", **env}
    return RunDriver(home).run(faulty_job(home, name, steps=12, env=environment, **changes))


@pytest.mark.long
def test_an_evaluation_of_one_rank_that_hangs_twice_stops_the_run_with_the_advice(home):
    played = play_session(home, "alone", EVALUATE_S=str(BEYOND_A_TEST_S))
    first, second = faults_of(played)
    for fault in (first, second):
        assert (fault.fault_class, fault.rank, fault.step) == ("hang", 0, 10)
        assert not_none(fault.frame).endswith("> evaluate (lone_evaluation.py)")
        assert "evaluate (lone_evaluation.py:" in fault.explanation
    assert "restart.hang_timeout_s" in first.evidence
    assert not_none(played.history.attempts[-1].decision).rung is Rung.STOP
    assert "session.evaluation()" in played.ended


@pytest.mark.long
def test_an_evaluation_of_one_rank_in_its_phase_is_no_hang(home):
    played = play_session(home, "in-phase", EVALUATE_S="8", IN_PHASE="1")
    assert (played.ended, len(played.history.attempts)) == ("completed", 1)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_in_an_evaluation_is_replaced_and_all_evaluate_again(home, rank):
    death = home / f"death-{rank}"
    environment = {"EVALUATE_S": "5", "IN_PHASE": "1", "DYING_RANK": str(rank)}
    played = play_session(home, f"dies-{rank}", DEATH=str(death), **environment)
    assert death.exists()
    assert played.ended == "completed"
    (attempt,) = played.history.attempts
    assert [recovery.began.fault.rank for recovery in attempt.recoveries] == [rank]
