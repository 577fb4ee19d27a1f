"""What MindSpore's launcher leaves to the agent, with processes that carry its variables."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from perdure.training.commands.msrun import MsrunGang, MsrunProcess
from perdure.training.processes import MARKER, read_rank
from tests.waiting import wait_for

FAILED = "[ERROR] ME(1:2,MainProcess) Worker process 77 exit with exception. Error code: 1.\n"


class Launched:
    """Processes as msrun starts them, and the gang that watches them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        outputs = [folder / "stdout.log", folder / "stderr.log"]
        for path in outputs:
            path.touch()
        self.gang = MsrunGang(f"msrun-test-{folder}", outputs)

    def start(self, role: str, rank: int, *, command: str = "exec sleep 600") -> subprocess.Popen:
        name = f"worker_{rank}" if role == "MS_WORKER" else "scheduler"
        environment = {
            **os.environ, MARKER: self.gang.marker, "MS_ROLE": role, "RANK_ID": str(rank),
            "MS_NODE_ID": str(rank),
        }  # fmt: skip
        with (self.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                ["/bin/sh", "-c", command], env=environment, stdout=log, start_new_session=True
            )
        self._stack.callback(process.wait)
        self._stack.callback(end_session, process.pid)
        return process

    def poll(self, exits: dict[int, int] | None = None, *, is_joined: bool = True) -> None:
        self.gang._polled_s = float("-inf")
        self.gang.poll(exits or {}, spare=frozenset(), is_joined=is_joined)

    def reported(self) -> str:
        return (self.folder / "stderr.log").read_text()


def end_session(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


@pytest.fixture
def launched(tmp_path) -> Iterator[Launched]:
    with ExitStack() as stack:
        yield Launched(tmp_path, stack)


def test_each_worker_has_its_own_log_and_so_has_the_scheduler(launched, tmp_path):
    launched.start("MS_SCHED", 0)
    for rank in (1, 0):
        launched.start("MS_WORKER", rank, command="sleep 600; true")
    wait_for(lambda: launched.poll() or len(launched.gang.processes) == 3)
    logs = [(process.rank, process.log) for process in launched.gang.logs]
    names = ["worker_0.log", "worker_1.log", "scheduler.log"]
    assert logs == list(zip([0, 1, None], [tmp_path / name for name in names], strict=True))
    assert launched.gang.is_alive


def test_a_worker_that_fails_without_msrun_is_reported_with_its_rank(launched):
    launched.start("MS_WORKER", 0)
    worker = launched.start("MS_WORKER", 1)
    wait_for(lambda: launched.poll(is_joined=False) or len(launched.gang.processes) == 2)
    launched.poll({worker.pid: 0}, is_joined=False)
    assert not launched.gang.has_failed
    launched.poll({worker.pid: -9, 1: 5}, is_joined=False)
    assert launched.gang.has_failed
    assert f"worker 1 of msrun, process {worker.pid}" in launched.reported()
    assert (
        f"Worker process {worker.pid} exit with exception. Error code: -9." in launched.reported()
    )


def test_what_a_worker_has_started_is_no_worker(launched):
    worker = launched.start("MS_WORKER", 0, command="sleep 600; true")
    wait_for(lambda: launched.poll(is_joined=False) or launched.gang.is_alive)
    worker.kill()
    worker.wait()
    launched.poll(is_joined=False)
    assert not launched.gang.is_alive, "although the sleep lives"


@pytest.mark.parametrize("is_joined", [True, False])
def test_workers_whose_scheduler_is_gone_are_ended(is_joined, launched):
    scheduler, worker = launched.start("MS_SCHED", 0), launched.start("MS_WORKER", 0)
    wait_for(lambda: launched.poll(is_joined=is_joined) or len(launched.gang.processes) == 2)
    scheduler.kill()
    scheduler.wait()
    launched.poll(is_joined=is_joined)
    assert worker.wait(60) == -signal.SIGKILL
    assert "the scheduler of msrun has ended" in launched.reported()
    assert launched.gang.has_failed is not is_joined, "msrun itself fails, where it is there"


@pytest.mark.parametrize("has_failed", [True, False])
def test_a_scheduler_is_ended_only_where_msrun_has_reported_a_failure(has_failed, launched):
    scheduler, worker = launched.start("MS_SCHED", 0), launched.start("MS_WORKER", 0)
    wait_for(lambda: launched.poll() or len(launched.gang.processes) == 2)
    (launched.folder / "stdout.log").write_text(FAILED if has_failed else "step 5\n")
    worker.kill()
    worker.wait()
    launched.poll()
    if has_failed:
        assert scheduler.wait(60) == -signal.SIGKILL
    else:
        assert scheduler.poll() is None


def test_the_scheduler_is_no_rank_although_msrun_gives_it_a_number():
    assert read_rank({"MS_ROLE": "MS_SCHED", "RANK_ID": "0"}) == (None, None)
    assert read_rank({"MS_ROLE": "MS_WORKER", "RANK_ID": "1", "DEVICE_ID": "1"}) == (1, 1)
    assert read_rank({"MS_ROLE": "MS_WORKER", "MS_NODE_ID": "3"}) == (3, None)


def looked_at(monkeypatch, gang: MsrunGang, times: list[float], *, left_s: float) -> list[float]:
    """The times of a clock at which /proc is read; the launcher lives until `left_s`."""
    looks: list[float] = []
    clock = [0.0]

    def look(*_: object, **__: object) -> list[psutil.Process]:
        looks.append(clock[0])
        return []

    monkeypatch.setattr("perdure.training.commands.msrun.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("perdure.training.commands.msrun.container_processes", look)
    for now_s in times:
        clock[0] = now_s
        gang.poll({}, spare=frozenset(), is_joined=now_s < left_s)
    return looks


def test_another_launcher_is_looked_at_ever_less_often(monkeypatch):
    gang = MsrunGang("none", [])
    looks = looked_at(monkeypatch, gang, [n / 2 for n in range(80)], left_s=99)
    assert looks == [0, 2, 6, 14, 22, 30, 38]


def test_a_launcher_that_has_just_ended_is_looked_at_once_more(monkeypatch):
    gang = MsrunGang("none", [])
    looks = looked_at(monkeypatch, gang, [0, 2, 6, 14, 15, 15.5, 16, 22], left_s=15.5)
    assert looks == [0, 2, 6, 14, 15.5]


def test_processes_of_msrun_are_looked_at_each_second(monkeypatch):
    gang = MsrunGang("none", [], {7: MsrunProcess(7, None, None)})
    assert looked_at(monkeypatch, gang, [0, 0.5, 1, 2, 2.5, 3], left_s=99) == [0, 1, 2, 3]
