"""What a user's first command does on a machine where nothing runs yet."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import httpx
import pytest
import yaml

from tests.process.harness import Workbench
from tests.workplace import kill_leftovers

pytestmark = [pytest.mark.process, pytest.mark.prefect]


@pytest.fixture
def bare(bench, tmp_path):
    """A home without a server, and an environment that names none."""
    home = tmp_path / "home"
    unset = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    yield home, {**unset, "PERDURE_HOME": str(home), "HOME": str(tmp_path)}
    kill_leftovers(home)


def perdure(environment, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "perdure", *arguments],
        env=environment, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip


def test_without_a_configured_server_a_run_starts_one_and_is_found_there_afterwards(bench, bare):
    home, environment = bare
    job = Workbench(home, "", bench.corpus).pair("first", steps=4, env={"PACE_S": "0"})
    home.mkdir()
    path = home / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    done = perdure(environment, "run", str(path))
    assert done.returncode == 0, done.stdout + done.stderr

    record = json.loads((home / "prefect" / "server.json").read_text())
    url = f"http://127.0.0.1:{record['port']}"
    assert f"Prefect UI: {url}" in done.stdout
    runs = httpx.post(f"{url}/api/flow_runs/filter", json={}, timeout=30).json()
    assert [(run["name"], run["state"]["name"]) for run in runs] == [("first", "Completed")]

    status = json.loads(perdure(environment, "status", "first", "--json").stdout)
    assert (status["state"], status["committed_step"]) == ("completed", 4)
    assert perdure(environment, "server", "stop").stdout.strip() == "stopped"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/api/health", timeout=5)


@pytest.mark.long
def test_cancel_stops_a_run_by_its_name(bench):
    job = bench.pair("by-name", steps=2000, env={"PACE_S": "0.2"})
    running = bench.start(job)
    running.reach(3)
    done = perdure(bench.environment, "cancel", "by-name")
    assert done.returncode == 0, done.stderr
    assert running.finish(timeout_s=60, hurry=False) == 1
    running.leave_nothing()

    orphaned = bench.start({**job, "run_id": "by-name-2"})
    orphaned.reach(3)
    orphaned.kill_supervisor()
    done = perdure(bench.environment, "cancel", "by-name-2")
    assert "no supervisor was alive" in done.stdout
    orphaned.leave_nothing()
