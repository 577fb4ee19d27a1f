"""The lab under test, in whose namespace these tests run, and the runs that are submitted there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.process.allocation import launched
from tests.process.harness import Workbench
from tests.slurm.lab import FOLDER_ENV, HUB_IP, Lab, offer
from tests.slurm.runs import SlurmRun
from tests.workplace import make_bench


@pytest.fixture(scope="session")
def cluster() -> Iterator[Lab]:
    """The lab, from the first test to the last."""
    folder = os.environ.get(FOLDER_ENV)
    if folder is None:
        pytest.skip("not in a Slurm lab: make test-slurm")
    made = Lab(Path(folder))
    made.start()
    yield made
    made.stop()


@pytest.fixture
def lab(cluster: Lab) -> Iterator[Lab]:
    """The lab, whose nodes a test may break; afterwards they are whole again."""
    yield cluster
    cluster.restore()


@pytest.fixture(scope="session")
def bench(cluster, session_home, prefect_server) -> Workbench:
    """Where runs are submitted; the nodes reach the server, too."""
    offer(prefect_server.port)
    api_url = prefect_server.api_url.replace("127.0.0.1", HUB_IP)
    return make_bench(session_home, api_url, {"HOME": str(session_home)})


@pytest.fixture(scope="session")
def undisturbed(bench) -> Mapping[int, float]:
    """Loss of every step of the job without a fault, all digits."""
    running = bench.start(bench.pair("undisturbed", env={"PACE_S": "0"}))
    assert running.finish() == 0, running.out
    return running.curve()


@pytest.fixture
def submit(lab: Lab, bench: Workbench) -> Any:
    """Submits the job of two nodes that train and two spares, one of them warm."""

    def make(run_id: str, *options: str, **changes: Any) -> SlurmRun:
        spares = {"spares": 2, "warm_spares": 1}
        section = {**spares, **changes.pop("engine", {})}
        made = SlurmRun(lab, bench, launched(bench, run_id, engine=section, **changes))
        made.submit(*options)
        return made

    return make
