"""`perdure launch`: run once on every node that a platform has given, in place of torchrun."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import httpx
import typer

from perdure.console import JobFile, Overrides, make_console, make_table, warn
from perdure.runs import credentials_of
from perdure.server import API_URL
from perdure.storage.address import Credentials, has_store, worker_environment
from perdure.storage.errors import StorageError
from perdure.training.config.engine import LaunchedEngineSpec
from perdure.training.config.job import Job
from perdure.training.config.job_file import load_job
from perdure.training.engines.launched.controllers import rivals
from perdure.training.engines.launched.ends import ENDS
from perdure.training.engines.launched.identity import NodeIdentity, identify
from perdure.training.engines.launched.node import LaunchedNode, own_address
from perdure.training.engines.launched.platforms import PLATFORMS, Fact
from perdure.training.engines.launched.secret import SECRET_ENV, find_secret, keep_secret
from perdure.training.errors import EngineError, InputError, PerdureError
from perdure.training.files import home_folder
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.supervisor.run_identity import completed_before
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.runbook import cancel

SERVER_TIMEOUT_S = 5.0
CANCEL_S = 60.0  # the platform kills earlier
SAVE_MARGIN_S = 60.0  # beyond the grace period, before the end of an allocation


def launch(  # noqa: PLR0913 an option of the command each
    job_file: JobFile,
    overrides: Overrides = None,
    *,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="nodes of the allocation, spares included")
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option("--node-rank", min=0, help="number of this node, from 0")
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            "--rendezvous",
            metavar="HOST:PORT",
            help="address in the network of the nodes; this "
            "node's own address is the one on the way there",
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option("--host", help="address of this node for the others")
    ] = None,
    node_name: Annotated[
        str | None,
        typer.Option("--node-name", help="name of this node, which stays when it is started again"),
    ] = None,
    deadline: Annotated[
        float | None,
        typer.Option("--deadline", help="end of the allocation, seconds since the epoch"),
    ] = None,
    leave_before: Annotated[
        float | None,
        typer.Option(
            "--leave-before",
            min=0,
            help="seconds before the deadline at which the run saves and "
            "ends; default: engine.grace_s + 60",
        ),
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option("--secret-file", help="file with the secret that all nodes have"),
    ] = None,
    end_file: Annotated[
        Path | None,
        typer.Option(
            "--end-file", help="file for the exit code and the nodes at fault, for a batch script"
        ),
    ] = None,
    supervisor: Annotated[
        bool,
        typer.Option(
            "--supervisor/--no-supervisor",
            help="whether this node may supervise the run; else `perdure run` does, elsewhere",
        ),
    ] = True,
    explain: Annotated[
        bool, typer.Option("--explain", help="print what was read from where, and start nothing")
    ] = False,
) -> None:
    """Take part in a run as one of its nodes; the nodes elect a supervisor among themselves.

    The job's engine is `{kind: launched}`. Number of nodes and place of this node come from the
    variables of ModelArts, ascend-operator, Slurm, kubeflow, an Indexed Job or MPI, or from the
    options.
    """  # fmt: skip
    job = load_job(job_file, overrides or ())
    flags = {
        Fact.NUM_NODES: nodes,
        Fact.NODE_RANK: node_rank,
        Fact.RENDEZVOUS: rendezvous,
        Fact.ADDRESS: host,
        Fact.NODE_NAME: node_name,
        Fact.DEADLINE: deadline,
    }
    identity = _identity(job, {fact: str(v) for fact, v in flags.items() if v is not None})
    if explain:
        _explain(identity)
        return
    for line in rivals(os.environ):
        warn(f"{identity.name}: {line}, and so does Perdure: switch it off on the platform")
    credentials, home = credentials_of(job), home_folder()
    keep_secret(job.run_id, home=home, file=secret_file, environment=os.environ)
    secret = find_secret(
        job.run_id,
        home=home,
        environment=os.environ,
        store_keys=worker_environment(job.storage, credentials),
    )
    os.environ.pop(SECRET_ENV, None)
    if has_store(job.storage):
        handle = RunHandle(job, home=home, credentials=credentials)
        history = handle.refresh()
        if handle.is_complete:
            warn(f"{identity.name}: {completed_before(job, history)}")
            return
    settings = [word for value in overrides or () for word in ("--set", value)]
    perdure = (sys.executable, "-m", "perdure")
    node = LaunchedNode(
        job,
        identity,
        home=home,
        secret=secret,
        credentials=credentials,
        command=(*perdure, "run", str(job_file), *settings) if supervisor else (),
        cancel=lambda: _cancel(job, home, credentials, (*perdure, "cancel", job.run_id)),
        variables=_supervisors_variables,
        leaves_s=job.engine.grace_s + SAVE_MARGIN_S if leave_before is None else leave_before,
    )
    end = node.run()
    place = end.on_platform
    if end_file is not None:
        _write_end(end_file, f"{place.code} {','.join(end.nodes)}\n")
    warn(
        f"{identity.name}: {job.run_id} {end.message}; {end.end}: exit code {place.code} "
        f"({identity.platform}: {place.platform_does})"
    )
    raise typer.Exit(place.code)


def _identity(job: Job, flags: dict[Fact, str]) -> NodeIdentity:
    """Find the place of this node, and compare it with the job.

    Raises:
        InputError: they do not agree.
    """
    spec = job.engine
    if not isinstance(spec, LaunchedEngineSpec):
        raise InputError("engine.kind", f"{spec.kind}: `perdure launch` needs kind: launched")
    identity = identify(flags, os.environ, expected_nodes=spec.nodes + spec.spares)
    if identity.num_nodes < spec.nodes:
        text = f"{spec.nodes}: the allocation has {identity.num_nodes} nodes, give more or less"
        raise InputError("engine.nodes", text)
    if identity.num_nodes < spec.nodes + spec.spares:
        spares = identity.num_nodes - spec.nodes
        warn(f"the allocation has {spares} spare nodes, the job wants {spec.spares}")
    return identity


def _write_end(path: Path, text: str) -> None:
    """Write the end of the run for a batch script; every node writes the same.

    Raises:
        PerdureError: the file cannot be written.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise PerdureError(f"--end-file: {path}: {error.strerror}") from None


