"""Real agents in real containers of this machine, as the local engine starts them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from perdure.training.agent.agent import CONFIG_FILE
from perdure.training.agent.control import ADDRESS_FILE, AgentClient
from perdure.training.agent.workers import WorkerGroup
from perdure.training.config.job import Job
from perdure.training.processes import MARKER, container_processes, kill_container
from perdure.training.wire.agent import (
    AgentAddress,
    AgentConfig,
    AgentReply,
    Order,
    StartOrder,
    StatusQuery,
    StopOrder,
)
from perdure.training.wire.agent_status import AgentStatus
from perdure.training.wire.logs import LogsQuery
from tests.jobs import small_job
from tests.waiting import PATIENCE_S, wait_for

TOKEN = "a-token"
EPOCH = 10


def agent_job(folder: Path | None = None, **sections: Any) -> Job:
    """A job whose store lies below a folder; without one, no log is collected.

    Its programs here save nothing, so that no checkpoint server is needed.
    """
    job = {
        "run_id": "run-1",
        "worker": {"recipe": "module:main"},
        "checkpoint": {"host_memory": False},
        "watch": {"log_limit_bytes": 1 << 20 if folder else 0},
    }
    return small_job(folder, **job | sections)


def start_order(folder: Path, *command: str, **changes: Any) -> StartOrder:
    """An order to start a command on two nodes of two slots."""
    fields: dict[str, Any] = {
        "placement": 1,
        "attempt": 1,
        "num_nodes": 2,
        "slots_per_node": 2,
        "hosts": ("127.0.0.1", "127.0.0.2"),
        "master_addr": "127.0.0.1",
        "master_port": 29511,
        "command": command,
        "is_command": False,
        "cwd": str(folder),
        "grace_s": 5,
        "log_path": None,
        "variables": {},
        "job": agent_job(),
        "data_manifest_key": None,
    }
    fields["is_launcher"] = changes.get("is_command", False)
    return StartOrder(**{**fields, **changes})


def agent_config(**changes: Any) -> AgentConfig:
    """Of an agent that is member 1 of its gang and was scheduled for the third time."""
    fields: dict[str, Any] = {
        "run_id": "run-1",
        "node": "node-1",
        "member": 1,
        "schedule_cnt": 3,
        "token": TOKEN,
        "epoch": 0,
        "orphan_timeout_s": 600.0,
        "start_timeout_s": 600.0,
        "hang_timeout_s": None,
        "detect_hangs": True,
    }
    return AgentConfig(**{**fields, **changes})


@dataclass
class Container:
    """A scratch folder and the agent that lives in it."""

    folder: Path
    process: subprocess.Popen[bytes]
    attempts: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def marker(self) -> str:
        return str(self.folder)

    @property
    def address(self) -> AgentAddress:
        text = wait_for(
            lambda: (
                (self.folder / ADDRESS_FILE).exists() and (self.folder / ADDRESS_FILE).read_text()
            )
        )
        return AgentAddress.model_validate_json(text)

    def client(self, *, token: str = TOKEN, epoch: int = EPOCH) -> AgentClient:
        return AgentClient(self.address.host, self.address.port, token, epoch)

    def call(self, order: Order) -> AgentReply:
        return self.client().call(order, timeout_s=PATIENCE_S)

    def status(self) -> AgentStatus:
        status = self.call(StatusQuery()).status
        assert status is not None
        return status

    def order(self, *command: str, **changes: Any) -> StartOrder:
        """A start order of a command, on two nodes, with a number of its own."""
        fields = {
            "placement": 3,
            "attempt": next(self.attempts),
            "is_command": True,
            "grace_s": 0.5,
            "variables": {"OMP_NUM_THREADS": "1"},
            "job": agent_job(),
        }
        return start_order(self.folder, *command, **{**fields, **changes})

    def start(self, *command: str, **changes: Any) -> StartOrder:
        """Start a command. Returns the order."""
        order = self.order(*command, **changes)
        self.call(order)
        return order

    def until(self, *states: str) -> AgentStatus:
        """Wait until the agent is in one of these states."""
        status: AgentStatus = wait_for(lambda: (s := self.status()).state in states and s)
        return status

    def finish(self, *command: str, **changes: Any) -> AgentStatus:
        """Run a command to its end."""
        self.start(*command, **changes)
        return self.until("ended")

    def logs(self) -> dict[str, str]:
        """Text of every log file, by the file's name."""
        logs = self.call(LogsQuery(tail_bytes=1 << 20)).logs
        return {Path(log.path).name: log.text for log in logs}

    def processes(self) -> list[psutil.Process]:
        """Living processes of the container, the agent included."""
        return container_processes(self.marker)


def start_container(folder: Path, environment: dict[str, str], **changes: Any) -> Container:
    """Start an agent that is member 1 of its gang and was scheduled for the third time."""
    config = agent_config(**changes)
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(config.model_dump_json())
    with (folder / "agent.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "perdure.training.agent", str(folder)],
            cwd=folder,
            env={**os.environ, **environment, MARKER: str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return Container(folder, process)


def end_container(container: Container) -> None:
    assert kill_container(container.marker)
    container.process.wait()


@pytest.fixture
def new_container(tmp_path):
    """Starts agents with settings of their own; none outlives the test."""
    containers: list[Container] = []

    def start(environment: dict[str, str] | None = None, **changes: Any) -> Container:
        folder = tmp_path / f"container-{len(containers)}"
        containers.append(start_container(folder, environment or {}, **changes))
        return containers[-1]

    yield start
    for container in containers:
        end_container(container)


@pytest.fixture(scope="module")
def long_lived(tmp_path_factory):
    """An agent that was started by rank 7 of another program."""
    folder = tmp_path_factory.mktemp("agent") / "container"
    with pytest.MonkeyPatch.context() as environment:  # keys, also for stores that never answer
        environment.setenv("AWS_ACCESS_KEY_ID", "id")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "key")
        container = start_container(folder, {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "7"})
        yield container
        end_container(container)


@pytest.fixture
def shared(long_lived):
    """One agent for the tests that leave it alive; nothing runs in it when they begin."""
    yield long_lived
    if not long_lived.status().is_over:
        long_lived.call(StopOrder(grace_s=0))
        long_lived.until("ended")


@pytest.fixture
def new_group(tmp_path):
    """Groups of node 1 of two; none outlives the test."""
    groups: list[WorkerGroup] = []

    def new_group(
        *command: str, oom_kills: Callable[[], int] = lambda: 0, **changes: Any
    ) -> WorkerGroup:
        config = agent_config(schedule_cnt=1, epoch=1, detect_hangs=False)
        order = start_order(tmp_path, *command, **changes)
        # No process carries this marker: nothing but the workers themselves is waited for.
        group = WorkerGroup(config, order, str(tmp_path), tmp_path, tmp_path, oom_kills=oom_kills)
        groups.append(group)
        return groups[-1]

    yield new_group
    for group in groups:
        if group.ranks:
            group.stop(0)
            wait_for(group.poll)
