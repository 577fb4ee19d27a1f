"""The programs of examples/: each is killed once, and completes as if it had not been."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from perdure.training.environment import worker_path
from tests.process.harness import REPO, Running
from tests.waiting import wait_for

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(900)]

EXAMPLES = REPO / "examples"
ITERATIONS = 40
ITERATION = re.compile(r"iter (\d+): loss ([\d.]+)")
TEXT = REPO / "README.md"
FOLDER = "/tmp/perdure-examples"  # noqa: S108 in the jobs, replaced


def example(bench, name: str, out: Path, **changes: Any) -> dict[str, Any]:
    """The job of an example, with its folders in those of the test."""
    text = (EXAMPLES / name).read_text()
    document = yaml.safe_load(text.replace(FOLDER, str(out)))
    document["storage"] = {"address": f"file://{bench.home}/store"}
    document["worker"]["cwd"] = str(EXAMPLES)
    document["preflight"] = {"nodes": False}
    return {**document, **changes}


def losses(lines: list[str]) -> dict[int, str]:
    """What was printed, the newest line of an iteration counting."""
    return {int(found[1]): found[2] for line in lines if (found := ITERATION.search(line))}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, str]:
    """The same program started by hand, without Perdure."""
    out = tmp_path_factory.mktemp("undisturbed")
    done = subprocess.run(
        [
            "torchrun", "--standalone", "--nproc_per_node=2", "train.py", f"--data={TEXT}",
            f"--out={out}", f"--max-iters={ITERATIONS}",
        ],
        cwd=EXAMPLES, env={**os.environ, "PATH": worker_path(), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=400, check=True,
    )  # fmt: skip
    found = losses(done.stdout.splitlines())
    assert list(found) == list(range(1, ITERATIONS + 1))
    return found


def kill_a_rank(running: Running, checkpoint: Path) -> None:
    """SIGKILL to a rank behind the first checkpoint."""
    wait_for(checkpoint.exists, timeout_s=300, what=running.out)
    (rank_1,) = running.local.rank(1)
    rank_1.send_signal(signal.SIGKILL)


def assert_recovered(running: Running, undisturbed: dict[int, str]) -> None:
    """That it was restarted in place, resumed by itself, and lost nothing."""
    assert running.finish(timeout_s=400) == 0, running.out
    (ended, _) = running.history.attempts
    assert ended.ended is not None
    assert ended.ended.fault is not None
    assert ended.ended.fault.fault_class == "native_crash"
    assert running.rungs() == ["in_place_restart"]
    assert len(running.worker_lines("resuming from iteration")) == 1
    assert losses(running.worker_lines("iter ")) == undisturbed
    running.leave_nothing()


def test_a_training_script_resumes_by_its_own_condition(bench, tmp_path, undisturbed):
    job = example(bench, "command.yaml", tmp_path)
    pace = ["--max-iters", str(ITERATIONS), "--pause-s", "0.2"]
    job["worker"]["command"] = [*job["worker"]["command"], *pace]
    running = bench.start(job)
    kill_a_rank(running, tmp_path / "command" / "ckpt.pt")
    assert_recovered(running, undisturbed)


def test_a_script_that_pipes_into_tee_fails_as_its_torchrun_does(bench, tmp_path, undisturbed):
    job = example(bench, "script.yaml", tmp_path)
    pace = ["--max-iters", str(ITERATIONS), "--pause-s", "0.2"]
    job["worker"]["command"] = [*job["worker"]["command"], *pace]
    running = bench.start(job)
    kill_a_rank(running, tmp_path / "script" / "ckpt.pt")
    assert_recovered(running, undisturbed)
    assert losses((tmp_path / "script" / "train.log").read_text().splitlines()) == undisturbed


def test_the_same_loop_as_a_session_loses_a_rank_and_no_step(bench, tmp_path):
    changes = {"steps": ITERATIONS, "checkpoint": {"every_steps": 10}}
    plain = bench.start(example(bench, "session.yaml", tmp_path, run_id="plain-loop", **changes))
    assert plain.finish() == 0, plain.out
    curve = plain.curve()
    assert list(curve) == list(range(1, ITERATIONS + 1))

    # The loop has no pause of its own: the drill stands in for a kill that comes in time.
    killed = {"faults": [{"kind": "kill", "rank": 1, "step": 15}]}
    running = bench.start(example(bench, "session.yaml", tmp_path, drill=killed, **changes))
    running.complete(curve)
    assert running.rungs() == ["process_replace"]
    assert len(running.history.attempts) == 1


@pytest.mark.parametrize("framework", ["trainer", "accelerate", "lightning"])
def test_a_framework_loses_a_rank_and_no_step(bench, tmp_path, framework):
    def job(run_id: str, **changes: Any) -> dict[str, Any]:
        name = f"{framework}.yaml"
        return example(bench, name, tmp_path, run_id=run_id, steps=ITERATIONS, **changes)

    plain = bench.start(job(f"plain-{framework}"))
    assert plain.finish() == 0, plain.out
    curve = plain.curve()
    assert list(curve) == list(range(1, ITERATIONS + 1))

    killed = {"faults": [{"kind": "kill", "rank": 1, "step": 15}]}
    running = bench.start(job(f"killed-{framework}", drill=killed))
    running.complete(curve)
    assert running.rungs() == ["process_replace"]


def test_a_loop_that_kept_its_own_division_is_named(bench, tmp_path):
    text = (EXAMPLES / "session_train.py").read_text()
    divided = text.replace("model(inputs, targets))", "model(inputs, targets) / 2)")
    assert divided != text
    (tmp_path / "divided.py").write_text(divided)
    job = example(bench, "session.yaml", tmp_path, run_id="divided", steps=3)
    job["worker"] = {"recipe": "divided:main", "cwd": str(tmp_path)}
    job["env"] = {"DATA": str(TEXT)}
    running = bench.start(job)
    assert running.finish() == 0, running.out
    (notice,) = running.status()["notices"]
    assert "divided by 2, the number of micro-batches of a step" in notice
    assert f"the program: {notice}" in running.out
