"""A run that is watched block by block: what its steps pay for that.

Times are seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.recovery.processes import sweep
from benchmarks.watching.recipe import (
    BLOCK_STEPS,
    STEPS_FILE,
    VARIABLE,
    WARM_BLOCKS,
    Workload,
    is_watched,
)
from perdure.training.config.job import parse_job
from perdure.training.processes import MARKER
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.watch import EndKind

LIMIT_S = 1200.0


@dataclass(frozen=True, slots=True)
class Paired:
    """Neighbouring blocks of steps, watched and not.

    Attributes:
        watched_s: mean step of each watched block.
        plain_s: of the block beside it.
    """

    watched_s: Sequence[float]
    plain_s: Sequence[float]

    @classmethod
    def of_blocks(cls, blocks: Sequence[Sequence[float]]) -> Paired:
        """From the times of the steps, block by block."""
        means = [
            (is_watched(number), fmean(block))
            for number, block in enumerate(blocks)
            if number >= WARM_BLOCKS
        ]
        return cls([s for on, s in means if on], [s for on, s in means if not on])

    @property
    def costs(self) -> list[float]:
        """Of each pair, as a share of the step."""
        return [w / p - 1 for w, p in zip(self.watched_s, self.plain_s, strict=True)]


def measure(num_ranks: int, pairs: int) -> Paired:
    """Run it in a process of its own.

    Raises:
        RuntimeError: it did not come to its end.
    """
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as text:
        folder = Path(text)
        command = (sys.executable, "-m", "benchmarks.watching", "--run", str(num_ranks), str(pairs))
        try:
            done = subprocess.run(
                (*command, str(folder)),
                env={**os.environ, MARKER: str(folder)},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        finally:
            sweep(folder)
        if done.returncode != 0:
            raise RuntimeError("\n".join(done.stderr.strip().splitlines()[-3:]))
        return Paired.of_blocks(json.loads((folder / STEPS_FILE).read_text(encoding="ascii")))


def run(num_ranks: int, pairs: int, folder: Path) -> int:
    """The run itself. Returns 1 when it does not come to its end."""
    home = folder / "home"
    workload = Workload(folder=folder, home=home, supervisor=os.getpid())
    job = parse_job(
        {
            "run_id": "watched",
            "storage": {"address": f"file://{folder / 'store'}"},
            "steps": (WARM_BLOCKS + 2 * pairs) * BLOCK_STEPS,
            "worker": {"recipe": "benchmarks.watching.recipe:main"},
            "batch": {"global_batch_size": num_ranks, "micro_batch_size": 1},
            "checkpoint": {"every_steps": 1_000_000},
            "engine": {"nodes": 1, "slots_per_node": num_ranks, "spares": 0},
            "env": {VARIABLE: workload.model_dump_json()},
        }
    )
    run = RunSupervisor(job, home=home)
    run.take()
    verdict = run.attempt(
        run.place(),
        data_manifest_key=None,
        stop_wanted=lambda: False,
        on_progress=lambda _: None,
    )
    run.end("completed" if verdict.kind is EndKind.COMPLETED else "failed", "")
    if verdict.kind is not EndKind.COMPLETED and verdict.fault is not None:
        print(verdict.fault.evidence, file=sys.stderr)
    return 0 if verdict.kind is EndKind.COMPLETED else 1
