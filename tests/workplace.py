"""The Prefect server and the folders that real runs of a test session have in common.

One server for all of them: Prefect's client of events keeps to the first one that a process
reports to.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from perdure import server_process
from perdure.training.processes import free_port
from tests.process.harness import TEXT, Running, Workbench
from tests.process.rest import Api


def kill_leftovers(home: Path) -> None:
    """End what a failed test left: flows and workers would report to the next session's server."""
    entry = f"PERDURE_HOME={home}".encode()
    for process in psutil.process_iter():
        try:
            carries = entry in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if carries and process.pid != os.getpid():
                process.kill()
        except (OSError, psutil.NoSuchProcess):
            continue


def server_port(worker_id: str) -> int:
    """A port for a server, from a range that no other worker of the tests looks at."""
    number = int(worker_id.removeprefix("gw")) if worker_id.startswith("gw") else 0
    return free_port(ports=range(4300 + 100 * number, 4400 + 100 * number))


@pytest.fixture(scope="session")
def session_home(tmp_path_factory):
    return tmp_path_factory.mktemp("perdure")


@contextmanager
def migrated_once(database: Path, kept: Path) -> Iterator[None]:
    """Around the start of a server: its migrations take longer than all else, so they are kept."""
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            yield
            part = kept.with_suffix(".part")
            with closing(sqlite3.connect(database)) as made, closing(sqlite3.connect(part)) as copy:
                made.backup(copy)
            part.replace(kept)
            return
    database.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(kept, database)
    yield


@pytest.fixture(scope="session")
def migrated(pytestconfig) -> Path:
    """Where the database of a new server is kept once one was started."""
    folder: Path = pytestconfig.cache.mkdir("prefect")
    return folder / f"{version('prefect')}.db"


@pytest.fixture(scope="session")
def prefect_server(session_home, worker_id, migrated):
    """A real server on SQLite, as `perdure run` starts one."""
    before = {name: os.environ.get(name) for name in ("PERDURE_HOME",)}
    os.environ["PERDURE_HOME"] = str(session_home)
    # The scheduler looks once a minute by default; tests should not wait for that.
    os.environ["PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS"] = "3"
    try:
        with migrated_once(session_home / "prefect" / "prefect.db", migrated):
            started = server_process.start_server(port=server_port(worker_id))
        yield started
    finally:
        os.environ["PERDURE_HOME"] = str(session_home)
        server_process.stop_server()
        kill_leftovers(session_home)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@pytest.fixture(scope="session")
def api(prefect_server) -> Api:
    """What the server answers to its UI."""
    return Api(prefect_server.api_url)


@pytest.fixture(scope="session")
def bench(session_home, prefect_server) -> Workbench:
    """Where runs are made."""
    return make_bench(session_home, prefect_server.api_url)


def make_bench(home: Path, api_url: str, env: dict[str, str] | None = None) -> Workbench:
    """A bench in a folder, with a small corpus."""
    corpus = home / "corpus"
    corpus.mkdir()
    for index in range(6):
        (corpus / f"{index}.txt").write_text((f"{index} " + TEXT) * 80)
    return Workbench(home, api_url, corpus, env or {})


@pytest.fixture(scope="session")
def broken(bench) -> Running:
    """The main job, finished: a rank was killed, one fell silent, and a node was lost."""
    policy = {"hang_timeout_s": 12, "pod_retries": 1, "node_replace": False}
    job = bench.job("main-job", restart=policy)
    job["data"] = {**job["data"], "num_workers": 1}
    running: Running = bench.start(job)
    running.reach(13)
    assert len(running.local.kill_rank(1)) == 1
    running.reach(23)
    (silent,) = running.local.rank(0)
    silent.suspend()
    running.reach(41)
    assert len(running.local.kill_node("node-1")) >= 3
    assert running.finish() == 0, running.out
    return running
