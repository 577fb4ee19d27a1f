"""Orders of a drill to kill something: by real agents, one of them the first process of a pod."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from perdure.training.agent.agent import CONFIG_FILE
from perdure.training.agent.control import ADDRESS_FILE, AgentClient
from perdure.training.config.drill import Victim
from perdure.training.errors import AgentUnreachable, EngineError
from perdure.training.injection.victims import parts_of, processes_of
from perdure.training.processes import MARKER, kill_container
from perdure.training.wire.agent import AgentAddress, KillOrder, StatusQuery
from tests.unit.agent.conftest import TOKEN, Container, agent_config
from tests.waiting import wait_for

SLEEPER = "import time; time.sleep(600)"
RANKS = (sys.executable, "-c", SLEEPER)


def start_ranks(container: Container) -> list[int]:
    """Two ranks, each in a process of its own. Their pids."""
    container.start(*RANKS, is_launcher=False)
    return [worker.pid for worker in container.until("running").workers]


def test_an_agent_kills_nothing_on_an_order_unless_its_run_is_a_drill(new_container):
    container = new_container()
    pids = start_ranks(container)
    for victim in Victim:
        with pytest.raises(EngineError, match="the run is no drill"):
            container.call(KillOrder(victim=victim, rank=2))
    assert all(psutil.pid_exists(pid) for pid in pids)
    assert container.status().state == "running"


def test_of_two_ranks_the_one_that_is_meant_is_killed_and_no_other_node_has_it(new_container):
    container = new_container(is_drill=True)
    first, second = start_ranks(container)  # ranks 2 and 3: it is the second node of two
    assert container.call(KillOrder(victim=Victim.RANK, rank=0)).num_killed == 0
    assert container.call(KillOrder(victim=Victim.RANK, rank=3)).num_killed == 1
    ended = container.until("ended")
    codes = {worker.pid: worker.exit_code for worker in ended.workers}
    assert codes[second] == -9
    assert ended.workers[0].pid == first
    assert ended.workers[0].stopped_by_agent


def test_a_node_that_is_lost_on_an_order_leaves_no_process(new_container):
    container = new_container(is_drill=True)
    start_ranks(container)
    assert container.call(KillOrder(victim=Victim.NODE)).num_killed == 1
    container.process.wait(240)
    assert container.processes() == []
    with pytest.raises(AgentUnreachable):
        container.call(StatusQuery())


def test_an_agent_that_is_killed_on_an_order_leaves_its_workers_behind(new_container):
    container = new_container(is_drill=True)
    pids = start_ranks(container)
    assert container.call(KillOrder(victim=Victim.AGENT)).num_killed == 1
    assert container.process.wait(240) == 137
    assert {process.pid for process in container.processes()} >= set(pids)


@pytest.fixture
def pod(tmp_path) -> Iterator[Path]:
    """The folder of an agent that is the first process of a namespace, as in a pod."""
    if os.geteuid() != 0:
        pytest.skip("needs root for a PID namespace")
    folder = tmp_path / "pod"
    folder.mkdir()
    (folder / CONFIG_FILE).write_text(agent_config(is_drill=True).model_dump_json())
    process = subprocess.Popen(
        [
            *("unshare", "--pid", "--fork", "--mount-proc", "--kill-child"),
            *(sys.executable, "-m", "perdure.training.agent", str(folder)),
        ],
        env={**os.environ, MARKER: str(folder)},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    yield folder
    assert kill_container(str(folder))
    process.wait()


def client_of(folder: Path) -> AgentClient:
    """Waits for the agent; the pid in its address is that of its own namespace."""
    file = folder / ADDRESS_FILE
    wait_for(file.exists, what="the agent")
    address = AgentAddress.model_validate_json(file.read_text(encoding="utf-8"))
    assert address.pid == 1
    return AgentClient(address.host, address.port, TOKEN, agent_config().epoch)


def first_process(folder: Path) -> psutil.Process:
    processes = parts_of(Victim.AGENT, lambda marker: marker == str(folder))
    (agent,) = (process for process in processes if process.name() != "unshare")
    return agent


def other_processes(folder: Path, first: psutil.Process) -> list[str]:
    processes = processes_of(lambda marker: marker == str(folder))
    return [
        process.name() for process in processes if process != first and process.name() != "unshare"
    ]


@pytest.mark.parametrize("by", ["an order", "a worker"])
def test_a_pod_whose_node_is_lost_runs_on_and_answers_nobody(pod, by):
    client, agent = client_of(pod), first_process(pod)
    helper = SLEEPER
    inside = ["nsenter", "--target", str(agent.pid), "--pid", "--mount"]
    environment = {**os.environ, MARKER: str(pod)}
    if by == "a worker":
        # SIGKILL from within would not reach the first process.
        module = "perdure.training.injection.inside"
        helper = f"from {module} import lose_this_node; lose_this_node({str(pod)!r})"
    worker = subprocess.Popen([*inside, sys.executable, "-c", helper], env=environment)
    if by == "an order":
        assert client.call(KillOrder(victim=Victim.NODE)).num_killed == 1
    worker.wait(240)
    wait_for(lambda: not other_processes(pod, agent), what="the end of all but the first")
    assert agent.is_running()
    assert "perdure.training.injection.lost_node" in agent.cmdline()
    with pytest.raises(AgentUnreachable):
        client.call(StatusQuery(), timeout_s=2)


def test_the_agent_of_a_pod_takes_all_of_it_along(pod):
    client, agent = client_of(pod), first_process(pod)
    assert client.call(KillOrder(victim=Victim.AGENT)).num_killed == 1
    wait_for(lambda: not agent.is_running(), what="the end of the agent")
    wait_for(
        lambda: not processes_of(lambda marker: marker == str(pod)), what="the end of the pod",
    )  # fmt: skip
