"""The deployments of prefect.yaml on a real server, a worker that serves them, and their flow runs.

What tests of the supervision plane have in common: deploy, serve, start, schedule, kill, and read
what became of each flow run, by its id.
"""

from __future__ import annotations

import datetime as dt
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.process.harness import REPO, Running, Workbench
from tests.process.rest import Api
from tests.waiting import PATIENCE_S, wait_for

POOL = "perdure"
PRETRAIN = "pretrain/local"
KEEP_SUPERVISED = "keep-supervised/local"
RETENTION = "checkpoint-retention/local"
BACKLOG_S = 600.0  # a process for each tick, all at once, and a training


def start_worker(bench: Workbench) -> subprocess.Popen[bytes]:
    """A worker in a session of its own, which looks for work every two seconds."""
    log = (bench.home / "worker.out").open("ab")
    process = subprocess.Popen(
        [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL],
        env={**bench.environment, "PREFECT_WORKER_QUERY_SECONDS": "2"},
        cwd=REPO, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip
    log.close()
    return process


def kill_worker(worker: subprocess.Popen[bytes]) -> None:
    """SIGKILL a worker alone; its flow processes have sessions of their own."""
    if worker.poll() is None:
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def deploy(bench: Workbench, api: Api) -> None:
    """`prefect deploy` of all that is for one machine, with schedules off."""
    bench.prefect("work-pool", "create", POOL, "--type", "process", "--overwrite")
    bench.prefect("--no-prompt", "deploy", "--name", "local")
    set_schedules_off(api)


def set_schedules_off(api: Api) -> None:
    """No tick comes in the middle of a test."""
    for name in (RETENTION, KEEP_SUPERVISED):
        api.set_schedule(api.deployment(name), active=False)


class FlowRun:
    """One flow run, by its id: what it shows, and what is done to it."""

    def __init__(self, api: Api, flow_run_id: str) -> None:
        self._path = f"flow_runs/{flow_run_id}"
        self._api = api
        self.id = flow_run_id

    @property
    def facts(self) -> dict[str, Any]:
        """All that the server has of it."""
        found: dict[str, Any] = self._api.ask("GET", self._path).json()
        return found

    @property
    def state(self) -> dict[str, Any]:
        """Its state."""
        state: dict[str, Any] = self.facts["state"]
        return state

    @property
    def due(self) -> str:
        """When it was to start."""
        due: str = self.facts["expected_start_time"]
        return due

    @property
    def states(self) -> list[str]:
        """Names of all its states, oldest first."""
        path = f"flow_run_states/?flow_run_id={self.id}"
        found = sorted(self._api.ask("GET", path).json(), key=lambda state: state["timestamp"])
        return [state["name"] for state in found]

    @property
    def logs(self) -> str:
        """What it has logged."""
        wanted = {"flow_run_id": {"any_": [self.id]}}
        body = {"logs": wanted, "limit": 200, "sort": "TIMESTAMP_ASC"}
        found = self._api.ask("POST", "logs/filter", body).json()
        return "\n".join(log["message"] for log in found)

    def set_state(self, kind: str, name: str | None = None) -> None:
        """What the UI or an automation does."""
        body = {"state": {"type": kind, "name": name or kind.capitalize()}, "force": True}
        self._api.ask("POST", f"{self._path}/set_state", body)

    def delete(self) -> None:
        """What the UI's delete button does."""
        self._api.ask("DELETE", self._path)

    def wait_for(self, name: str, *, timeout_s: float = PATIENCE_S) -> None:
        """Wait until its state has that name."""
        what = f"state {name} of flow run {self.id}"
        wait_for(lambda: self.state["name"] == name, timeout_s=timeout_s, what=what, period_s=0.5)

    def wait_for_end(self, *, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait until it is over. Returns its state."""
        over = ("COMPLETED", "FAILED", "CANCELLED")
        what = f"the end of flow run {self.id}"
        wait_for(lambda: self.state["type"] in over, timeout_s=timeout_s, what=what, period_s=0.5)
        return self.state


def start_flow_run(api: Api, deployment: str, parameters: Mapping[str, Any]) -> FlowRun:
    """What `prefect deployment run` does."""
    path = f"deployments/{api.deployment(deployment)['id']}/create_flow_run"
    return FlowRun(api, api.ask("POST", path, {"parameters": dict(parameters)}).json()["id"])


def supervising(api: Api, running: Running) -> FlowRun:
    """The flow run that has last taken a run."""
    taker = running.history.supervisor
    assert taker is not None
    assert taker.flow_run is not None
    return FlowRun(api, taker.flow_run)


def kill_supervisor(running: Running) -> None:
    """SIGKILL the process that supervises a deployed run."""
    taker = running.history.supervisor
    assert taker is not None
    os.kill(taker.pid, signal.SIGKILL)


@contextmanager
def ticking(
    api: Api, deployment: str, parameters: Mapping[str, Any], *, every_s: int, in_s: float = 6
) -> Iterator[str]:
    """A schedule with an interval, as a user makes one in the UI; its id."""
    first = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=in_s)
    interval = {
        "interval": every_s, "anchor_date": first.isoformat(), "timezone": "Asia/Shanghai"
    }  # fmt: skip
    body = [{"schedule": interval, "active": True, "parameters": dict(parameters)}]
    path = f"deployments/{api.deployment(deployment)['id']}/schedules"
    (made,) = api.ask("POST", path, body).json()
    try:
        yield made["id"]
    finally:
        api.ask("DELETE", f"{path}/{made['id']}")


def ticks(api: Api, schedule: str) -> list[FlowRun]:
    """The flow runs of a schedule that have been started, in the order of their ticks."""
    body = {"sort": "EXPECTED_START_TIME_ASC", "limit": 200}
    found = api.ask("POST", "flow_runs/filter", body).json()
    return [
        FlowRun(api, one["id"])
        for one in found
        if (one["created_by"] or {}).get("id") == schedule and one["state_type"] != "SCHEDULED"
    ]


def due_ticks(api: Api, schedule: str) -> list[dict[str, Any]]:
    """The flow runs of a schedule that are due, by the time at which they were."""
    now = dt.datetime.now(dt.UTC).isoformat()
    due = {"flow_runs": {"expected_start_time": {"before_": now}}}
    body = {**due, "sort": "EXPECTED_START_TIME_DESC", "limit": 200}  # the newest 200
    flow_runs = reversed(api.ask("POST", "flow_runs/filter", body).json())
    return [facts for facts in flow_runs if (facts["created_by"] or {}).get("id") == schedule]


def stop_schedule(api: Api, deployment: str, schedule: str) -> None:
    """Switch a schedule off, as in the UI."""
    path = f"deployments/{api.deployment(deployment)['id']}/schedules/{schedule}"
    api.ask("PATCH", path, {"active": False})


def open_ticks(api: Api, schedule: str) -> list[str]:
    """The names of due ticks that are not over."""
    over = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")
    ticks_due = due_ticks(api, schedule)
    return [facts["name"] for facts in ticks_due if facts["state_type"] not in over]


def train_backlog(
    bench: Workbench, api: Api, workers: list[subprocess.Popen[bytes]], job: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Have six ticks of a user's schedule come due without a worker, then start one.

    Returns:
        The flow runs of the ticks once all are over, oldest first.
    """
    kill_worker(workers.pop())
    with ticking(api, PRETRAIN, {"job": job}, every_s=1, in_s=1) as schedule:
        wait_for(lambda: len(due_ticks(api, schedule)) >= 6, what="a backlog")
        stop_schedule(api, PRETRAIN, schedule)
        workers.append(start_worker(bench))
        wait_for(
            lambda: not open_ticks(api, schedule),
            timeout_s=BACKLOG_S, what="the end of all ticks", period_s=0.5,
        )  # fmt: skip
        return due_ticks(api, schedule)
