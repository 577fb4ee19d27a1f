"""Perdure's side: the same training as a session job, with faults that it injects itself.

The run is on the local engine, all ranks on one node but where a node is lost, without a Prefect
server, which has no part in what is measured. No checkpoint is taken before the last step. Times
are seconds since the epoch.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.recovery.workload import (
    BATCH,
    FAULT_FILE,
    MODEL,
    NUM_NODES,
    NUM_RANKS,
    SEED,
    VARIABLE,
    Start,
    Workload,
)
from perdure.training.agent.launcher import COLD_START
from perdure.training.config.drill import DrillKind
from perdure.training.config.job import Job, parse_job
from perdure.training.injection.inside import fired_at_s
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.watch import EndKind, Progress

LIMIT_S = 200.0
RUN_ID = "bench"
NEVER = 1_000_000


def replaced(workload: Workload) -> None:
    """A killed rank gets a new process, forked from one that has imported everything."""
    _run(_job(workload), workload.folder)


def replaced_cold(workload: Workload) -> None:
    """Likewise, from a new interpreter."""
    # The agent, which starts the processes, inherits it.
    os.environ[COLD_START] = "1"
    replaced(workload)


def node_replaced(*, warm_spares: int) -> Start:
    """A lost node's ranks move to a spare one.

    Args:
        warm_spares: spare nodes whose container stands already.
    """

    def start(workload: Workload) -> None:
        engine = {
            "nodes": NUM_NODES,
            "slots_per_node": NUM_RANKS // NUM_NODES,
            "spares": 1,
            "warm_spares": warm_spares,
        }

        def arm(run: RunSupervisor, progress: Progress) -> None:
            if progress.last is not None and len(run.warm_spares) == warm_spares:
                workload.arm()

        run = _run(_job(workload, engine={"grace_s": 10, **engine}), workload.folder, look=arm)
        (recovery,) = run.refresh().attempts[-1].recoveries
        workload.noticed(recovery.began.fault.at_s)

    return start


def step_retry(kind: DrillKind) -> Start:
    """The rank that is to be killed has this fault instead, and lives."""

    def start(workload: Workload) -> None:
        faults = []
        if workload.kill_step is not None:
            faults = [{"kind": kind, "rank": workload.kill_rank, "step": workload.kill_step}]
        quiet = workload.model_copy(update={"kill_step": None})
        _run(_job(quiet, drill={"faults": faults}), workload.folder)

    return start


def session(**changes: Mapping[str, Any]) -> Start:
    """A run without a fault; `changes` are fields of sections of the job."""

    def start(workload: Workload) -> None:
        # The turns have limits of their own, and the other contenders run in between.
        _run(_job(workload, **changes), workload.folder, limit_s=math.inf)

    return start


def _job(workload: Workload, **changes: Mapping[str, Any]) -> Job:
    document: dict[str, Any] = {
        "run_id": RUN_ID,
        "storage": {"address": f"file://{workload.folder / 'store'}"},
        "steps": workload.steps,
        "seed": SEED,
        "worker": {"recipe": "benchmarks.recovery.recipe:main"},
        "model": MODEL.model_dump(mode="json"),
        "batch": {"global_batch_size": workload.num_ranks * BATCH, "micro_batch_size": BATCH},
        "checkpoint": {"every_steps": NEVER},
        "engine": {"nodes": 1, "slots_per_node": workload.num_ranks, "spares": 0, "grace_s": 10},
        "env": {VARIABLE: workload.model_dump_json()},
    }
    return parse_job({**document, **changes})


def _run(
    job: Job,
    folder: Path,
    *,
    limit_s: float = LIMIT_S,
    look: Callable[[RunSupervisor, Progress], None] = lambda _run, _progress: None,
) -> RunSupervisor:
    """Run it to its end, and write down when its fault fired.

    Args:
        job: that is run.
        folder: of the workload.
        limit_s: for all of it.
        look: called at every poll.

    Raises:
        RuntimeError: it did not reach its end within one attempt.
    """
    run = RunSupervisor(job, home=folder / "home")
    run.take()
    until_s = time.monotonic() + limit_s
    verdict = run.attempt(
        run.place(),
        data_manifest_key=None,
        stop_wanted=lambda: time.monotonic() > until_s,
        on_progress=partial(look, run),
    )
    run.end("completed" if verdict.kind is EndKind.COMPLETED else "failed", "")
    if verdict.kind is not EndKind.COMPLETED:
        evidence = f": {verdict.fault.evidence[:150]}" if verdict.fault is not None else ""
        raise RuntimeError(f"the attempt ended {verdict.kind}{evidence}")
    fired = [at_s for times in fired_at_s(run.store, job.run_id).values() for at_s in times]
    if fired:
        text = json.dumps({"at_s": min(fired)})
        (folder / FAULT_FILE).write_text(text, encoding="ascii")
    return run
