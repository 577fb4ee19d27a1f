"""What an operator sees after a bad night: everything was broken in turn, and the UI is true.

In a shell with a proxy that refuses, a deployed run and a schedule train for PERDURE_OPERATOR_S
seconds, half an hour in `make soak`. Meanwhile the flow's process, the worker, the server and a
node are killed, a scratch disk fills, and ticks of a schedule wait for a worker, one after the
other.
"""

from __future__ import annotations

import itertools
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from perdure.training.recovery.faults import NODE_UNWRITABLE
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
    train_backlog,
)
from tests.process.harness import Running, Workbench
from tests.process.offices import DenyingProxy, denying_proxy, proxy_variables
from tests.process.rest import Api, ask
from tests.process.small_disk import NOT_HERE, fill, make_room, small_disk
from tests.process.truth import TERMINAL, assert_true
from tests.waiting import wait_for

DURATION_S = float(os.environ.get("PERDURE_OPERATOR_S", "150"))
PACE_S = 0.3
BACK_S = 400.0  # keep-supervised looks each minute, and a new flow process takes its time
SHORT = "tick-{n}"
DRILLS = frozenset({"flow", "worker", "node", "server", "disk", "backlog"})

pytestmark = [
    pytest.mark.process,
    pytest.mark.prefect,
    pytest.mark.long,
    pytest.mark.timeout(DURATION_S + 1500),
]


@pytest.fixture(scope="module", autouse=True)
def office(bench: Workbench) -> Iterator[DenyingProxy]:
    """The shell of an office, after the lines that `perdure server start` prints."""
    before = dict(bench.env)
    with denying_proxy() as proxy:
        bench.env.update(proxy_variables(proxy.url))
        lines = bench.perdure("server", "start").splitlines()
        exported = " ".join(line for line in lines if line.startswith("export "))
        variables = (word.split("=", 1) for word in shlex.split(exported) if "=" in word)
        bench.env.update(dict(variables))
        yield proxy
    bench.env.clear()
    bench.env.update(before)


@pytest.fixture
def small_disks(bench: Workbench) -> Iterator[Mapping[str, Path]]:
    """The scratch folders of the night's nodes, each on a small disk of its own."""
    folders = {f"node-{n}": bench.home / "runs" / "night" / "nodes" / f"node-{n}" for n in range(4)}
    with ExitStack() as stack:
        if not all(stack.enter_context(small_disk(f, size="64m")) for f in folders.values()):
            pytest.skip(NOT_HERE)
        yield folders


