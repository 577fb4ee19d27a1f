"""The drill flow: faults made on purpose on the nodes of a job, and what became of them."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from tasks.credentials import credentials_of
from tasks.drilling import play, tell, undisturbed
from tasks.states import data_of
from training.drill.drilling import ALL, chosen, drilling_on, parallel_kind
from training.job import Job


@flow(name="drill", flow_run_name="{name}", persist_result=False)
def drill(name: str = ALL, job: Job | None = None, parallelism: str | None = None) -> State[Any]:
    """Run the drills of a name, each beside the same run without a fault.

    Args:
        name: of a drill, or all.
        job: on whose engine and with whose store they run, not itself; none: this machine.
        parallelism: ddp, hsdp or fsdp2; none: the job's, else ddp.
    """
    drills, kind = chosen(name), parallel_kind(parallelism, job)
    credentials = credentials_of(job.storage) if job is not None else None
    home = Path(tempfile.mkdtemp(prefix="perdure-drill-"))
    drilling = drilling_on(job, drills, kind, home=home, credentials=credentials)
    undisturbed(drilling)
    outcomes = [data_of(play(drilling, one, return_state=True)) for one in drills]
    tell(outcomes, where=f"on the nodes of {job.run_id}" if job is not None else "on this machine")
    bad = [one.name for one in outcomes if not one.as_expected]
    if bad:
        kept = f"logs and ledgers: {', '.join(drilling.places)}"
        return Failed(message=f"not as expected: {', '.join(bad)}; {kept}")
    drilling.clear()
    shutil.rmtree(home, ignore_errors=True)
    return Completed(message=f"as expected: {', '.join(one.name for one in outcomes)}")
