"""A run on the nodes that Slurm gives, from outside."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import yaml

from perdure.storage.address import open_store
from perdure.training.config.job import parse_job
from perdure.training.injection.victims import workers_of
from perdure.training.journal.ledger import Ledger
from perdure.training.recovery.rungs import Rung
from tests.process.harness import Running, Workbench
from tests.slurm.lab import Lab
from tests.values import not_none
from tests.waiting import wait_for

ENDS_S = 420.0  # a run of a few allocations
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@dataclass
class SlurmRun:
    """A run that was handed to Slurm.

    Attributes:
        job_id: Slurm's.
    """

    lab: Lab
    bench: Workbench
    document: dict[str, Any]
    job_id: str = ""

    @property
    def running(self) -> Running:
        """The run, as its store has it."""
        return Running(self.bench, parse_job(self.document), None)

    def submit(self, *options: str) -> None:
        """`perdure submit`, as on a login node."""
        path = self.bench.home / f"{self.document['run_id']}.yaml"
        path.write_text(yaml.safe_dump(self.document))
        words = [f"--option={option}" for option in options]
        done = subprocess.run(
            [sys.executable, "-m", "perdure", "submit", str(path), "--platform", "slurm", *words],
            env=self.bench.environment,
            cwd=self.bench.home,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        self.job_id = not_none(re.search(r"batch job (\d+)", done.stdout))[1]

    def slurm(self, field: str) -> str:
        """A field of the job in Slurm."""
        return self.lab.field(self.job_id, field)

    @property
    def out(self) -> str:
        """What the job has printed."""
        path = self.bench.home / f"{self.document['run_id']}-{self.job_id}.out"
        return path.read_text() if path.exists() else "nothing printed"

    def __str__(self) -> str:
        return self.out

    def _await_slurm(self, condition: Callable[[], bool]) -> None:
        """Wait, and ask Slurm once a second."""
        wait_for(condition, timeout_s=ENDS_S, what=self, period_s=1.0)

    def await_restarts(self, number: int) -> None:
        """Wait until Slurm has started the job again so many times."""
        self._await_slurm(lambda: self.slurm("Restarts") == str(number))

    def reach(self, step: int) -> None:
        """Wait until the run has completed a step, and pause in the next ones."""
        wait_for(lambda: self.running.step() >= step, timeout_s=ENDS_S, what=self)
        self.running.pace(1.0)

    def members(self) -> list[str]:
        """The nodes that train now, by member."""
        placement = not_none(self.running.history.placement)
        return [member.node for member in placement.members]

    def rank(self, rank: int) -> psutil.Process:
        """The process of a rank."""
        marker = str(self.running.folder)
        (process,) = workers_of(rank, lambda text: text.startswith(marker))
        return process

    def supervisor(self) -> str:
        """The node whose supervisor has the run."""

        def host() -> str:
            lease = Ledger(open_store(self.running.job.storage), self.running.job.run_id).lease()
            return lease.host if lease is not None else ""

        return str(wait_for(host, what="a supervisor"))

    def answers(self) -> list[Rung]:
        """The rungs that have helped, inside attempts."""
        return [
            recovery.began.decision.rung
            for view in self.running.history.attempts
            for recovery in view.recoveries
            if recovery.succeeded
        ]

    def await_answer(self, number: int = 1) -> None:
        """Wait for as many recoveries."""
        wait_for(lambda: len(self.answers()) == number, what=f"recoveries: {self.out}")

    def await_end(self, *states: str) -> None:
        """Wait for the end of the job in Slurm, and see that it is in one of these states."""
        self.running.pace(0)
        self._await_slurm(lambda: self.slurm("JobState") in OVER)
        assert self.slurm("JobState") in states, self.out

    def complete(self, curve: Mapping[int, float]) -> None:
        """See that the run completes as if nothing had happened, and leaves nothing."""
        self.await_end("COMPLETED")
        history = self.running.history
        assert history.ended is not None, self.out
        assert history.ended.outcome == "completed"
        assert self.running.curve() == curve
        self.leave_nothing()

    def leave_nothing(self) -> None:
        """See that no node has a process of the run, once Slurm has taken the job down."""

        def left() -> list[psutil.Process]:
            return [process for node in self.lab.nodes for process in self.lab.processes(node)]

        wait_for(lambda: not left(), what=f"the end of {left()}")
        self.running.leave_nothing()
