"""Real runs in real processes, for tests: start them, watch them, read what they left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from perdure.storage.address import has_store, open_store
from perdure.training.config.job import Job, parse_job
from perdure.training.config.model import ParallelKind
from perdure.training.drill.driver import RunOutcome
from perdure.training.drill.evaluation import differences
from perdure.training.drill.job import drill_job
from perdure.training.journal.attempt_log import parse_lines
from perdure.training.journal.events import StepRecord
from perdure.training.journal.history import RunHistory
from perdure.training.journal.ledger import Ledger
from perdure.training.journal.steps import read_kept_steps
from tests.local_run import LocalRun
from tests.values import not_none
from tests.waiting import PATIENCE_S, wait_for

REPO = Path(__file__).resolve().parents[2]
RECIPES = REPO / "tests" / "recipes"
TEXT = "the quick brown fox jumps over the lazy dog, again and again and again\n"


def faulty_job(
    home: Path,
    name: str,
    *,
    steps: int,
    faults: str = "",
    pace_s: float = 0.05,
    env: Mapping[str, str] | None = None,
    **changes: Mapping[str, Any],
) -> Job:
    """A job whose ranks misbehave as tests/recipes/faulty.py has it; `marks-NAME` keeps marks."""
    marks = home / f"marks-{name}"
    marks.mkdir()
    given = {"FAULTS": faults, "MARKS": str(marks), "PACE_S": str(pace_s), **(env or {})}
    sections: dict[str, Any] = {
        "worker": {"recipe": "tests.recipes.faulty:main", "cwd": str(REPO)},
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "env": given,
    }
    return drill_job(
        home, name, kind=ParallelKind.DDP, steps=steps, changes={**sections, **changes}
    )


def assert_as_undisturbed(played: RunOutcome, undisturbed: RunOutcome, *, steps: int) -> None:
    """That a run completed with every step, and that no digit differs from the other run."""
    assert (played.ended, undisturbed.ended) == ("completed", "completed")
    assert list(played.curve) == list(range(1, steps + 1))
    assert differences(played.curve, undisturbed.curve) == []
    assert played.state == undisturbed.state
    assert played.leftovers == ()


@dataclass
class Workbench:
    """A Perdure home, a store and a server, and the runs made with them.

    Attributes:
        cwd: folder that commands are started in; None: that of the tests.
        program: the interpreter's arguments for the command line of Perdure.
    """

    home: Path
    api_url: str
    corpus: Path
    env: dict[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    program: tuple[str, ...] = ("-m", "perdure")

    def job(self, run_id: str, **changes: Any) -> dict[str, Any]:
        """The small job that most tests run: four ranks, two nodes, one spare."""
        document: dict[str, Any] = {
            "run_id": run_id,
            "storage": {"address": f"file://{self.home}/store"},
            "steps": 60,
            "seed": 11,
            "worker": {"recipe": "paced:main", "cwd": str(RECIPES)},
            "data": {"sources": [str(self.corpus)], "shard_size_bytes": 8192, "num_workers": 0},
            "model": {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "seq_len": 16},
            "batch": {"global_batch_size": 8, "micro_batch_size": 2},
            "checkpoint": {"every_steps": 10},
            # A lost node costs containers here; test_node_replace.py has it answered inside.
            "restart": {"pod_retries": 1, "node_replace": False},
            "preflight": {"nodes": False},  # its own tests have it on
            "engine": {"nodes": 2, "slots_per_node": 2, "spares": 1, "grace_s": 10},
        }
        pace = {"PACE_S": "0.1", "PACE_FILE": str(self.pace_file(run_id))}
        made = {**document, **changes, "env": {**pace, **changes.get("env", {})}}
        # Each container takes a second of a core; test_warm_spares.py has them stand by.
        return {**made, "engine": {"warm_spares": 0, **made["engine"]}}

    def pace_file(self, run_id: str) -> Path:
        """Where a run looks for how long to pause in a step."""
        return self.home / f"{run_id}.pace"

    def pair(self, run_id: str, **changes: Any) -> dict[str, Any]:
        """A job of two ranks on one node, for what does not need more: it starts faster."""
        small = {
            "batch": {"global_batch_size": 8, "micro_batch_size": 4},
            "engine": {"nodes": 1, "slots_per_node": 2, "spares": 1, "grace_s": 10},
        }
        return self.job(run_id, **{**small, **changes})

    def apart(self, run_id: str, **changes: Any) -> dict[str, Any]:
        """The same two ranks, each on a node of its own."""
        engine = {"nodes": 2, "slots_per_node": 1, "spares": 1, "grace_s": 10}
        return self.pair(run_id, **{"engine": engine, **changes})

    @property
    def environment(self) -> dict[str, str]:
        """What a user's shell would have."""
        return {
            **os.environ,
            "PERDURE_HOME": str(self.home),
            "PREFECT_API_URL": self.api_url,
            **self.env,
        }

    def start(self, document: dict[str, Any], *options: str) -> Running:
        """`perdure run` in a process of its own."""
        path = self.home / f"{document['run_id']}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(document))
        log = (self.home / f"{document['run_id']}.out").open("ab")
        process = subprocess.Popen(
            [sys.executable, *self.program, "run", str(path), *options],
            env=self.environment,
            cwd=self.cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        log.close()
        return Running(self, parse_job(document), process)

    def look(self, document: dict[str, Any]) -> Running:
        """A run that another process started."""
        return Running(self, parse_job(document), None)

    def python(
        self, *arguments: str, timeout_s: float = 240, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """An interpreter with these arguments, to its end."""
        return subprocess.run(
            [sys.executable, *arguments],
            env=self.environment,
            cwd=cwd or self.cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def perdure(self, *arguments: str) -> str:
        """The `perdure` command; what it printed."""
        done = self.python("-m", "perdure", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def prefect(self, *arguments: str, tries: int = 3) -> str:
        """The `prefect` command; a busy machine gets a second and a third try."""
        command = ("-X", "faulthandler", "-m", "prefect", *arguments)
        try:
            done = self.python(*command, timeout_s=120, cwd=REPO)
        except subprocess.TimeoutExpired as error:
            if tries == 1:
                raise AssertionError(f"prefect {arguments}: hangs: {error.output}") from error
            return self.prefect(*arguments, tries=tries - 1)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@dataclass
class Running:
    """One run, from outside."""

    bench: Workbench
    job: Job
    process: subprocess.Popen[bytes] | None

    @property
    def out(self) -> str:
        """What `perdure run` printed."""
        path = self.bench.home / f"{self.job.run_id}.out"
        return path.read_text() if path.exists() else ""

    @property
    def history(self) -> RunHistory:
        """The ledger, as it is now; empty before the run has made its store."""
        if not has_store(self.job.storage):
            return RunHistory()
        return Ledger(open_store(self.job.storage), self.job.run_id).read()

    @property
    def local(self) -> LocalRun:
        """The processes of the run."""
        return LocalRun(self.bench.home, self.job.run_id)

    @property
    def folder(self) -> Path:
        """Where the engine keeps the run's nodes."""
        return self.bench.home / "runs" / self.job.run_id

    def step(self) -> int:
        """Newest step that the first rank has written down, in any attempt."""
        files = self.folder.glob("nodes/*/*/attempts/*/metrics.jsonl")
        events = [event for path in files for event in parse_lines(path.read_text())]
        return max((one.step for one in events if isinstance(one, StepRecord)), default=0)

    def reach(self, step: int, *, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the run has completed `step`."""

        def there() -> bool:
            if self.process is not None:
                assert self.process.poll() is None, self.out
            return self.step() >= step

        wait_for(there, timeout_s=timeout_s, what=f"step {step} of {self.job.run_id}: {self.out}")

    def kill_supervisor(self) -> None:
        """SIGKILL the flow's process."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def pace(self, seconds: float) -> None:
        """From now on, pause for so long in every step."""
        file = self.bench.pace_file(self.job.run_id)
        part = file.with_suffix(".part")
        part.write_text(f"{seconds:g}")
        part.replace(file)

    def finish(self, *, timeout_s: float = PATIENCE_S, hurry: bool = True) -> int:
        """Wait for the end of `perdure run`, by default without pauses. Returns its exit code."""
        assert self.process is not None
        if hurry:
            self.pace(0)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.job.run_id} did not end:\n{self.out}") from None

    def complete(self, curve: Mapping[int, float] | None = None) -> None:
        """Assert that the run completes, with this loss curve, and leaves no process."""
        assert self.finish() == 0, self.out
        assert curve is None or self.curve() == curve
        self.leave_nothing()

    def status(self) -> dict[str, Any]:
        """What `perdure status` reports."""
        report: dict[str, Any] = json.loads(self.bench.perdure("status", self.job.run_id, "--json"))
        return report

    def curve(self) -> dict[int, float]:
        """Loss of every kept step, all digits."""
        kept = read_kept_steps(open_store(self.job.storage), self.job.run_id)
        return {step: not_none(record.loss) for step, record in kept.items()}

    def rungs(self) -> list[str]:
        """Every decision's rung, those inside the processes too."""
        found: list[str] = []
        for view in self.history.attempts:
            found += [recovery.began.decision.rung.value for recovery in view.recoveries]
            found += [view.decision.rung.value] if view.decision is not None else []
        return found

    def worker_lines(self, text: str) -> list[str]:
        """The lines with a text that ranks printed, in every attempt."""
        return [
            line
            for path in sorted(self.folder.glob("nodes/*/*/attempts/*/*.stdout.log"))
            for line in path.read_text().splitlines()
            if text in line
        ]

    def leave_nothing(self) -> None:
        """Assert that no process of the run is left, killing what is."""
        left = self.local.processes()
        for process in left:
            process.kill()
        assert left == []
