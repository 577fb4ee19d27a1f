"""A real fork_server: what is forked from it, how that ends, and whose child it is."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from perdure.training.agent import fork_server as module
from perdure.training.agent.fork_server import Fork, ForkedProcess, ForkServer
from perdure.training.agent.launcher import COLD_START, Launcher
from perdure.training.processes import PRELOAD, become_subreaper
from tests.waiting import wait_for

ROOT = str(Path(__file__).parents[3])
PR_SET_CHILD_SUBREAPER = 36
VARIABLES = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
PRELOADING = {**VARIABLES, PRELOAD: "no_such_module,colorsys"}


@pytest.fixture(scope="module")
def subreaper():
    """Orphans are ours, as they are an agent's, until the last test here is over."""
    become_subreaper()
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture(scope="module")
def fork_server(subreaper, tmp_path_factory):
    """One for the tests that leave it alive."""
    server = ForkServer(PRELOADING, tmp_path_factory.mktemp("fork_server") / "fork-server.log")
    server.start()
    yield server
    server.close()


@pytest.fixture
def forked(fork_server, tmp_path):
    """Forks a function of `forkable`; none outlives the test."""
    processes: list[ForkedProcess] = []

    def fork(function: str, *arguments: str, name: str = "forked", **changes: Any) -> ForkedProcess:
        processes.append(fork_server.fork(wanted(function, tmp_path, arguments, name, **changes)))
        return processes[-1]

    yield fork
    for process in processes:
        process.kill()


def wanted(
    function: str, folder: Path, arguments: tuple[str, ...] = (), name: str = "x", **changes: Any
) -> Fork:
    fields: dict[str, Any] = {
        "function": f"tests.unit.agent.forkable:{function}",
        "name": name,
        "arguments": arguments,
        "environment": {"OWN": "x y\n=z", "PYTHONPATH": ROOT},
        "cwd": str(folder),
        "stdout": str(folder / f"{name}.out"),
        "stderr": str(folder / f"{name}.err"),
    }
    return Fork(**{**fields, **changes})


def until_up(log: Path) -> None:
    wait_for(lambda: log.exists() and "up" in log.read_text())


def ended(process: ForkedProcess | subprocess.Popen[bytes]) -> int:
    wait_for(lambda: process.poll() is not None)
    assert process.returncode is not None
    return process.returncode


def found_by(process: ForkedProcess | subprocess.Popen[bytes], out: Path) -> dict[str, Any]:
    """What a process that was given "one" and "two" found; the common part is checked."""
    assert ended(process) == 0
    findings: dict[str, Any] = json.loads(out.read_text())
    assert findings["environment"] == {"OWN": "x y\n=z", "PYTHONPATH": ROOT}
    assert (findings["arguments"], findings["cwd"]) == (["one", "two"], str(out.parent))
    assert findings["leads_session"]
    assert findings["input"] == ""
    return findings


def test_a_fork_finds_what_was_asked_for_and_nothing_of_its_fork_server(forked, tmp_path):
    process = forked("print_findings", "one", "two", name="rank-12-with-a-long-name")
    findings = found_by(process, tmp_path / "rank-12-with-a-long-name.out")
    assert findings["name"] == "rank-12-with-a-", "cut as the kernel does"
    assert findings["parent"] == os.getpid(), "which reaps orphans"
    assert findings["has_torch"], "it would take seconds to import"
    assert findings["has_colorsys"], "worker.preload; one that is not there is left to the rank"


@pytest.mark.parametrize(
    ("argument", "code", "printed"),
    [("null", 0, ""), ("0", 0, ""), ("75", 75, ""), ("257", 1, ""), ('"no good"', 1, "no good\n")],
)
def test_a_fork_exits_as_the_interpreter_would(forked, tmp_path, argument, code, printed):
    assert ended(forked("end_with", argument)) == code
    assert (tmp_path / "forked.err").read_text() == printed


def test_an_exception_is_printed_in_the_forks_own_log(forked, tmp_path):
    assert ended(forked("fail")) == 1
    assert (tmp_path / "forked.err").read_text().endswith("ValueError: own\n")


