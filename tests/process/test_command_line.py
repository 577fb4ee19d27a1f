"""What a user's first command does on a machine where nothing runs yet."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import httpx
import pytest
import yaml

from perdure.training.processes import free_port
from tests.process.harness import Workbench
from tests.process.offices import denying_proxy, proxy_variables
from tests.values import not_none
from tests.waiting import wait_for
from tests.workplace import kill_leftovers

pytestmark = [pytest.mark.process, pytest.mark.prefect]


@pytest.fixture
def bare(bench, tmp_path, migrated):
    """A home without a server, and an environment that names none."""
    home = tmp_path / "home"
    (home / "prefect").mkdir(parents=True, mode=0o700)
    shutil.copyfile(migrated, home / "prefect" / "prefect.db")
    unset = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    yield home, {**unset, "PERDURE_HOME": str(home), "HOME": str(tmp_path)}
    kill_leftovers(home)


def perdure(environment, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "perdure", *arguments],
        env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "proxies",
    [
        pytest.param(proxy_variables(), id="proxies"),
        pytest.param(
            {**proxy_variables(), "no_proxy": ".local"}, id="no_proxy", marks=pytest.mark.long
        ),
        pytest.param({}, id="plain", marks=pytest.mark.long),
    ],
)
def test_without_a_configured_server_a_run_starts_one_and_is_found_there_afterwards(
    bench, bare, proxies
):
    home, environment = bare
    plain = {k: v for k, v in environment.items() if not k.lower().endswith("_proxy")}
    environment = {**plain, **proxies}
    job = Workbench(home, "", bench.corpus).pair("first", steps=4, env={"PACE_S": "0"})
    path = home / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    done = perdure(environment, "run", str(path))
    assert done.returncode == 0, done.stdout + done.stderr

    record = json.loads((home / "prefect" / "server.json").read_text())
    url = f"http://127.0.0.1:{record['port']}"
    assert f"Prefect UI: {url}" in done.stdout
    runs = httpx.post(f"{url}/api/flow_runs/filter", json={}, timeout=240).json()
    assert [(run["name"], run["state"]["name"]) for run in runs] == [("first", "Completed")]

    status = json.loads(perdure(environment, "status", "first", "--json").stdout)
    assert (status["state"], status["committed_step"]) == ("completed", 4)
    assert perdure(environment, "server", "stop").stdout.strip() == "stopped"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/api/health", timeout=5)


@pytest.mark.long
def test_in_an_office_the_demo_recovers_and_asks_no_proxy(bare):
    _, environment = bare
    with denying_proxy() as proxy:
        done = perdure({**environment, **proxy_variables(proxy.url)}, "demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("injected: kill of") == 2
    assert proxy.requested == []


@pytest.mark.long
def test_cancel_stops_a_run_by_its_name(bench):
    job = bench.pair("by-name", steps=2000, env={"PACE_S": "0.2"})
    running = bench.start(job)
    running.reach(3)
    done = perdure(bench.environment, "cancel", "by-name")
    assert done.returncode == 0, done.stderr
    assert running.finish(hurry=False) == 1
    running.leave_nothing()

    orphaned = bench.start({**job, "run_id": "by-name-2"})
    orphaned.reach(3)
    orphaned.kill_supervisor()
    done = perdure(bench.environment, "cancel", "by-name-2")
    assert "no supervisor was alive" in done.stdout
    orphaned.leave_nothing()


@pytest.mark.long
def test_cancel_stops_a_run_whose_server_is_not_there(bench):
    running = bench.start(bench.pair("serverless", steps=2000, env={"PACE_S": "0.2"}))
    running.reach(3)
    url = f"http://127.0.0.1:{free_port()}/api"
    done = perdure({**bench.environment, "PREFECT_API_URL": url}, "cancel", "serverless")
    assert done.returncode == 0, done.stderr
    assert f"the Prefect server at {url} cannot be used" in done.stderr
    assert "Traceback" not in done.stderr
    assert running.finish(hurry=False) == 1
    assert not_none(running.history.ended).outcome == "cancelled"
    running.leave_nothing()


def test_the_port_of_another_homes_server_is_refused_and_the_home_is_named(bench, bare):
    _, environment = bare
    port = httpx.URL(bench.api_url).port
    done = perdure(environment, "server", "start", "--port", str(port))
    assert done.returncode == 2
    assert f"the Prefect server of PERDURE_HOME={bench.home}" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.long
def test_a_chosen_port_is_kept_for_the_next_start_and_whose_it_is_meanwhile_is_said(bare):
    home, environment = bare
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    assert url in perdure(environment, "server", "start", "--port", port).stdout
    assert url in perdure(environment, "server", "start").stdout
    assert perdure(environment, "server", "stop").stdout.strip() == "stopped"

    foreign = subprocess.Popen(
        [sys.executable, "-m", "prefect", "server", "start", "--port", port],
        env={**environment, "PREFECT_HOME": str(home / "foreign")},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(lambda: answers(f"{url}/api/health"))
        done = perdure(environment, "server", "start")
        assert done.returncode == 2
        assert "a Prefect server that perdure did not start" in done.stderr
    finally:
        foreign.terminate()
        foreign.wait(240)
    assert url in perdure(environment, "server", "start").stdout
    assert perdure(environment, "server", "stop").stdout.strip() == "stopped"


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=30).is_success
    except httpx.HTTPError:
        return False


def test_a_proxy_that_refuses_a_remote_server_is_named_on_one_line(bench, bare):
    home, environment = bare
    job = Workbench(home, "", bench.corpus).pair("denied", steps=4)
    path = home / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    with denying_proxy() as proxy:
        remote = {
            "http_proxy": proxy.url,
            "PREFECT_API_URL": "http://prefect.corp.example:4200/api",
        }
        done = perdure({**environment, **remote}, "run", str(path))
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"http_proxy={proxy.url}: it answers 503" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "command", ["run", *(pytest.param(name, marks=pytest.mark.long) for name in ("demo", "notify"))]
)
def test_a_configured_server_that_is_not_there_ends_a_command_on_one_line(bench, bare, command):
    home, environment = bare
    path = home / "job.yaml"
    path.write_text(yaml.safe_dump(Workbench(home, "", bench.corpus).pair("dead", steps=4)))
    url = f"http://127.0.0.1:{free_port()}/api"
    arguments = {"run": [str(path)], "demo": [], "notify": ["slack-webhook/team"]}
    done = perdure({**environment, "PREFECT_API_URL": url}, command, *arguments[command])
    assert done.returncode == 2, done.stdout + done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"perdure: PREFECT_API_URL: the Prefect server at {url} cannot be used")
    assert "'unset PREFECT_API_URL'" in line
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["run", pytest.param("preflight", marks=pytest.mark.long)])
def test_a_low_hard_limit_of_open_files_ends_a_command_on_one_line(bench, bare, command):
    home, environment = bare
    job = Workbench(home, "", bench.corpus).pair("few-files", steps=4)
    path = home / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    done = subprocess.run(
        ["bash", "-c", f"ulimit -n 60; exec {sys.executable} -m perdure {command} {path}"],
        env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert "the hard limit of open files is 60, and this job needs" in line
    assert not (home / "runs" / "few-files").exists()
