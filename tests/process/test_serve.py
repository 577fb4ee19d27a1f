"""The pretrain flow served without a work pool, as docs/prefect.md has it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.process.cluster import commands
from tests.process.harness import REPO, Running, Workbench
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.process,
    pytest.mark.prefect,
    pytest.mark.long,
    pytest.mark.timeout(600),
]


SERVE, RUN = commands("Without a work pool")


class Serving:
    """`python -m perdure.flows.serve`, which can be ended and started again."""

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench
        self.start()

    def start(self) -> None:
        with (self._bench.home / "serve.out").open("ab") as log:
            self.process = subprocess.Popen(
                ["bash", "-euc", f"exec {SERVE}"],
                env={**in_shell(self._bench), "PREFECT_RUNNER_POLL_FREQUENCY": "2"},
                cwd=REPO, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def end(self, number: signal.Signals) -> int:
        """End it as an init system does (SIGTERM), or a user at the terminal (SIGINT)."""
        if number is signal.SIGINT:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        return self.process.wait(240)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def serving(bench, api) -> Iterator[Serving]:
    running = Serving(bench)
    wait_for(lambda: "pretrain/served" in bench.prefect("deployment", "ls"))
    yield running
    running.kill()


def run_served(bench: Workbench, job: dict) -> Running:
    path = bench.home / f"{job['run_id']}.yaml"
    path.write_text(yaml.safe_dump(job))
    shell(bench, RUN, JOB=str(path))
    return bench.look(job)


def shell(bench: Workbench, command: str, **env: str) -> None:
    subprocess.run(
        ["bash", "-euc", command], env={**in_shell(bench), **env}, cwd=REPO, check=True, timeout=240
    )


def in_shell(bench: Workbench) -> dict[str, str]:
    """What a user's shell has, with the programs of this environment."""
    return {**bench.environment, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def test_a_served_run_is_suspended_resumed_and_cancelled(bench, serving, api):
    running = run_served(bench, bench.pair("served", steps=2000, env={"PACE_S": "0.3"}))
    running.reach(3)
    api.suspend("served")
    wait_for(lambda: running.history.pause is not None, what="a pause")
    stood_at = running.step()
    api.resume("served")
    running.reach(stood_at + 2)
    wait_for_epoch(running, 2)
    api.cancel("served")
    wait_for(lambda: not running.local.processes(), what="the end of all processes")
    api.wait_for("served", "Cancelled")
    running.leave_nothing()


def wait_for_epoch(running: Running, epoch: int) -> None:
    wait_for(
        lambda: running.history.epoch == epoch, what="the next supervisor",
        period_s=0.5,
    )  # fmt: skip


def test_the_next_one_that_serves_adopts_what_the_one_before_supervised(
    bench, serving, api, undisturbed_pair
):
    running = run_served(bench, bench.pair("left", env={"PACE_S": "2"}))
    running.reach(3)
    workers = {p.pid for rank in (0, 1) for p in running.local.rank(rank)}
    for epoch, number in enumerate((signal.SIGTERM, signal.SIGINT), 2):
        assert serving.end(number) == 0
        assert running.history.ended is None, f"{number.name} ends no training"
        serving.start()
        wait_for_epoch(running, epoch)
    assert {p.pid for rank in (0, 1) for p in running.local.rank(rank)} == workers, "adopted"
    running.pace(0)
    api.wait_for("left", "Completed")
    assert running.curve() == undisturbed_pair
    running.leave_nothing()