def test_a_function_that_is_not_there_fails_in_the_fork_alone(forked, tmp_path):
    assert ended(forked("no_such")) == 1
    assert "no_such" in (tmp_path / "forked.err").read_text()
    assert ended(forked("print_findings")) == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_signal_that_ends_a_fork_is_its_exit_code(forked, tmp_path, number):
    process = forked("stay")
    until_up(tmp_path / "forked.out")
    assert process.poll() is None
    process.send_signal(number)
    assert ended(process) == -number
    process.send_signal(signal.SIGTERM)  # no other process that has its pid by now gets it
    process.kill()
    assert process.returncode == -number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_ends_every_process_of_an_allocation_leaves_the_fork_server_to_its_agent(
    fork_server, forked, tmp_path, number
):
    (pid,) = fork_server.pids
    os.kill(pid, number)
    process = forked("stay")  # the next fork is made, and gets signals as any process does
    until_up(tmp_path / "forked.out")
    process.send_signal(signal.SIGTERM)
    assert ended(process) == -signal.SIGTERM
    assert fork_server.pids == {pid}


def test_killing_a_fork_waits_for_its_end(forked):
    process = forked("stay")
    process.kill()
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_fork_that_was_reaped_elsewhere_counts_as_killed(forked):
    process = forked("print_findings")
    os.waitpid(process.pid, 0)
    assert process.poll() == -signal.SIGKILL


def test_logs_are_appended_to(forked, tmp_path):
    for _ in range(2):
        assert ended(forked("print_pid")) == 0
    assert len((tmp_path / "forked.out").read_text().splitlines()) == 2


def test_everybody_gets_the_process_that_they_asked_for(forked, tmp_path):
    names = [f"n{number}" for number in range(12)]
    with ThreadPoolExecutor(len(names)) as pool:
        processes = list(pool.map(lambda name: forked("print_pid", name=name), names))
    for name, process in zip(names, processes, strict=True):
        assert ended(process) == 0
        assert (tmp_path / f"{name}.out").read_text().strip() == str(process.pid)


def test_a_fork_server_serves_those_who_want_the_same_variables(fork_server):
    assert fork_server.serves(PRELOADING)
    assert not fork_server.serves({**PRELOADING, "OMP_NUM_THREADS": "2"})


def test_what_was_forked_outlives_a_fork_server_and_its_end_is_noticed(subreaper, tmp_path):
    server = ForkServer(VARIABLES, tmp_path / "fork-server.log")
    server.start()
    process = server.fork(wanted("stay", tmp_path))
    until_up(tmp_path / "x.out")
    (pid,) = server.pids
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not server.serves(VARIABLES))
    assert server._process is not None
    assert server._process.stdout is not None
    at_end, _, _ = select.select([server._process.stdout], [], [], 5)
    assert at_end, "the fork holds the pipe open, and the agent waits for ever"
    with pytest.raises(OSError, match=r"fork server|Broken pipe"):
        server.fork(wanted("stay", tmp_path))
    server.close()
    assert server.pids == frozenset()
    assert process.poll() is None
    process.kill()


def test_a_fork_server_that_cannot_import_says_where_to_look(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no driver')\n")
    log = tmp_path / "fork-server.log"
    server = ForkServer({**VARIABLES, "PYTHONPATH": f"{tmp_path}:{ROOT}"}, log)
    with pytest.raises(OSError, match=f"the fork server did not start; see {log}"):
        server.start()
    assert "no driver" in log.read_text()
    assert server.pids == frozenset()


def test_a_fork_server_forks_nothing_before_its_start_and_is_ended_when_that_takes_too_long(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "START_TIMEOUT_S", 0.0)
    server = ForkServer(VARIABLES, tmp_path / "fork-server.log")
    with pytest.raises(OSError, match="not started"):
        server.fork(wanted("print_findings", tmp_path))
    with pytest.raises(OSError, match="did not start"):
        server.start()
    assert server.pids == frozenset()


def test_a_worker_that_must_not_be_forked_finds_the_same_and_imports_for_itself(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(COLD_START, "1")
    launcher = Launcher(tmp_path, "127.0.0.1")  # without a fork server
    process = launcher.fork(wanted("print_findings", tmp_path, ("one", "two"), name="rank-12"))
    findings = found_by(process, tmp_path / "rank-12.out")
    assert findings["name"] == "rank-12"
    assert not findings["has_torch"]
    assert ended(launcher.fork(wanted("end_with", tmp_path, ("75",)))) == 75


def test_a_container_begins_with_its_imports_before_an_attempt_asks_for_them(tmp_path):
    launcher = Launcher(tmp_path, "127.0.0.1")
    try:
        launcher.warm({"OWN": "1"})
        wait_for(lambda: launcher.pids)
        warmed = launcher.pids
        launcher.prepare({"OWN": "1"})  # waits until it is there
        assert launcher.pids == warmed
    finally:
        launcher.close()
