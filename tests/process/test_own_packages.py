"""Projects whose own packages have the names of Perdure's folders: training, tasks, storage, flows.

Commands are started in the project's folder, and Perdure is found as an installation has it: by the
one name `perdure`. Every run is killed once, and its curve, all digits, is that of a run that
nothing disturbs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.process.framework_runs import FrameworkRuns, fault, whole_curve
from tests.process.harness import RECIPES, REPO, Running, Workbench
from tests.waiting import wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

PACKAGES = ("flows", "storage", "tasks", "training")
WHOSE = '''"""Says where its package is from."""
import pathlib
def whose():
    return f"{__name__} of {pathlib.Path(__file__).parents[1].name}"
'''
IMPORTS = "\n".join(
    [
        *(f"import {name}.utils" for name in PACKAGES),
        f"print({', '.join(f'{name}.utils.whose()' for name in PACKAGES)}, flush=True)\n",
    ]
)
PROGRAMS = {
    # Modules of the packages themselves, and a script beside them.
    "training/command.py": f"{IMPORTS}from training import nano\n",
    "training/recipe.py": f"{IMPORTS}from training.paced import main\n",
    "train_trainer.py": f"{IMPORTS}from trainer_paced import main\nmain()\n",
}
COPIES = {
    "training/nano.py": RECIPES / "nano.py",
    "training/paced.py": RECIPES / "paced.py",
    "trainer_paced.py": RECIPES / "trainer_paced.py",
    "trainer_train.py": REPO / "examples" / "trainer_train.py",
}


@dataclass(frozen=True, slots=True)
class Project:
    """A user's folder, and the bench whose commands are started there."""

    folder: Path
    bench: Workbench

    def uses_its_packages(self, running: Running, *, times: int) -> None:
        """Assert that in every start of every rank all four packages were the project's."""
        line = " ".join(f"{name}.utils of {self.folder.name}" for name in PACKAGES)
        assert running.worker_lines("utils of ") == [line] * times


def make_project(folder: Path, bench: Workbench, *, with_init: bool) -> Project:
    """A project; without `__init__.py` its packages are namespace packages."""
    for name in PACKAGES:
        (folder / name).mkdir(parents=True)
        (folder / name / "utils.py").write_text(WHOSE)
        if with_init:
            (folder / name / "__init__.py").touch()
    for name, text in PROGRAMS.items():
        (folder / name).write_text(text)
    for name, source in COPIES.items():
        shutil.copy(source, folder / name)
    installed = folder.with_name(f"{folder.name}-installed")
    installed.mkdir()
    (installed / "perdure").symlink_to(REPO / "perdure")
    # A checkout on the path would bring the four folders of its root, too.
    kept = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p) != REPO]
    path = os.pathsep.join([str(installed), *kept])
    return Project(folder, replace(bench, env={"PYTHONPATH": path}, cwd=folder))


@pytest.fixture(scope="module")
def regular(bench, tmp_path_factory) -> Project:
    """Packages with `__init__.py`."""
    return make_project(tmp_path_factory.mktemp("user") / "regular", bench, with_init=True)


@pytest.fixture(scope="module")
def bare(bench, tmp_path_factory) -> Project:
    """Packages without."""
    return make_project(tmp_path_factory.mktemp("user") / "bare", bench, with_init=False)


def session_job(project: Project, run_id: str) -> dict[str, Any]:
    worker = {"recipe": "training.recipe:main", "cwd": "."}
    return project.bench.pair(run_id, worker=worker)


def lose_rank(project: Project, run_id: str) -> Running:
    """A session of which a rank is killed, at its end."""
    running = project.bench.start(session_job(project, run_id))
    running.reach(13)
    assert len(running.local.kill_rank(1)) == 1
    assert running.finish() == 0, running.out
    return running


def assert_session_came_back(
    project: Project, running: Running, curve: Mapping[int, float]
) -> None:
    assert running.curve() == curve
    assert running.rungs() == ["process_replace"]
    project.uses_its_packages(running, times=3)
    running.leave_nothing()


@pytest.fixture(scope="module")
def bare_session(bare) -> Running:
    """Of a project whose packages have no `__init__.py`."""
    return lose_rank(bare, "own-session")