class Night:
    """The deployed run, and what is done to it."""

    def __init__(
        self, running: Running, api: Api, workers: list[Any], disks: Mapping[str, Path]
    ) -> None:
        self.running = running
        self._api = api
        self._workers = workers
        self._disks = disks
        self.drills: list[str] = []
        self.proxies: dict[str, str | None] = {}

    def next_drills(self) -> Iterator[Callable[[], None]]:
        """What is broken, in turn, for ever."""
        return itertools.cycle(
            (self.flow, self.disk, self.worker, self.node, self.backlog, self.server)
        )

    def flow(self) -> None:
        epoch = self.running.history.epoch
        kill_supervisor(self.running)
        what = "the next supervisor"
        wait_for(lambda: self.running.history.epoch > epoch, timeout_s=BACK_S, what=what)
        self.drills.append("flow")

    def worker(self) -> None:
        kill_worker(self._workers[-1])
        self._workers.append(start_worker(self.running.bench))
        self.drills.append("worker")

    def node(self) -> None:
        """A node is lost, and comes back mended."""
        node = self._nodes()[-1]
        assert self.running.local.kill_node(node)
        wait_for(
            lambda: node in self.running.history.isolated, timeout_s=BACK_S, what="its isolation"
        )
        self._wait_until_left(node)
        self._release(node)
        self.drills.append("node")

    def disk(self) -> None:
        """A node's scratch disk is full when all ranks have to start again; then there is room."""
        node = self._nodes()[-1]
        before = self._unwritable()
        fill(self._disks[node])
        for rank in (0, 1):  # a single one would be replaced, with the state of the other
            assert self.running.local.kill_rank(rank)
        wait_for(
            lambda: len(self._unwritable()) > len(before),
            timeout_s=BACK_S, what="a fault that names the disk",
        )  # fmt: skip
        assert self._unwritable()[-1] == node
        self._wait_until_left(node)
        make_room(self._disks[node])
        self._release(node)
        self.drills.append("disk")

    def _nodes(self) -> list[str]:
        return [member.node for member in self.running.history.placements[-1].members]

    def _wait_until_left(self, node: str) -> None:
        """Wait for a placement without a node; it is a new one, or has a new member."""
        wait_for(
            lambda: node not in self._nodes(),
            timeout_s=BACK_S, what=f"a placement without {node}",
        )  # fmt: skip

    def _release(self, node: str) -> None:
        self.running.bench.perdure("nodes", self.running.job.run_id, "--release", node)

    def _unwritable(self) -> list[str | None]:
        """The nodes of the faults that named a disk that takes no files."""
        ends = [view.ended for view in self.running.history.attempts if view.ended is not None]
        faults = [end.fault for end in ends if end.fault is not None]
        return [fault.node for fault in faults if fault.code == NODE_UNWRITABLE]

    def backlog(self) -> None:
        """Ticks of a schedule come due while no worker is there: one of them trains."""
        name = f"backlog-{len(self.drills)}-{{date}}-{{time}}"
        job = self.running.bench.pair(name, steps=4, env={"PACE_S": "0"})
        ended = train_backlog(self.running.bench, self._api, self._workers, job)
        trained = [facts["name"] for facts in ended if facts["state_type"] == "COMPLETED"]
        assert trained == [ended[-1]["name"]]
        self.drills.append("backlog")

    def server(self) -> None:
        """The server is stopped, and started again in the same shell."""
        bench = self.running.bench
        assert bench.perdure("server", "stop").strip() == "stopped"
        time.sleep(5)
        port = str(httpx.URL(bench.api_url).port)
        assert bench.api_url in bench.perdure("server", "start", "--port", port)
        self.drills.append("server")

    def look_at_proxies(self) -> None:
        """Note which proxy the processes of the run have in their environment."""
        supervisor = self.running.history.supervisor
        assert supervisor is not None
        processes = {"supervisor": psutil.Process(supervisor.pid)}
        processes |= {f"rank {n}": self.running.local.rank(n)[0] for n in range(2)}
        for name, process in processes.items():
            self.proxies[name] = process.environ().get("http_proxy")

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


def test_whatever_is_broken_in_turn_the_server_shows_what_the_ledgers_say(
    bench, office, deployed, api, small_disks
):
    deployment = api.deployment(KEEP_SUPERVISED)
    api.set_schedule(deployment, active=True)
    # More than it can do meanwhile, and while the last drill is answered; the rest has no pauses.
    steps = int((DURATION_S + 700) / PACE_S)
    job = bench.apart(
        "night", steps=steps, checkpoint={"every_steps": 20}, env={"PACE_S": str(PACE_S)},
        # Two spares: on a busy machine an agent may be silent for long enough to count as lost.
        engine={"nodes": 2, "slots_per_node": 1, "spares": 2, "grace_s": 10},
        restart={"pod_retries": 100, "max_restarts": 100, "spare_wait_s": 120},
    )  # fmt: skip
    start_flow_run(api, PRETRAIN, {"job": job})
    night = Night(bench.look(job), api, deployed, small_disks)
    night.running.reach(3)
    night.look_at_proxies()
    short = bench.pair(SHORT, steps=30, env={"PACE_S": "0.1"})
    until_s = time.monotonic() + DURATION_S
    try:
        with ticking(api, PRETRAIN, {"job": short}, every_s=120) as schedule:
            for drill in night.next_drills():
                drill()
                night.settle(api)
                if time.monotonic() > until_s and set(night.drills) >= DRILLS:
                    break
            started = ticks(api, schedule)
        night.running.pace(0)
        supervising(api, night.running).wait_for("Completed", timeout_s=600 + DURATION_S / 2)
        states = [one.wait_for_end(timeout_s=300) for one in started]
    finally:
        api.set_schedule(deployment, active=False)
    print(f"drills: {night.drills}; ticks: {[state['name'] for state in states]}")

    assert set(night.drills) >= DRILLS
    assert set(night.proxies.values()) == {office.url}
    assert office.requested == [], "no address of this machine is reached through a proxy"
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
