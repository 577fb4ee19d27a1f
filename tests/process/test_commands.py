"""Commands of several ranks, started by a real torchrun: what is seen of them."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from perdure.monitor import RunMonitor
from perdure.storage.address import open_store
from perdure.training.config.job import Job, parse_job
from perdure.training.diagnosis.ending import CORRUPT_ACTION
from perdure.training.drill.driver import RunDriver, RunOutcome
from perdure.training.recovery.faults import FaultClass
from perdure.training.recovery.rungs import Rung
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.watch import Progress
from tests.local_run import LocalRun
from tests.process.harness import RECIPES, REPO
from tests.values import not_none

pytestmark = [pytest.mark.process, pytest.mark.alone]

RANKS = 2
QUIET_S = 8.0


def torchrun_job(home: Path, name: str, *arguments: str, **changes: Any) -> Job:
    folder = home / f"of-{name}"
    folder.mkdir()
    document = {
        "run_id": name,
        "storage": {"address": f"file://{home}/store"},
        "worker": {
            "command": [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=${MA_NUM_HOSTS}",
                "--node_rank=${VC_TASK_INDEX}", "--nproc_per_node=${MA_NUM_GPUS}",
                "--master_addr=${MASTER_ADDR}", "--master_port=${MASTER_PORT}",
                str(RECIPES / "reducing.py"), str(folder), *arguments,
            ],
        },
        "env": {"PYTHONPATH": str(REPO)},
        "preflight": {"nodes": False},
        "engine": {"nodes": 1, "slots_per_node": RANKS, "spares": 0, "grace_s": 5},
    }  # fmt: skip
    return parse_job({**document, **changes})


@dataclass
class Stopper:
    """Stops the process of a rank once it has come to a step, once."""

    home: Path
    rank: int
    step: int
    pids: list[int] = field(default_factory=list)

    def __call__(self, run: RunSupervisor, _progress: Progress) -> None:
        if self.pids:
            return
        reached = self.home / f"of-{run.job.run_id}" / f"step-{self.rank}"
        if reached.exists() and int(reached.read_text() or 0) >= self.step:
            (process,) = LocalRun(self.home, run.job.run_id).rank(self.rank)
            os.kill(process.pid, signal.SIGSTOP)
            self.pids.append(process.pid)


@dataclass
class Watcher:
    """Reads the status of a run whose ranks have come to a step, once, then lets one be stopped."""

    stopper: Stopper
    seen: list[dict[str, Any]] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)

    def __call__(self, run: RunSupervisor, progress: Progress) -> None:
        step = progress.command_step
        if not self.seen and step is not None and step.step >= 2:
            local = LocalRun(self.stopper.home, run.job.run_id)
            self.pids = [local.rank(rank)[0].pid for rank in range(RANKS)]
            self.seen.append(status_of(self.stopper.home, run.job))
        elif self.seen:
            self.stopper(run, progress)


def status_of(home: Path, job: Job) -> dict[str, Any]:
    return RunMonitor(RunHandle(job, home=home)).snapshot().status.document


@dataclass
class Played:
    job: Job
    outcome: RunOutcome
    stopped: list[int]
    watcher: Watcher | None = None

    def report(self) -> str:
        """The stacks of the hang."""
        store = open_store(self.job.storage)
        return store.get(f"runs/{self.job.run_id}/logs/p0001-a0001/hang.txt").decode()


def stopped_run(home: Path, name: str, *arguments: str, **changes: Any) -> Played:
    """A run whose rank 1 is stopped by a signal, once."""
    stopper = Stopper(home, 1, 4)
    watcher = Watcher(stopper) if "--beat" in arguments else None
    job = torchrun_job(home, name, "40", "0.1", *arguments, **changes)
    outcome = RunDriver(home).run(job, hook=watcher or stopper)
    return Played(job, outcome, stopper.pids, watcher)


def assert_rank_1_is_named(played: Played) -> None:
    assert played.outcome.ended == "completed"
    assert len(played.stopped) == 1, "the fault was injected"
    (hung, again) = played.outcome.history.attempts
    fault = not_none(not_none(hung.ended).fault)
    assert (fault.fault_class, fault.rank, fault.node) == (FaultClass.HANG, 1, "node-0")
    assert fault.evidence.startswith("rank 1 on node-0: stopped by a signal (state T)")
    assert not_none(hung.decision).rung is Rung.HANG_RESTART
    assert not_none(again.ended).fault is None
    assert played.outcome.leftovers == ()


@pytest.mark.long
def test_the_stopped_rank_of_a_command_is_named_and_the_stacks_of_all_are_kept(home):
    played = stopped_run(home, "quiet-torchrun", watch={"command_quiet_s": QUIET_S})
    assert_rank_1_is_named(played)
    report = played.report()
    (stopped,) = played.stopped
    assert report.startswith("rank 1 on node-0: stopped by a signal (state T)")
    of_rank_1 = report.partition(f"stacks of rank 1, process {stopped} ")[2]
    assert f"process {stopped} is stopped" in of_rank_1.partition("stacks of")[0]
    of_rank_0 = report.partition("stacks of rank 0, process ")[2].partition("stacks of")[0]
    assert "all_reduce" in of_rank_0
    assert "reducing.py" in of_rank_0
    launcher = [part for part in report.split("stacks of ") if part.startswith("process ")]
    assert any("torch/distributed" in part for part in launcher)
    status = status_of(home, played.job)
    assert (status["step"], status["ettr"]) == (None, None), "nothing shows them"


@pytest.mark.long
def test_heartbeats_of_a_command_show_its_step_and_name_a_rank_as_soon_as_in_a_session(home):
    played = stopped_run(home, "beating-torchrun", "--beat", restart={"hang_timeout_s": 3.0})
    assert_rank_1_is_named(played)
    (hung, again) = played.outcome.history.attempts
    reached = not_none(not_none(hung.ended).to_step)
    assert reached >= 4
    assert not_none(again.ended).to_step == 40
    assert again.from_step < 40, "from its own checkpoint"

    (living,) = not_none(played.watcher).seen
    assert living["step"] >= 2
    (node,) = living["nodes"]
    ranks = [(one["rank"], one["local_rank"], one["pid"]) for one in node["ranks"]]
    assert ranks == list(
        zip(range(RANKS), range(RANKS), not_none(played.watcher).pids, strict=True)
    )
    assert {one["step"] for one in node["ranks"]} <= {living["step"], living["step"] - 1}
    ended = status_of(home, played.job)
    assert (ended["step"], ended["committed_step"]) == (40, None)
    assert 0 < ended["ettr"] < 1


@dataclass
class Killer(Stopper):
    """Kills the process of a rank once it has come to a step, once."""

    def __call__(self, run: RunSupervisor, _progress: Progress) -> None:
        reached = self.home / f"of-{run.job.run_id}" / f"step-{self.rank}"
        if not self.pids and reached.exists() and int(reached.read_text() or 0) >= self.step:
            self.pids += LocalRun(self.home, run.job.run_id).kill_rank(self.rank)


@pytest.mark.long
def test_a_killed_rank_of_a_command_that_is_started_once_per_device_is_named(home):
    folder = home / "of-per-device"
    program = [sys.executable, str(RECIPES / "reducing.py"), str(folder), "40", "0.1"]
    engine = {"nodes": 2, "slots_per_node": RANKS, "spares": 0, "grace_s": 5}
    job = torchrun_job(
        home, "per-device", worker={"command": program, "per": "device"}, engine=engine
    )
    killer = Killer(home, 3, 8)
    outcome = RunDriver(home).run(job, hook=killer)
    assert len(killer.pids) == 1, "the fault was injected"
    assert outcome.ended == "completed"
    (killed, again) = outcome.history.attempts
    fault = not_none(not_none(killed.ended).fault)
    assert (fault.rank, fault.node, fault.device) == (3, "node-1", 1)
    assert not_none(killed.decision).rung is Rung.IN_PLACE_RESTART
    assert not_none(again.ended).fault is None
    assert {int((folder / f"step-{rank}").read_text()) for rank in range(4)} == {40}
    names = {Path(one.key).name for one in open_store(job.storage).list("runs/per-device/logs/")}
    for rank in range(4):
        assert any(name.startswith(f"rank-{rank:05d}.stdout") for name in names)
    assert outcome.leftovers == ()


# Loads its own checkpoint, whose writing was cut short.
DAMAGED = """
import pathlib, sys, torch
path = pathlib.Path(sys.argv[1]) / "checkpoint.pt"
if not path.exists():
    torch.save({"step": 10, "weights": torch.zeros(4096)}, path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
print("resuming from step", torch.load(path)["step"])
"""


@pytest.mark.long
def test_a_damaged_checkpoint_of_a_command_is_tried_once_more_and_the_user_gets_advice(home):
    program = home / "damaged.py"
    program.write_text(DAMAGED)
    job = torchrun_job(home, "damaged-checkpoint")
    command = [sys.executable, str(program), str(home / "of-damaged-checkpoint")]
    job = parse_job({**job.model_dump(mode="json"), "worker": {"command": command}})
    outcome = RunDriver(home).run(job)
    views = outcome.history.attempts
    assert [not_none(view.decision).rung for view in views] == [Rung.IN_PLACE_RESTART, Rung.STOP]
    fault = not_none(not_none(views[-1].ended).fault)
    assert fault.fault_class is FaultClass.CHECKPOINT_CORRUPT, fault
    assert fault.action == CORRUPT_ACTION
    assert CORRUPT_ACTION in fault.explanation
    assert "for the user to fix" in not_none(views[-1].decision).reason
