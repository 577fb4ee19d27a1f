"""Runs of the reference job on emulated NPUs, and beside them on the CPU.

Four ranks on two nodes, each node with devices of its own. There is no dropout: the random numbers
of an NPU are its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure.training.config.job import Job, parse_job
from perdure.training.config.model import ParallelKind
from perdure.training.drill.driver import RunDriver, RunOutcome
from perdure.training.drill.evaluation import list_recoveries
from perdure.training.drill.job import drill_job, write_corpus
from tests.recipes import device_fault

ROOT = Path(__file__).parents[3]
STEPS = 12
FAULT_STEP = 7  # in work when the fault comes
LIMIT_S = 300.0
ON_THE_CPU = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


@dataclass(frozen=True)
class DeviceFault:
    """A fault of an emulated device.

    Attributes:
        command: of the emulator.
        rank: that has it.
        step: in work when it comes.
        wait_s: before it, with nothing left on the device, so that all ranks are in that step.
    """

    command: str
    rank: int = 1
    step: int = FAULT_STEP
    wait_s: float | None = None


def job_of(
    home: Path,
    name: str,
    *,
    kind: ParallelKind = ParallelKind.DDP,
    fault: DeviceFault | None = None,
    env: Mapping[str, str] | None = None,
    changes: Mapping[str, Any] | None = None,
    top: Mapping[str, Any] | None = None,
    steps: int = STEPS,
) -> Job:
    """The job of a run: `changes` are fields of its sections, `top` those beside the sections."""
    variables = dict(env or {})
    if fault is not None:
        variables |= {
            device_fault.RANK: str(fault.rank),
            device_fault.STEP: str(fault.step),
            device_fault.COMMAND: fault.command,
            device_fault.MARK: str(home / f"{name}.fired"),
        }
        if fault.wait_s is not None:
            variables[device_fault.WAIT_S] = str(fault.wait_s)
    changes = dict(changes or {})
    engine = {"spares": 1, **changes.pop("engine", {})}
    job = drill_job(
        home,
        name,
        kind=kind,
        steps=steps,
        changes={
            "engine": engine,
            "env": variables,
            "model": {"dropout": 0.0},
            "worker": {"recipe": "tests.recipes.device_fault:main", "cwd": str(ROOT)},
            **changes,
        },
    )
    return parse_job({**job.model_dump(mode="json"), **top}) if top else job


def run(home: Path, name: str, **which: Any) -> RunOutcome:
    """Run a job to its end."""
    return drive(home, job_of(home, name, **which))


def drive(home: Path, job: Job) -> RunOutcome:
    """Run a job to its end."""
    write_corpus(home, job.world_size)
    return RunDriver(home, LIMIT_S).run(job)


def summary(outcome: RunOutcome) -> str:
    """What happened, for a test that fails and for the table of the documentation."""
    lines = [f"ended: {outcome.ended}, {len(outcome.curve)} steps"]
    for view in outcome.history.attempts:
        for one in view.recoveries:
            fault = one.began.fault
            lines.append(
                f"{fault.fault_class} code={fault.code} rank={fault.rank} "
                f"-> {one.began.decision.rung}: {fault.evidence}"
            )
            if one.ended is not None and not one.ended.succeeded:
                lines.append(f"  not carried out: {one.ended.why}")
        if view.ended is not None and view.ended.fault is not None:
            fault, decision = view.ended.fault, view.decision
            rung = decision.rung if decision is not None else "-"
            lines.append(
                f"{fault.fault_class} code={fault.code} rank={fault.rank} -> {rung}: "
                f"{fault.evidence}"
            )
    lines.append(f"rungs: {[one.rung.value for one in list_recoveries(outcome.history)]}")
    return "\n".join(lines)
