"""The platforms' own commands over two nodes: one gang, or a wrong launch that is explained."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from perdure.training.config.job import Job, parse_job
from perdure.training.drill.driver import RunDriver
from perdure.training.recovery.faults import FaultClass
from tests.process.harness import RECIPES, REPO
from tests.values import not_none

pytestmark = [pytest.mark.process, pytest.mark.alone]

NODES = SLOTS = 2
REDUCING = str(RECIPES / "reducing.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
LAUNCH = (sys.executable, "-m", "torch.distributed.launch", "--use_env")
ACCELERATE = (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu")
STEPS = 'for step in $(seq 300); do echo "step $step"; sleep 0.2; done'
# The variables of their ranks, by launchers that start them once per node and for it alone.
VARIABLES = {
    "mpirun": "OMPI_COMM_WORLD_RANK=$i OMPI_COMM_WORLD_LOCAL_RANK=$i OMPI_COMM_WORLD_SIZE=2",
    "deepspeed": "RANK=$i LOCAL_RANK=$i WORLD_SIZE=2 CROSS_RANK=0 CROSS_SIZE=1 LOCAL_SIZE=2",
    "msrun": "MS_ROLE=MS_WORKER MS_NODE_ID=$i DEVICE_ID=$i MS_WORKER_NUM=2",
}


def as_by(launcher: str) -> tuple[str, ...]:
    """A command whose ranks have the variables of a launcher."""
    return "sh", "-c", f"for i in 0 1; do {VARIABLES[launcher]} sh -c '{STEPS}' & done; wait"


def run_name(request: pytest.FixtureRequest) -> str:
    return f"of-{request.node.callspec.id.replace(' ', '-')}"


def boot_job(home: Path, name: str, *command: str, steps: int, **changes: Any) -> Job:
    folder = home / f"of-{name}"
    folder.mkdir()
    arguments = () if "-c" in command else (REDUCING, str(folder), str(steps), "0.1")
    document = {
        "run_id": name,
        "storage": {"address": f"file://{home}/store"},
        "worker": {"command": [*command, *arguments]},
        "env": {"PYTHONPATH": str(REPO)},
        "preflight": {"nodes": False},
        "engine": {"nodes": NODES, "slots_per_node": SLOTS, "spares": 0, "grace_s": 5},
    }
    return parse_job({**document, **changes})


@pytest.mark.parametrize(
    "command",
    [
        (*TORCHRUN, f"--nproc_per_node={SLOTS}"),
        pytest.param((*LAUNCH, f"--nproc_per_node={SLOTS}"), marks=pytest.mark.long),
        pytest.param(TORCHRUN, marks=pytest.mark.long),
    ],
    ids=["torchrun", "launch", "torchrun alone"],
)
def test_a_command_without_addresses_is_one_gang_of_all_nodes(home, command, request):
    name = run_name(request)
    outcome = RunDriver(home).run(boot_job(home, name, *command, steps=5))
    assert outcome.ended == "completed"
    (attempt,) = outcome.history.attempts
    assert not_none(attempt.ended).fault is None
    files = [home / f"of-{name}" / f"step-{rank}" for rank in range(NODES * SLOTS)]
    assert {file.read_text() for file in files} == {"5"}


@pytest.mark.parametrize(
    ("command", "size"),
    [
        pytest.param(
            (*TORCHRUN, "--standalone", f"--nproc_per_node={SLOTS}"), 2, marks=pytest.mark.long
        ),
        pytest.param((*TORCHRUN, "--nnodes=1"), 2, marks=pytest.mark.long),
        pytest.param(
            (*ACCELERATE, "--num_processes=1", "--no_python", "sh", "-c", STEPS),
            1,
            marks=pytest.mark.long,
        ),
        (as_by("mpirun"), 2),
        pytest.param(as_by("deepspeed"), 2, marks=pytest.mark.long),
        pytest.param(as_by("msrun"), 2, marks=pytest.mark.long),
    ],
    ids=["standalone", "nnodes", "accelerate", "mpirun", "deepspeed", "msrun"],
)
def test_nodes_that_train_separately_are_stopped_with_the_numbers(home, command, size, request):
    outcome = RunDriver(home).run(boot_job(home, run_name(request), *command, steps=100_000))
    assert outcome.ended == "launch_misconfigured is for the user to fix"
    (attempt,) = outcome.history.attempts
    fault = not_none(not_none(attempt.ended).fault)
    assert fault.fault_class is FaultClass.LAUNCH_MISCONFIGURED
    ranks = "ranks" if size > 1 else "rank"
    assert fault.evidence.startswith(
        f"the launcher started a gang of {size} {ranks}, the job has {NODES * SLOTS}"
    )
    assert fault.evidence.endswith("node-0, node-1 trained separately")
    assert outcome.leftovers == ()


@pytest.mark.long
def test_a_training_in_two_worlds_that_has_come_to_its_end_is_not_completed(home):
    program = home / "short.py"
    program.write_text("import time; time.sleep(4)")
    command = [*TORCHRUN, "--standalone", "--nproc_per_node=1", str(program)]
    job = boot_job(home, "ended", *command, steps=1, worker={"command": command})
    outcome = RunDriver(home).run(job)
    assert outcome.ended == "launch_misconfigured is for the user to fix"
    fault = not_none(not_none(outcome.history.attempts[0].ended).fault)
    assert (fault.fault_class, fault.code) == (FaultClass.LAUNCH_MISCONFIGURED, "SMALL_WORLD")