def assert_command_comes_back(project: Project, run_id: str, out: Path) -> None:
    program = [sys.executable, "-m", "training.command"]
    job = {
        "run_id": run_id,
        "storage": {"address": f"file://{project.bench.home}/store"},
        "worker": {"command": [*program, str(out), "30"], "cwd": "."},
        "engine": {"nodes": 1, "slots_per_node": 1, "spares": 0, "grace_s": 2},
        "preflight": {"nodes": False},
    }
    running = project.bench.start(job)
    wait_for(lambda: len(losses(out)) >= 12, timeout_s=60, what=running.out)
    (process,) = [p for p in running.local.processes() if "training.command" in p.cmdline()]
    process.send_signal(signal.SIGKILL)
    assert running.finish() == 0, running.out
    plain = out.with_name(f"{out.name}-plain")
    names = ("MA_SCHEDULE_CNT", "MA_PROC_START_CNT", "MA_NUM_HOSTS")
    subprocess.run(
        [*program, str(plain), "30"], cwd=project.folder, env=dict.fromkeys(names, "0"), check=True
    )
    assert losses(out) == losses(plain)
    assert list(losses(out)) == list(range(1, 31))
    assert running.rungs() == ["in_place_restart"]
    project.uses_its_packages(running, times=2)
    running.leave_nothing()


def losses(folder: Path) -> dict[int, float]:
    """The loss of every iteration, the newest entry counting."""
    file = folder / "losses.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return dict(json.loads(line) for line in lines)


def test_a_session_in_packages_of_these_names_loses_a_rank_and_no_step(
    bare, bare_session, undisturbed_pair
):
    assert_session_came_back(bare, bare_session, undisturbed_pair)


def test_a_command_in_packages_of_these_names_is_killed_and_comes_back(regular, tmp_path):
    assert_command_comes_back(regular, "own-command", tmp_path / "out")


def test_every_command_line_works_in_the_folder_of_the_project(bare, bare_session, tmp_path):
    bench, run_id = bare.bench, bare_session.job.run_id
    log, file = tmp_path / "rank.log", tmp_path / "job.yaml"
    log.write_text("TypeError: forward() got an unexpected argument\n")
    document = session_job(bare, "own-checked") | {"preflight": {"nodes": True}}
    file.write_text(yaml.safe_dump(document))

    assert "user_code_error" in bench.perdure("diagnose", str(log))
    assert json.loads(bench.perdure("status", run_id, "--json"))["step"] == 60
    assert "training.utils of bare" in bench.perdure("logs", run_id, "--rank", "0")
    saved = json.loads(bench.perdure("checkpoints", "ls", run_id, "--json"))
    assert saved[0]["step"] == 60
    assert "training.recipe:main" in bench.perdure("show", str(file))
    assert "OMP_NUM_THREADS" in bench.perdure("env", str(file))
    assert "all_reduce" in bench.perdure("preflight", str(file))  # of the processes on the node


def test_a_program_of_the_project_reads_the_checkpoints_of_its_run(bare, bare_session):
    program = bare.folder / "read_weights.py"
    program.write_text(
        f"{IMPORTS}import perdure\n"
        f"reader = perdure.checkpoints({bare_session.job.run_id!r})\n"
        "print(reader.latest().step, *reader.load(names='model/head.*'))\n"
    )
    read = bare.bench.python(str(program))
    assert read.returncode == 0, read.stderr
    assert read.stdout.splitlines()[-1] == "60 model/head.bias model/head.weight"


@pytest.mark.long
def test_the_same_session_with_regular_packages(regular, undisturbed_pair):
    running = lose_rank(regular, "own-regular-session")
    assert_session_came_back(regular, running, undisturbed_pair)


@pytest.mark.long
def test_the_same_command_with_packages_without_init(bare, tmp_path):
    assert_command_comes_back(bare, "own-bare-command", tmp_path / "out")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["regular", "bare"])
def test_a_script_with_a_trainer_loses_both_ranks_in_turn_and_no_step(kind, request):
    project = request.getfixturevalue(kind)
    arguments = ("--num_samples=120", "--gradient_accumulation_steps=2", "--logging_steps=1")
    script = {"script": ["train_trainer.py", *arguments], "cwd": str(project.folder)}
    runs = FrameworkRuns(project.bench, f"own-{kind}", ())
    curve = whole_curve(runs.start("undisturbed", worker=script))
    killed = {"faults": [fault("kill", 1, 9), fault("kill", 0, 14, "voted")]}
    running = runs.start("killed", worker=script, drill=killed)
    running.complete(curve)
    assert running.rungs() == ["process_replace", "process_replace"]
    project.uses_its_packages(running, times=4)
