"""A rank whose chip had a fault gets a new process: a real agent, and a stand-in for the driver."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perdure.training.recovery.healing import HealPlan
from perdure.training.recovery.protocol import GiveUp, NotReplaced, ReplaceWorker, WorkerEnded
from perdure.training.wire.agent import StopOrder
from perdure.training.wire.agent_status import WorkerStatus
from perdure.training.wire.coordinator import AgentJoined, NodeSampled
from tests.unit.agent.conftest import Container, agent_job, end_container, start_container
from tests.unit.agent.coordinator_end import CoordinatorEnd
from tests.unit.telemetry.driver_tools import SAMPLES, install
from tests.waiting import wait_for

START_TIMEOUT_S = 240.0  # the fork server imports torch, on a machine that may have much else to do
CHECK = HealPlan("80E01801", (1,), may_reset=False, wait_s=0.0)
RECIPE = """
import time

def main(job):
    print("up", flush=True)
    time.sleep(600)
"""
# Alarm while there is a file `ill`; while there is a file `hold`, no answer.
NPU_SMI = """case "$*" in
info) cat {samples}/npu-smi-info.txt ;;
*health*)
  touch {folder}/asked
  while [ -e {folder}/hold ]; do sleep 0.02; done
  [ -e {folder}/ill ] && alarm=-alarm
  cat {samples}/npu-smi-health$alarm.txt ;;