def _supervisors_variables() -> dict[str, str]:
    """The variables of a supervisor; one whose Prefect server does not answer has its own."""
    variables = dict(os.environ)
    url = variables.get(API_URL)
    if url is None:
        return variables
    try:
        httpx.get(f"{url.rstrip('/')}/health", timeout=SERVER_TIMEOUT_S).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = str(error) or type(error).__name__
        warn(f"the Prefect server at {url} does not answer ({why}): uses one of this node instead")
        del variables[API_URL]
    return variables


def _cancel(job: Job, home: Path, credentials: Credentials | None, command: Sequence[str]) -> None:
    """Cancel a run: at once on record, then on its Prefect server, as far as there is time."""
    try:
        warn(cancel(RunSupervisor(job, home=home, credentials=credentials)))
    except (EngineError, StorageError) as error:
        warn(f"{job.run_id}: not cancelled yet: {error}")
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(
            command, env=_supervisors_variables(), stdin=subprocess.DEVNULL, check=False,
            timeout=CANCEL_S,
        )  # fmt: skip


def _explain(identity: NodeIdentity) -> None:
    console, platform = make_console(), identity.platform
    table = make_table("fact", "value", "read from")
    for fact in identity.facts:
        table.add_row(fact.fact, fact.value, fact.source)
    if not identity.address:
        table.add_row(Fact.ADDRESS, own_address(identity), "the way to the other nodes")
    if identity.deadline_s is not None:
        left_s = identity.deadline_s - time.time()
        table.add_row("time left", f"{left_s:.0f} s", "the deadline and this node's clock")
    console.print(table)
    source = next((t.source for t in PLATFORMS if t.platform is platform), "options alone")
    console.print(f"platform: {platform} ({source})", soft_wrap=True)
    ends = make_table("end", "exit code", "the platform does")
    for end, row in ENDS[platform].items():
        ends.add_row(end, str(row.code), row.platform_does)
    console.print(ends)
