"""What an operator sees after a bad night: everything was killed in turn, and the UI is true.

A deployed run and a schedule train while the flow's process, the worker, the server and a node are
killed, one after the other, for PERDURE_OPERATOR_S seconds; `make soak` takes half an hour.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator

import pytest

from perdure import server
from tests.process.deployment import (
    KEEP_SUPERVISED,
    PRETRAIN,
    kill_supervisor,
    kill_worker,
    start_flow_run,
    start_worker,
    supervising,
    ticking,
    ticks,
)
from tests.process.harness import Running
from tests.process.rest import Api, ask
from tests.process.truth import TERMINAL, assert_true
from tests.waiting import wait_for

DURATION_S = float(os.environ.get("PERDURE_OPERATOR_S", "150"))
PACE_S = 0.3
BACK_S = 200.0  # keep-supervised looks each minute, and a new flow process takes its time
SHORT = "tick-{n}"

pytestmark = [
    pytest.mark.process,
    pytest.mark.prefect,
    pytest.mark.long,
    pytest.mark.timeout(DURATION_S + 1500),
]


class Night:
    """The deployed run, and what is done to it."""

    def __init__(self, running: Running, workers: list, port: int) -> None:
        self.running = running
        self._workers = workers
        self._port = port
        self.killed: list[str] = []

    def kills(self) -> Iterator[Callable[[], None]]:
        """What is killed, in turn, for ever."""
        return itertools.cycle((self.flow, self.worker, self.node, self.server))

    def flow(self) -> None:
        epoch = self.running.history.epoch
        kill_supervisor(self.running)
        what = "the next supervisor"
        wait_for(lambda: self.running.history.epoch > epoch, timeout_s=BACK_S, what=what)
        self.killed.append("flow")

    def worker(self) -> None:
        kill_worker(self._workers[-1])
        self._workers.append(start_worker(self.running.bench))
        self.killed.append("worker")

    def node(self) -> None:
        """A node is lost, and comes back mended."""
        history = self.running.history
        node = history.placements[-1].members[-1].node
        assert self.running.local.kill_node(node)
        wait_for(
            lambda: node in self.running.history.isolated, timeout_s=BACK_S, what="its isolation"
        )
        placements = len(history.placements)
        wait_for(
            lambda: len(self.running.history.placements) > placements,
            timeout_s=BACK_S, what="a placement without it",
        )  # fmt: skip
        self.running.bench.perdure("nodes", self.running.job.run_id, "--release", node)
        self.killed.append("node")

    def server(self) -> None:
        assert server.stop_server()
        time.sleep(5)
        server.start_server(port=self._port)
        self.killed.append("server")

    def settle(self, api: Api) -> None:
        """Wait until the run trains, and its flow run says so."""
        before = self.running.step()
        wait_for(
            lambda: self.running.history.open_attempt is not None
            and self.running.step() >= before + 3,
            timeout_s=BACK_S, what="further steps", period_s=0.5,
        )  # fmt: skip
        wait_for(
            lambda: supervising(api, self.running).state["type"] == "RUNNING",
            timeout_s=BACK_S, what="its flow run to be Running", period_s=1.0,
        )  # fmt: skip


def test_whatever_is_killed_in_turn_the_server_shows_what_the_ledgers_say(
    bench, deployed, api, prefect_server, monkeypatch
):
    monkeypatch.setenv("PERDURE_HOME", str(bench.home))
    deployment = api.deployment(KEEP_SUPERVISED)
    api.set_schedule(deployment, active=True)
    # More than it can do meanwhile, and while the last kill is answered; the rest has no pauses.
    steps = int((DURATION_S + 450) / PACE_S)
    job = bench.apart(
        "night", steps=steps, checkpoint={"every_steps": 20}, env={"PACE_S": str(PACE_S)},
        restart={"pod_retries": 100, "max_restarts": 100, "spare_wait_s": 120},
    )  # fmt: skip
    start_flow_run(api, PRETRAIN, {"job": job})
    night = Night(bench.look(job), deployed, prefect_server.port)
    night.running.reach(3)
    short = bench.pair(SHORT, steps=30, env={"PACE_S": "0.1"})
    until_s = time.monotonic() + DURATION_S
    try:
        with ticking(api, PRETRAIN, {"job": short}, every_s=120) as schedule:
            for kill in night.kills():
                kill()
                night.settle(api)
                if time.monotonic() > until_s and len(night.killed) >= 4:
                    break
            started = ticks(api, schedule)
        night.running.pace(0)
        supervising(api, night.running).wait_for("Completed", timeout_s=600 + DURATION_S / 2)
        states = [one.wait_for_end(timeout_s=300) for one in started]
    finally:
        api.set_schedule(deployment, active=False)
    print(f"killed: {night.killed}; ticks: {[state['name'] for state in states]}")

    assert {"flow", "worker", "node", "server"} <= set(night.killed)
    assert list(night.running.curve()) == list(range(1, steps + 1)), "every step once"
    assert_true(api, night.running)
    assert {state["name"] for state in states} <= {"Completed", "Skipped"}
    trained = [one for one in started if one.state["name"] == "Completed"]
    assert trained, "a schedule goes on through all of it"
    for flow_run in trained:
        tick = bench.look({**short, "run_id": flow_run.facts["name"]})
        assert list(tick.curve()) == list(range(1, 31))
        assert_true(api, tick)
        tick.leave_nothing()
    assert nothing_is_open(api) == []
    night.running.leave_nothing()


def nothing_is_open(api: Api) -> list[str]:
    """Flow runs of pretrain that are not over."""
    body = {"flows": {"name": {"any_": ["pretrain"]}}, "limit": 200}
    found = ask("POST", f"{api.url}/flow_runs/filter", body).json()
    return [
        f"{one['name']}: {one['state_name']}"
        for one in found
        if one["state_type"] not in {*TERMINAL, "SCHEDULED"}
    ]
