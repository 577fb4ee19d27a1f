"""The data preparation of a job's own command: a cached task, on the nodes that need it."""

from __future__ import annotations

import sys

import pytest

from perdure.storage.local import LocalStore
from perdure.training.wire.requests import request_cancel
from tests.waiting import wait_for

pytestmark = [pytest.mark.process, pytest.mark.prefect]

SCRIPT = """
import pathlib, os, sys
folder = pathlib.Path(sys.argv[1])
with (folder / "runs").open("a") as runs:
    print(os.environ["PERDURE_NODE"], file=runs)
print("tokenizing", flush=True)
if (folder / "fails").exists():
    (folder / "fails").unlink()
    os.kill(os.getpid(), 9)
if (folder / "is wrong").exists():
    raise NameError("name 'tokenise' is not defined")
(folder / "out").mkdir(exist_ok=True)
name = os.environ["PERDURE_NODE"] if "node" in sys.argv else "tokens"
(folder / "out" / name).write_text((folder / "in.txt").read_text().upper())
"""


class Folder:
    """A folder with the program that prepares data, its input and its outputs."""

    def __init__(self, bench, path) -> None:
        self.bench, self.path = bench, path
        path.mkdir()
        (path / "prepare.py").write_text(SCRIPT)
        (path / "in.txt").write_text("some text")

    @property
    def runs(self) -> list[str]:
        """The nodes on which the command has run, in order."""
        return (self.path / "runs").read_text().split()

    def start(self, run_id: str, *, per: str = "run", nodes: int = 1):
        """A run whose program copies what was prepared."""
        name = "$PERDURE_NODE" if per == "node" else "tokens"
        return self.bench.start(
            {
                "run_id": run_id,
                "storage": {"address": f"file://{self.bench.home}/store"},
                "prepare": {
                    "command": [sys.executable, "prepare.py", ".", per],
                    "inputs": ["in.txt"],
                    "outputs": [f"out/{name}"],
                    "per": per,
                },
                "worker": {
                    "command": ["sh", "-c", "cat out/*"],
                    "per": "device",
                    "cwd": str(self.path),
                },
                "restart": {"hang": False, "delay_s": 0.1},
                "preflight": {"nodes": False},
                "engine": {
                    "nodes": nodes, "slots_per_node": 1, "spares": 0, "grace_s": 2,
                },
            }
        )  # fmt: skip


@pytest.fixture
def folder(bench, tmp_path) -> Folder:
    return Folder(bench, tmp_path / "data")


def state_of(api, run_id: str, task: str) -> str:
    done = ("Completed", "Cached", "Failed")
    wait_for(lambda: api.task_runs(run_id).get(task) in done, what=f"the end of {task}")
    return api.task_runs(run_id)[task]


def test_a_command_prepares_once_and_again_when_an_output_is_gone(folder, api):
    for run_id, runs, state in (("made", 1, "Completed"), ("found", 1, "Cached")):
        running = folder.start(run_id)
        assert running.finish() == 0, running.out
        assert len(folder.runs) == runs
        assert state_of(api, run_id, "prepare on node-0") == state
    (folder.path / "out" / "tokens").unlink()
    running = folder.start("made-again")
    assert running.finish() == 0, running.out
    assert len(folder.runs) == 2
    assert state_of(api, "made-again", "prepare on node-0") == "Completed"
    running.leave_nothing()


@pytest.mark.long
def test_inputs_that_have_changed_are_prepared_again_on_every_node(folder, api):
    running = folder.start("per-node", per="node", nodes=2)
    assert running.finish() == 0, running.out
    assert sorted(folder.runs) == ["node-0", "node-1"]
    (folder.path / "in.txt").write_text("other text")
    running = folder.start("per-node-changed", per="node", nodes=2)
    assert running.finish() == 0, running.out
    assert sorted(folder.runs) == ["node-0", "node-0", "node-1", "node-1"]
    assert (folder.path / "out" / "node-1").read_text() == "OTHER TEXT"
    (folder.path / "out" / "node-1").write_text("OTHER TEXt")
    running = folder.start("per-node-damaged", per="node", nodes=2)
    assert running.finish() == 0, running.out
    assert sorted(folder.runs) == ["node-0", "node-0", "node-1", "node-1", "node-1"]
    task = "prepare on node-0,node-1"
    assert state_of(api, "per-node-damaged", task) == "Completed"


@pytest.mark.long
def test_a_command_that_is_killed_is_tried_again_and_one_that_is_wrong_ends_the_run(folder, api):
    (folder.path / "fails").touch()
    running = folder.start("killed-once")
    assert running.finish() == 0, running.out
    assert len(folder.runs) == 2
    assert state_of(api, "killed-once", "prepare on node-0") == "Completed"

    (folder.path / "in.txt").write_text("changed")
    (folder.path / "is wrong").touch()
    running = folder.start("wrong")
    assert running.finish() == 1
    assert len(folder.runs) == 3, "what the user must put right is not tried again"
    assert running.history.ended.message.startswith("prepare on node-0: user_code_error: NameError")
    assert state_of(api, "wrong", "prepare on node-0") == "Failed"
    assert running.history.attempts == []
    store = folder.bench.home / "store/runs/wrong/logs/prepare/node-0.log"
    assert "tokenizing\n" in store.read_text()
    running.leave_nothing()


@pytest.mark.long
def test_a_supervisor_that_dies_meanwhile_is_followed_by_one_that_waits_for_the_same_command(
    folder, api
):
    go = folder.path / "go"
    text = (folder.path / "prepare.py").read_text()
    wait = f"import time\nwhile not pathlib.Path({str(go)!r}).exists():\n    time.sleep(0.1)\n"
    (folder.path / "prepare.py").write_text(
        text.replace('(folder / "out")', wait + '(folder / "out")', 1)
    )
    first = folder.start("taken-over")
    wait_for((folder.path / "runs").exists, what="the command")
    first.kill_supervisor()
    second = folder.start("taken-over")
    wait_for(lambda: second.history.epoch == 2, what="the next supervisor")
    go.touch()
    assert second.finish() == 0, second.out
    assert folder.runs == ["node-0"]
    second.leave_nothing()


@pytest.mark.long
def test_a_cancel_in_the_store_ends_the_command_and_the_run(folder):
    (folder.path / "prepare.py").write_text(SCRIPT + "\nimport time\ntime.sleep(600)\n")
    running = folder.start("cancelled")
    wait_for((folder.path / "runs").exists, what="the command")
    request_cancel(LocalStore(folder.bench.home / "store"), "cancelled")
    assert running.finish() == 0, running.out
    assert running.history.ended.outcome == "cancelled"
    running.leave_nothing()