*ecc*) cat {samples}/npu-smi-ecc.txt ;;
set*) touch {folder}/was-reset ;;
esac"""


@pytest.fixture(scope="module")
def tools(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tools")
    install(folder, "npu-smi", NPU_SMI.format(samples=SAMPLES, folder=folder))
    return folder


@pytest.fixture(scope="module")
def container(tmp_path_factory, tools) -> Iterator[Container]:
    """One agent for all tests here, with the driver's tool."""
    folder = tmp_path_factory.mktemp("agent") / "container"
    container = start_container(folder, {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"})
    (folder / "own.py").write_text(RECIPE)
    yield container
    end_container(container)


@dataclass
class Attempt:
    """Two ranks, 2 and 3, of which the coordinator may have one replaced."""

    container: Container
    coordinator: CoordinatorEnd
    tools: Path

    def replace(self, check: HealPlan | None, *, generation: int = 2) -> None:
        self.coordinator.send(ReplaceWorker(rank=3, generation=generation, check=check))

    def replace_slowly(self) -> None:
        """Have a check begin that goes on until `hold` is gone."""
        (self.tools / "asked").unlink(missing_ok=True)
        (self.tools / "hold").touch()
        self.replace(CHECK)
        wait_for((self.tools / "asked").exists)

    def worker(self) -> WorkerStatus:
        """The one that is replaced."""
        return self.container.status().workers[1]

    def until(self, condition: Callable[[WorkerStatus], bool]) -> WorkerStatus:
        def look() -> WorkerStatus | None:
            worker = self.worker()
            return worker if condition(worker) else None

        status: WorkerStatus = wait_for(look)
        return status

    def logged(self) -> str:
        return (self.container.folder / "agent.log").read_text()

    def names(self) -> list[str]:
        return [process.name() for process in self.container.processes()]


@pytest.fixture
def attempt(container, tools) -> Iterator[Attempt]:
    for name in ("ill", "hold"):
        (tools / name).unlink(missing_ok=True)
    end = CoordinatorEnd()
    job: dict[str, Any] = {
        "worker": {"recipe": "own:main"},
        "engine": {"nodes": 2, "slots_per_node": 2},
        "batch": {"global_batch_size": 8, "micro_batch_size": 1},
        "watch": {"log_limit_bytes": 0, "sample_every_s": 600},
    }
    container.start("unused", is_command=False, job=agent_job(**job), coordinator=end.address)
    wait_for(
        lambda: sum("up\n" in text for text in container.logs().values()) == 2,
        timeout_s=START_TIMEOUT_S,
    )
    assert isinstance(end.receive(), AgentJoined)
    assert isinstance(end.receive(), NodeSampled)  # which asks the driver, too: the only one
    yield Attempt(container, end, tools)
    (tools / "hold").unlink(missing_ok=True)
    if not container.status().is_over:
        container.call(StopOrder(grace_s=0))
        container.until("ended")
    end.close()


def test_a_rank_on_a_chip_that_is_well_gets_its_new_process(attempt):
    previous = attempt.worker()
    (attempt.tools / "asked").unlink(missing_ok=True)
    attempt.replace(CHECK)
    replaced = attempt.until(lambda status: status.pid != previous.pid)
    assert (attempt.tools / "asked").exists()
    assert (replaced.is_recovering, replaced.exit_code) == (False, None)
    assert not (attempt.tools / "was-reset").exists()
    wait_for(lambda: attempt.container.logs()["rank-00003.stdout.log"] == "up\nup\n")


def test_a_rank_on_a_chip_that_is_ill_is_not_replaced_and_the_attempt_ends(attempt):
    previous = attempt.worker()
    (attempt.tools / "ill").touch()
    attempt.replace(CHECK)
    report = attempt.coordinator.receive()
    assert isinstance(report, NotReplaced)
    assert report.rank == 3
    assert "node-1 cannot be used after" in report.why
    assert "8C03A000" in report.why
    assert f"rank 3 is not replaced: {report.why}" in attempt.logged()
    assert not (attempt.tools / "was-reset").exists(), "the other rank lives"
    assert attempt.worker().is_recovering, "until the coordinator answers"
    attempt.coordinator.send(GiveUp(why="process_replace: the last one failed"))
    status = attempt.container.until("ended")
    assert status.workers[1].pid == previous.pid
    assert attempt.container.logs()["rank-00003.stdout.log"] == "up\n"


def test_a_rank_that_software_ended_is_replaced_although_the_chip_would_be_found_ill(attempt):
    previous = attempt.worker()
    (attempt.tools / "ill").touch()
    (attempt.tools / "asked").unlink(missing_ok=True)
    (victim,) = [
        process for process in attempt.container.processes() if process.pid == previous.pid
    ]
    victim.kill()
    assert isinstance(attempt.coordinator.receive(), WorkerEnded)
    attempt.replace(None)
    attempt.until(lambda status: status.pid != previous.pid and not status.is_recovering)
    assert not (attempt.tools / "asked").exists()


def test_the_agent_answers_while_a_chip_is_checked(attempt):
    previous = attempt.worker()
    attempt.replace_slowly()
    for _ in range(3):
        status = attempt.container.status()  # the check goes on until `hold` is gone
        first, second = status.workers
        assert status.state == "running"
        assert (first.exit_code, first.is_recovering) == (None, False)
        assert (second.pid, second.is_recovering) == (previous.pid, True)
    (attempt.tools / "hold").unlink()
    attempt.until(lambda status: status.pid != previous.pid and not status.is_recovering)


@pytest.mark.parametrize("end", ["stopped", "given up"])
def test_an_attempt_that_is_over_before_the_check_is_starts_nothing(attempt, end):
    previous = attempt.worker()
    attempt.replace_slowly()
    if end == "stopped":
        attempt.container.call(StopOrder(grace_s=60))
    else:
        attempt.coordinator.send(GiveUp(why="another fault"))
    status = attempt.container.until("ended")
    assert status.workers[1].pid == previous.pid
    (attempt.tools / "hold").unlink()
    time.sleep(1.0)  # far longer than a check of this machine takes to go on
    assert not {"rank-2", "rank-3"} & set(attempt.names())
    assert attempt.container.status().workers[1].pid == previous.pid
    assert attempt.container.logs()["rank-00003.stdout.log"] == "up\n"


def test_the_order_that_came_last_decides_which_process_is_started(attempt):
    previous = attempt.worker()
    attempt.replace_slowly()
    attempt.replace(None, generation=3)
    replaced = attempt.until(lambda status: status.pid != previous.pid and not status.is_recovering)
    (attempt.tools / "hold").unlink()
    time.sleep(1.0)  # likewise
    assert attempt.worker().pid == replaced.pid
