"""The fork server for data loaders, in a process of its own that has no threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

PROGRAM = """
import json, multiprocessing, os, signal, sys, threading, time, types
from perdure.training.runtime.worker import serve_forks

THREADED, KILLED = "threaded" in sys.argv, "killed" in sys.argv

def look(pipe):
    pipe.send({"inherited": "only_here" in sys.modules, "pid": os.getpid(), "ppid": os.getppid()})
    if KILLED:
        multiprocessing.parent_process().join()

if __name__ == "__main__":
    sys.modules["only_here"] = types.ModuleType("only_here")
    if THREADED:
        threading.Thread(target=time.sleep, args=(0.2,)).start()
    serve_forks()
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    loader = context.Process(target=look, args=(there,), daemon=True)
    loader.start()
    folder = multiprocessing.current_process()._config.get("tempdir")
    print(json.dumps({**here.recv(), "folder": folder}), flush=True)
    if KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    loader.join()
    print(loader.exitcode)
"""


@pytest.fixture
def run(tmp_path):
    """Runs the program until no process has its output open any more.

    What it found in its loader, and what it printed after that.
    """
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)

    def run(*arguments: str) -> tuple[dict, list[str]]:
        done = subprocess.run(
            [sys.executable, str(path), *arguments],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        first, *further = done.stdout.splitlines()
        return json.loads(first), further

    return run


def lives(pid: int) -> bool:
    # Orphans that no process collects stay as zombies.
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("arguments", "inherited"), [((), True), (("threaded",), False)])
def test_a_loader_is_a_fork_of_the_trainer_unless_that_has_threads(run, arguments, inherited):
    loader, further = run(*arguments)
    assert loader["inherited"] is inherited, "a fork needs to import nothing"
    assert further == ["0"], "its end is seen by the trainer"


def test_the_server_ends_with_a_trainer_that_is_killed_and_tidies_up(run):
    loader, further = run("killed")
    assert further == []
    assert not lives(loader["ppid"])
    assert not Path(loader["folder"]).exists()
