"""The embedded engine: how containers that are no longer wanted come to their end."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.jobs import small_job
from training.agent.control import ADDRESS_FILE
from training.engines import fleet as fleet_module
from training.engines.base import plan
from training.engines.fleet import Fleet
from training.engines.local import LocalEngine
from training.wire.agent import AgentAddress

GRACE_S = 20.0


@pytest.fixture
def fleet(tmp_path) -> Iterator[Fleet]:
    job = small_job(
        tmp_path,
        worker={"recipe": "module:main"},
        engine={"nodes": 2, "spares": 1, "grace_s": GRACE_S},
    )
    fleet = Fleet(LocalEngine(job, home=tmp_path / "home", epoch=1), job, epoch=1)
    yield fleet
    fleet.cancel(0)


def addresses(home: Path) -> dict[str, Path]:
    """Where each living agent says that it listens, by the name of its container."""
    return {path.parent.name: path for path in home.glob(f"runs/run/nodes/*/*/{ADDRESS_FILE}")}


def process_of(address: Path) -> psutil.Process:
    return psutil.Process(AgentAddress.model_validate_json(address.read_text()).pid)


def test_former_containers_end_in_order_before_new_ones_start(fleet, tmp_path):
    first = plan(fleet.nodes(), 2, previous=None, avoid=())
    fleet.submit(first)
    assert set(addresses(tmp_path / "home")) == {"p0001-m0-s1", "p0001-m1-s1"}
    fleet.submit(plan(fleet.nodes(), 2, previous=first, avoid=()))
    # An agent that was killed would have left its address.
    assert set(addresses(tmp_path / "home")) == {"p0002-m0-s2", "p0002-m1-s2"}


def test_a_container_that_is_dead_or_frozen_is_replaced_without_a_long_wait(
    fleet, tmp_path, monkeypatch
):
    monkeypatch.setattr(fleet_module, "SHUTDOWN_TIMEOUT_S", 0.5)
    placement = plan(fleet.nodes(), 2, previous=None, avoid=())
    fleet.submit(placement)
    found = addresses(tmp_path / "home")
    dead, frozen = process_of(found["p0001-m0-s1"]), process_of(found["p0001-m1-s1"])
    dead.kill()
    frozen.send_signal(signal.SIGSTOP)
    before_s = time.monotonic()
    fleet.replace(placement, {0, 1})
    assert time.monotonic() - before_s < GRACE_S / 2
    assert not frozen.is_running()
    assert len(fleet.poll().agents) == 2
