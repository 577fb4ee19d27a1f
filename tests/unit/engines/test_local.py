"""The embedded engine: how containers that are no longer wanted come to their end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from perdure.storage.proxies import USERS_VARIABLES, bypass_proxies
from perdure.training.agent.control import ADDRESS_FILE
from perdure.training.engines import agent_calls
from perdure.training.engines import fleet as fleet_module
from perdure.training.engines.base import Placement, plan, plan_replacement
from perdure.training.engines.fleet import Fleet
from perdure.training.engines.local import LocalEngine
from perdure.training.wire.agent import AgentAddress
from tests.jobs import small_job
from tests.waiting import BEYOND_A_TEST_S, PATIENCE_S, wait_for

GRACE_S = BEYOND_A_TEST_S


@pytest.fixture
def fleet(tmp_path, monkeypatch) -> Iterator[Fleet]:
    for module in (agent_calls, fleet_module):
        monkeypatch.setattr(module, "POLL_TIMEOUT_S", PATIENCE_S)  # all that live answer
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
    by_container = addresses(tmp_path / "home")
    dead, frozen = process_of(by_container["p0001-m0-s1"]), process_of(by_container["p0001-m1-s1"])
    dead.kill()
    frozen.send_signal(signal.SIGSTOP)
    fleet.replace(placement, {0, 1})
    assert not frozen.is_running()
    assert len(fleet.poll().agents) == 2


def test_the_leftovers_of_a_run_are_its_processes_until_they_have_ended(fleet):
    assert fleet.leftovers() == []
    fleet.submit(plan(fleet.nodes(), 2, previous=None, avoid=()))
    assert len(fleet.leftovers()) >= 2, "an agent on each node, and what it has started"
    fleet.cancel(0)
    assert fleet.leftovers() == []


def start_spare(fleet: Fleet, placement: Placement) -> str:
    """Start a spare container. Returns its name."""
    fleet.spare_containers.start(placement, "node-2")
    (name,) = fleet.spare_containers.contacts()
    return name


def test_a_member_takes_the_spare_with_the_processes_in_it(fleet, tmp_path):
    placement = plan(fleet.nodes(), 2, previous=None, avoid=())
    fleet.submit(placement)
    name = start_spare(fleet, placement)
    wait_for(fleet.spare_containers.ready, what="its agent")
    assert fleet.nodes()[0] == "node-2", "preferred where a node is needed"
    agent = fleet.spare_containers.contacts()[name].address
    second, moved = plan_replacement(
        fleet.nodes(), previous=placement, avoid=["node-1"], lost=["node-1"]
    )
    fleet.replace(second, moved)
    assert moved == (1,)
    assert (fleet.spare_containers.contacts(), fleet.misplaced_members(second)) == ({}, frozenset())
    status = fleet.poll().agents[1]
    assert (status.node, status.member, status.schedule_cnt) == ("node-2", 1, 2)
    following = LocalEngine(fleet._job, home=tmp_path / "home", epoch=2)
    assert following.adopt(second) == {0, 1}
    assert following.contacts()[1].address == agent, "also for the next supervisor"


def test_a_spare_that_is_not_ready_gives_its_node_up_to_a_new_container(fleet, tmp_path):
    placement = plan(fleet.nodes(), 2, previous=None, avoid=())
    fleet.submit(placement)
    start_spare(fleet, placement)  # and is not up yet
    second, moved = plan_replacement(
        fleet.nodes(), previous=placement, avoid=["node-1"], lost=["node-1"]
    )
    fleet.replace(second, moved)
    assert fleet.spare_containers.contacts() == {}
    assert set(addresses(tmp_path / "home")) == {"p0001-m0-s1", "p0002-m1-s2"}


def test_a_spare_that_dies_before_it_was_up_is_known_to_be_gone(fleet):
    placement = plan(fleet.nodes(), 2, previous=None, avoid=())
    fleet.submit(placement)
    name = start_spare(fleet, placement)
    assert fleet.spare_containers.contacts()[name].loss is None, "it is about to start"
    for process in fleet._engine._processes.values():
        if "standby" in process.args[-1]:
            process.kill()
            process.wait()
    loss = fleet.spare_containers.contacts()[name].loss
    assert loss is not None
    assert loss.line == "its agent is gone"


def test_the_next_supervisor_finds_the_spare_and_the_end_of_the_run_ends_it(fleet, tmp_path):
    placement = plan(fleet.nodes(), 2, previous=None, avoid=())
    fleet.submit(placement)
    name = start_spare(fleet, placement)
    following = LocalEngine(fleet._job, home=tmp_path / "home", epoch=2)
    following.adopt(placement)
    assert set(following.warm_spares()) == {name}
    following.end()
    assert following.warm_spares() == {}
    assert fleet.leftovers() == []


def test_a_node_has_the_proxy_variables_of_the_user(fleet, tmp_path, monkeypatch):
    for name in ("no_proxy", "NO_PROXY", USERS_VARIABLES):
        monkeypatch.setenv(name, "")  # put back after the test
        monkeypatch.delenv(name)
    users = {"http_proxy": "http://127.0.0.1:9", "NO_PROXY": ".local"}
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    bypass_proxies(os.environ, ("http://127.0.0.1:4200/api",))
    fleet.submit(plan(fleet.nodes(), 2, previous=None, avoid=()))
    environment = process_of(addresses(tmp_path / "home")["p0001-m0-s1"]).environ()
    names = {*users, "no_proxy", USERS_VARIABLES}
    assert {name: environment[name] for name in names & environment.keys()} == users
