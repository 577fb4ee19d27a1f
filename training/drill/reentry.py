"""The re-entry check: the program starts twice for a few steps, before a run depends on restarts.

A session's program runs twice from the beginning on a scratch run, and has to give the same losses
in every digit. A command shows nothing but its processes: the check starts it, ends it by SIGTERM
as a restart would, and starts it again as the second start of its container; it writes its output
where it always does. Times are seconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from pydantic import SecretStr

from perdure.storage.proxies import users_environment
from perdure.training.agent.preparation import platform_variables, rank_variables
from perdure.training.commands.arguments import argument_variables, fill_in
from perdure.training.config.job import Job
from perdure.training.config.secrets import values_on_node
from perdure.training.drill.driver import RunDriver, Secrets
from perdure.training.drill.termination import raise_on_termination
from perdure.training.environment import variables_of, worker_path
from perdure.training.errors import EngineError, PerdureError
from perdure.training.masking import SECRETS_ENV, mask_text, secret_values
from perdure.training.processes import free_port
from perdure.training.telemetry.vendor_tools import end_session
from perdure.training.wire.agent import AgentConfig, StartOrder
from perdure.training.wire.node import Check, CheckOutcome

NAME = "reentry"
STEPS = 3
LOOPBACK = "127.0.0.1"
STORE_FOLDER = "store"


def check_reentry(job: Job, *, lasting_s: float, secrets: Secrets = dict) -> Check:
    """Start the program of a job twice.

    Args:
        job: the job to check.
        lasting_s: how long a command runs each time.
        secrets: reads the values of the job's env_from that are in Prefect blocks; called at each
            start, may raise EngineError.
    """
    began_s = time.monotonic()
    with (
        raise_on_termination(),
        tempfile.TemporaryDirectory(prefix="perdure-reentry-") as folder,
    ):
        if job.worker.is_command:
            check = _check_command(job, Path(folder), lasting_s, secrets)
        else:
            check = _check_session(job, Path(folder), secrets)
    return check.model_copy(update={"seconds": time.monotonic() - began_s})


def scratch_job(job: Job, folder: Path, number: int) -> Job:
    """Shorten a job to a few steps in a scratch store."""
    changes = {
        "run_id": f"reentry-{number}",
        "steps": STEPS,
        "storage": {"address": f"file://{folder / STORE_FOLDER}"},
        # A warm-up must not be longer than the job.
        "optimizer": job.optimizer.model_dump() | {"warmup_steps": 0},
        "engine": job.engine.model_dump() | {"spares": 0},
        "preflight": {"nodes": False},
        "drill": {},
        "log_path": None,
    }
    return Job.model_validate(job.model_dump() | changes)


def _check_session(job: Job, folder: Path, secrets: Secrets) -> Check:
    allowed = f"the same {STEPS} losses, in every digit"
    curves: list[dict[int, float]] = []
    for number in (1, 2):
        try:
            outcome = RunDriver(folder, secrets=secrets).run(scratch_job(job, folder, number))
        except PerdureError as error:
            return _failed(f"start {number}: {error}", allowed)
        curve = {step: loss for step, (loss, _) in outcome.curve.items()}
        if len(curve) != STEPS:
            fault = next((a.ended.fault for a in outcome.history.attempts if a.ended), None)
            why = fault.evidence if fault is not None else outcome.ended
            return _failed(f"start {number}: {len(curve)} of {STEPS} steps: {why}", allowed)
        curves.append(curve)
    for step, loss in curves[0].items():
        if curves[1][step] != loss:
            finding = f"step {step}: loss {loss!r}, and {curves[1][step]!r} when started again"
            return _failed(finding, allowed)
    losses = ", ".join(f"{loss:.6f}" for loss in curves[0].values())
    return Check(
        name=NAME, outcome=CheckOutcome.OK, seen=f"losses {losses}, twice", allowed=allowed
    )


def _check_command(job: Job, folder: Path, lasting_s: float, secrets: Secrets) -> Check:
    allowed = "a second start after SIGTERM does not fail"
    for number in (1, 2):
        try:
            variables = _variables(job, folder, number, secrets())
            code, line = _start(job, variables, folder / f"start-{number}.log", lasting_s)
        except (EngineError, ValueError) as error:  # a secret is missing
            return _failed(str(error), allowed)
        if code not in (None, 0):
            return _failed(f"start {number} ended with exit code {code}: {line}", allowed)
    finding = f"started twice, {lasting_s:g} s each time, or to its end"
    return Check(name=NAME, outcome=CheckOutcome.OK, seen=finding, allowed=allowed)


def _start(
    job: Job, variables: Mapping[str, str], log: Path, lasting_s: float
) -> tuple[int | None, str]:
    """Run the command for a while. Returns its exit code, None: it still ran, and its last line."""
    command = fill_in(job.worker.command or (), argument_variables(variables))
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                cwd=job.worker.cwd,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # end_session() ends its child processes, too
            )
        except OSError as error:
            return 127, str(error)  # a shell's exit code for it
        try:
            code: int | None = process.wait(lasting_s)
        except subprocess.TimeoutExpired:
            code = None
            process.send_signal(signal.SIGTERM)
            _await(process, job.engine.grace_s)
        finally:
            end_session(process)
    lines = log.read_text(errors="replace").strip().splitlines()
    last = mask_text(lines[-1], secret_values(variables)) if lines else ""
    return code, last[:300]


def _await(process: subprocess.Popen[bytes], grace_s: float) -> None:
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        return  # the caller ends it by force, as an agent would


def _variables(
    job: Job, folder: Path, number: int, delivered: Mapping[str, SecretStr]
) -> dict[str, str]:
    """Compose the variables that an agent would set in the job's only container."""
    config = AgentConfig(
        run_id=job.run_id,
        node="node-0",
        member=0,
        schedule_cnt=1,
        token="",
        epoch=1,
        orphan_timeout_s=60,
        start_timeout_s=60,
        hang_timeout_s=None,
        detect_hangs=False,
    )
    of_blocks = {name: value.get_secret_value() for name, value in delivered.items()}
    secrets = values_on_node(job.env_from, delivered=of_blocks, environment=os.environ)
    job_variables = {**variables_of(job), **secrets, SECRETS_ENV: ",".join(secrets)}
    order = StartOrder(
        placement=1,
        attempt=number,
        num_nodes=1,
        # A command that starts once per device starts once here.
        slots_per_node=job.engine.slots_per_node if job.worker.is_launcher else 1,
        hosts=(LOOPBACK,),
        master_addr=LOOPBACK,
        master_port=job.comm.master_port or free_port(LOOPBACK),
        command=job.worker.command or (),
        is_command=True,
        is_launcher=job.worker.is_launcher,
        cwd=str(Path(job.worker.cwd or ".").resolve()),
        grace_s=job.engine.grace_s,
        log_path=None,
        variables=job_variables,
        job=job,
        data_manifest_key=None,
    )
    agent = platform_variables(config, order, folder, number) | rank_variables(config, order, 0, 0)
    return {**users_environment(os.environ), **job_variables, **agent, "PATH": worker_path()}


def _failed(finding: str, allowed: str) -> Check:
    return Check(name=NAME, outcome=CheckOutcome.FAILED, seen=finding, allowed=allowed)
