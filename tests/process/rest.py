"""The REST API of a Prefect server, as its UI uses it."""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from typing import Any

import httpx

from tests.waiting import PATIENCE_S, wait_for

BUSY_S = 240.0


def ask(method: str, url: str, body: Any = None, *, auth: str = "") -> httpx.Response:
    """One request. A server that has too much to do, SQLite's lock for one, is asked again.

    Args:
        auth: the server's auth string, name:password.

    Raises:
        httpx.HTTPStatusError: it refuses.
    """
    deadline_s = time.monotonic() + BUSY_S
    name, _, password = auth.partition(":")
    given = (name, password) if auth else None
    while True:
        answer = httpx.request(method, url, json=body, timeout=240, auth=given)
        if not answer.is_server_error or time.monotonic() > deadline_s:
            return answer.raise_for_status()
        time.sleep(0.5)


class Api:
    """What tests look at and do, by the names of runs and deployments."""

    def __init__(self, url: str, *, auth: str = "") -> None:
        self.url = url
        self._auth = auth

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """One request to a path below the API's address."""
        return ask(method, f"{self.url}/{path}", body, auth=self._auth)

    def flow_runs(self, name: str) -> list[dict]:
        body = {"flow_runs": {"name": {"any_": [name]}}, "sort": "EXPECTED_START_TIME_DESC"}
        return self._found("flow_runs", body)

    def state(self, name: str) -> str:
        found = self.flow_runs(name)
        return found[0]["state"]["name"] if found else "none"

    def wait_for(self, name: str, state: str, *, timeout_s: float = PATIENCE_S) -> None:
        what = f"{name} in state {state}"
        wait_for(lambda: self.state(name) == state, timeout_s=timeout_s, what=what)

    def task_runs(self, name: str) -> dict[str, str]:
        # A task run whose first state has not been recorded yet has none.
        found = {task["name"]: task["state"] for task in self._task_runs(name)}
        return {name: state["name"] for name, state in found.items() if state}

    def wait_for_tasks(self, name: str, expected: dict[str, str]) -> None:
        """Until task runs of the newest flow run of a name are in these states.

        Clients send states as events, so that the last ones can come after the end of the flow.
        """
        with contextlib.suppress(AssertionError):
            wait_for(
                lambda: expected.items() <= self.task_runs(name).items(),
                timeout_s=BUSY_S,
                period_s=0.5,
            )
        found = self.task_runs(name)
        assert {task: found.get(task) for task in expected} == expected

    def task_run_ids(self, name: str) -> dict[str, str]:
        return {task["name"]: task["id"] for task in self._task_runs(name)}

    def tags(self, name: str) -> dict[str, list[str]]:
        """Of the task runs of the newest flow run of a name."""
        return {task["name"]: task["tags"] for task in self._task_runs(name)}

    def _task_runs(self, name: str) -> list[dict]:
        run_id = self.flow_runs(name)[0]["id"]
        body = {"flow_runs": {"id": {"any_": [run_id]}}, "limit": 200}
        return self._found("task_runs", body)

    def artifacts(self, prefix: str) -> dict[str, dict]:
        body = {"artifacts": {"key": {"like_": prefix}}, "limit": 200}
        found = self._found("artifacts/latest", body)
        return {artifact["key"]: artifact for artifact in found}

    def logs(self, name: str) -> list[str]:
        """What the newest flow run of a name has logged, oldest first."""
        wanted = {"flow_run_id": {"any_": [self.flow_runs(name)[0]["id"]]}}
        found = self._found("logs", {"logs": wanted, "limit": 200, "sort": "TIMESTAMP_ASC"})
        return [log["message"] for log in found]

    def wait_for_events(self, name: str, kind: str, *, count: int) -> list[dict]:
        """A run's events of a kind, once so many are on record: a server writes every 5 s."""
        what = f"{count} events {kind} of {name}"
        return wait_for(
            lambda: found if len(found := self.events(name, kind)) >= count else None,
            timeout_s=BUSY_S,
            what=what,
        )

    def events(self, name: str, kind: str) -> list[dict]:
        """Payloads of a run's events of a kind, oldest first."""
        wanted = {
            "event": {"name": [f"perdure.{kind}"]},
            "resource": {"id": [f"perdure.run.{name}"]},
            "order": "ASC",
        }
        found = self.ask("POST", "events/filter", {"filter": wanted}).json()
        return [event["payload"] for event in found["events"]]

    def cancel(self, name: str) -> None:
        self._set_state(name, {"type": "CANCELLING", "name": "Cancelling"})

    def suspend(self, name: str) -> None:
        """What the pause button of a deployed flow run sends."""
        details = {"pause_reschedule": True}
        self._set_state(name, {"type": "PAUSED", "name": "Suspended", "state_details": details})

    def resume(self, name: str) -> None:
        run_id = self.flow_runs(name)[0]["id"]
        self.ask("POST", f"flow_runs/{run_id}/resume")

    def deployment(self, name: str) -> dict:
        found: dict[str, Any] = self.ask("GET", f"deployments/name/{name}").json()
        return found

    def scheduled_runs(self, deployment: dict) -> list[dict]:
        body = {
            "deployments": {"id": {"any_": [deployment["id"]]}},
            "flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}},
            "sort": "EXPECTED_START_TIME_ASC",
        }
        return self._found("flow_runs", body)

    def run_now(self, flow_run: dict) -> None:
        """What the UI does with a scheduled run that is not waited for."""
        now = dt.datetime.now(dt.UTC).isoformat()
        state = {"type": "SCHEDULED", "state_details": {"scheduled_time": now}}
        url = f"flow_runs/{flow_run['id']}/set_state"
        self.ask("POST", url, {"state": state, "force": True})

    def ended(self, flow_run: dict) -> str:
        """The message with which a flow run ended; "" before."""
        state = self.ask("GET", f"flow_runs/{flow_run['id']}").json()["state"]
        return state["message"] if state["type"] in ("COMPLETED", "FAILED", "CRASHED") else ""

    def set_schedule(self, deployment: dict, *, active: bool) -> None:
        (schedule,) = deployment["schedules"]
        url = f"deployments/{deployment['id']}/schedules/{schedule['id']}"
        self.ask("PATCH", url, {"active": active})

    def _set_state(self, name: str, state: dict) -> None:
        run_id = self.flow_runs(name)[0]["id"]
        self.ask("POST", f"flow_runs/{run_id}/set_state", {"state": state})

    def _found(self, things: str, body: dict) -> list[dict]:
        found: list[dict] = self.ask("POST", f"{things}/filter", body).json()
        return found
