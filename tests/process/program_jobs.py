"""Jobs of the programs in examples/ that keep their own checkpoints, and what they print."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from perdure.monitor import RunMonitor
from perdure.storage.address import open_store
from perdure.training.config.job import Job, parse_job
from perdure.training.drill.driver import RunDriver, RunOutcome
from perdure.training.environment import worker_path
from perdure.training.journal.ledger import Ledger
from perdure.training.journal.steps import read_kept_steps
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.watch import Progress
from tests.local_run import LocalRun
from tests.process.harness import REPO
from tests.values import not_none

EXAMPLES = REPO / "examples"
FOLDER = "/tmp/perdure-examples"  # noqa: S108 in the jobs, replaced
NANOGPT = re.compile(r"^iter (\d+): loss ([\d.]+)")


def example_job(home: Path, file: str, run_id: str, *arguments: str, **changes: Any) -> Job:
    """The job of an example with its folders below `home`, and further arguments."""
    text = (EXAMPLES / file).read_text().replace(FOLDER, str(home / run_id))
    document: dict[str, Any] = yaml.safe_load(text)
    worker = document["worker"] | {"cwd": str(EXAMPLES)} | changes.pop("worker", {})
    worker["command"] = [*worker["command"], *arguments]
    document |= {"run_id": run_id, "worker": worker, "preflight": {"nodes": False}}
    document["storage"] = {"address": f"file://{home}/store"}
    document["engine"] = {**document["engine"], "grace_s": 10, **changes.pop("engine", {})}
    return parse_job({**document, **changes})


def by_hand(*arguments: str, num_ranks: int = 2, env: Mapping[str, str] = {}) -> list[str]:
    """What a program of examples/ prints when torchrun starts it, without Perdure."""
    launcher = ["torchrun", "--standalone", f"--nproc_per_node={num_ranks}"]
    done = subprocess.run(
        [*launcher, *arguments],
        cwd=EXAMPLES, env={**os.environ, "PATH": worker_path(), "OMP_NUM_THREADS": "1", **env},
        capture_output=True, text=True, timeout=400, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def printed(lines: Iterable[str], pattern: re.Pattern[str] = NANOGPT) -> dict[int, str]:
    """The loss of every iteration as it was printed, the newest line counting."""
    return {int(found[1]): found[2] for line in lines if (found := pattern.search(line))}


def output_of(home: Path, job: Job) -> list[str]:
    """What a run's command has printed, in the order of its attempts."""
    nodes = home / "runs" / job.run_id / "nodes"
    files = sorted(nodes.glob("*/*/attempts/*/*.stdout.log"), key=lambda one: one.parent.name)
    return [line for path in files for line in path.read_text().splitlines()]


def agent_logs(home: Path, job: Job) -> list[str]:
    """The log of every container's agent."""
    files = (home / "runs" / job.run_id / "nodes").glob("*/*/agent.log")
    return [path.read_text() for path in files]


def recorded(job: Job) -> dict[int, float | None]:
    """The loss of every step that is on record."""
    return {
        step: one.loss for step, one in read_kept_steps(open_store(job.storage), job.run_id).items()
    }


@dataclass
class AtStep:
    """Does something to a run at its first step from one on, and reads its status before.

    Attributes:
        act: gets the run's processes; may be repeated until it returns something.
        status: what `perdure status` showed then.
        done: what `act` returned.
    """

    home: Path
    step: int
    act: Any
    status: dict[str, Any] = field(default_factory=dict)
    done: Any = None

    def __call__(self, run: RunSupervisor, progress: Progress) -> None:
        seen = progress.command_step
        if self.done or seen is None or seen.step < self.step:
            return
        self.status = status_of(self.home, run.job)
        self.done = self.act(LocalRun(self.home, run.job.run_id))


def status_of(home: Path, job: Job) -> dict[str, Any]:
    """What `perdure status` shows."""
    return RunMonitor(RunHandle(job, home=home)).snapshot().status.document


def send(rank: int, signal_number: int) -> Any:
    """Sends a signal to the process of a rank."""

    def act(local: LocalRun) -> int:
        (process,) = local.rank(rank)
        process.send_signal(signal_number)
        return process.pid

    return act


def lines_with(lines: Sequence[str], text: str) -> list[str]:
    """Those that have it."""
    return [line for line in lines if text in line]


def same(curve: Mapping[int, str], undisturbed: Mapping[int, str]) -> bool:
    """Whether every iteration has printed the same digits, in order."""
    return dict(sorted(curve.items())) == dict(undisturbed) and bool(curve)


def after_saves(job: Job, count: int, act: Any) -> Any:
    """Does something once so many checkpoints of the program are on record."""

    def act_then(local: LocalRun) -> Any:
        saves = Ledger(open_store(job.storage), job.run_id).read().checkpoints
        return act(local) if len(saves) >= count else None

    return act_then


MEGATRON = re.compile(r" iteration +(\d+)/ +\d+ .* lm loss: ([-+.E\d]+) \| .* grad norm: ([.\d]+) ")


def broken(home: Path, job: Job, act: Any) -> tuple[RunOutcome, AtStep]:
    """A run to which something is done behind its first checkpoint."""
    hook = AtStep(home, 12, after_saves(job, 1, act))
    return RunDriver(home).run(job, hook=hook), hook


def assert_recovered(
    home: Path,
    job: Job,
    done: tuple[RunOutcome, AtStep],
    alone: Mapping[int, str],
    *,
    losses: Callable[[list[str]], dict[int, str]],
    loaded: str,
    num_loaded: int = 1,
) -> None:
    """That it went on from a checkpoint, and that status and records are true.

    Args:
        home: of the run.
        job: up to its `steps`.
        done: what `broken` gave.
        alone: the loss that each step has without Perdure, as it is printed.
        losses: finds that in what the ranks print.
        loaded: what they print when they go on from a checkpoint.
        num_loaded: of how many ranks.
    """
    outcome, hook = done
    steps = job.steps
    assert hook.done, "the fault was made"
    assert outcome.ended == "completed"
    status = hook.status
    assert 12 <= status["step"] <= steps
    assert 10 <= status["committed_step"] <= status["step"]
    assert status["target_step"] == steps
    assert 0 < status["ettr"] < 1
    assert status["loss"] in map(float, alone.values())
    assert status["grad_norm"] > 0
    lines = output_of(home, job)
    resumed = len(outcome.history.attempts) - 1
    assert len(lines_with(lines, loaded)) == num_loaded * resumed
    assert losses(lines) == alone, "every digit"
    assert recorded(job) == {step: float(loss) for step, loss in alone.items()}
    end = status_of(home, job)
    assert (end["step"], end["committed_step"], end["loss"]) == (steps, steps, float(alone[steps]))
    assert end["checkpoints"]["program"]["newest"] == steps
    assert LocalRun(home, job.run_id).processes() == []


def fault_of(outcome: RunOutcome) -> Any:
    return not_none(not_none(outcome.history.attempts[0].ended).fault)
