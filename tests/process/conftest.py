"""The undisturbed runs that curves are compared with, made once for all workers of the tests."""

from __future__ import annotations

import fcntl
import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from perdure.training.drill.job import write_corpus
from tests.process.deployment import deploy, kill_worker, start_worker
from tests.process.harness import Workbench

Curve = Mapping[int, float]  # loss of every step, all digits


@pytest.fixture(scope="session", autouse=True)
def interruptible():
    """A shell that starts tests in the background has SIGINT ignored, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder for runs without Prefect, with the drills' corpus."""
    folder: Path = tmp_path_factory.mktemp("home")
    write_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def deployed(bench, api):
    """The deployments of prefect.yaml on the server, and the workers that serve them: one."""
    deploy(bench, api)
    workers = [start_worker(bench)]
    yield workers
    for worker in workers:
        kill_worker(worker)


@pytest.fixture(scope="session")
def common_folder(tmp_path_factory, worker_id) -> Path:
    """A folder that all workers of this session of tests have, and no other session."""
    own: Path = tmp_path_factory.getbasetemp()
    return own if worker_id == "master" else own.parent


@pytest.fixture(scope="session")
def undisturbed_pair(bench, common_folder) -> Curve:
    """The two-rank job without a fault."""
    return _once(bench, bench.pair, "undisturbed-pair", common_folder)


@pytest.fixture(scope="session")
def undisturbed(bench, common_folder) -> Curve:
    """The small job without a fault: what every curve is compared with."""
    return _once(bench, bench.job, "undisturbed", common_folder)


def _once(
    bench: Workbench, document_of: Callable[..., dict[str, Any]], run_id: str, folder: Path
) -> Curve:
    """The run that the first worker makes; the others wait for it."""
    kept = folder / f"{run_id}.json"
    with (folder / f"{run_id}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            running = bench.start(document_of(run_id, env={"PACE_S": "0"}))
            assert running.finish() == 0, running.out
            kept.write_text(json.dumps(running.curve()))
    losses = json.loads(kept.read_text())
    return {int(step): loss for step, loss in losses.items()}
