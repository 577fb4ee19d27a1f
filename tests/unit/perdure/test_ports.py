"""Whose a port is."""

from __future__ import annotations

import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from perdure.port_owner import PortOwner, owner_of, owner_text
from perdure.server_process import PortTakenError, ServerRecord, start_server
from perdure.training.processes import free_port
from tests.jobs import job_document
from tests.unit.perdure.commands import error_line

TEXTS = {
    "ours": (
        PortOwner(7, "python -m uvicorn", is_prefect=True, home="/srv/a"),
        "the Prefect server of PERDURE_HOME=/srv/a (pid 7)",
        "PERDURE_HOME=/srv/a perdure server stop",
    ),
    "a Prefect server": (
        PortOwner(7, "python -m uvicorn", is_prefect=True),
        "a Prefect server that perdure did not start (pid 7)",
        "export PREFECT_API_URL=http://127.0.0.1:4200/api",
    ),
    "another program": (
        PortOwner(7, "nginx: master", is_prefect=False),
        "another program (pid 7: nginx: master)",
        "--port",
    ),
    "another user": (
        PortOwner(None, "", is_prefect=False),
        "another program (a process of another user)",
        "--port",
    ),
    "nobody": (None, "port 4200 cannot be bound by this user", "--port"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_a_busy_port_is_explained_on_one_line_that_says_what_to_do(case):
    owner, who, advice = TEXTS[case]
    text = owner_text(owner, 4200)
    assert who in text
    assert advice in text
    assert "\n" not in text


def test_the_owner_of_a_port_is_the_process_that_listens_on_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        owner = owner_of(taken.getsockname()[1])
    assert owner is not None
    assert (owner.pid, owner.is_prefect, owner.home) == (os.getpid(), False, None)
    assert "python" in owner.command
    assert owner_of(free_port()) is None


def test_a_listener_on_another_address_does_not_own_the_port_of_the_server():
    with socket.create_server(("127.0.0.2", 0)) as other:
        port = other.getsockname()[1]
        assert owner_of(port) is None
        with socket.create_server(("", free_port())) as everywhere:
            assert owner_of(everywhere.getsockname()[1]) is not None


def test_server_start_on_the_port_of_another_program_names_it_and_starts_nothing(
    capsys, perdure_home
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = error_line(capsys, "server", "start", "--port", port)
    assert f"port {port} is taken by another program (pid {os.getpid()}" in line
    assert not (perdure_home / "prefect" / "server.json").exists()


@pytest.mark.parametrize("command", ["run", "server start"])
def test_a_remembered_port_that_is_taken_is_called_that_with_the_command_that_changes_it(
    capsys, perdure_home, tmp_path, monkeypatch, command
):
    monkeypatch.setattr("perdure.server.configured_api", lambda: None)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(
        "perdure.training.config.recommendations.TEMPORARY_FOLDERS", ()
    )  # no warning of the job
    job = tmp_path / "job.yaml"
    document = {"worker": {"command": ["true"]}, "preflight": {"nodes": False}}
    job.write_text(yaml.safe_dump(job_document(tmp_path, **document)))
    (perdure_home / "prefect").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (perdure_home / "prefect" / "settings.json").write_text(f'{{"port": {port}}}')
        arguments = ["run", job] if command == "run" else command.split()
        line = error_line(capsys, *arguments)
    assert f"port {port} is taken by another program (pid {os.getpid()}" in line
    assert f"{port} is remembered from an earlier 'perdure server start --port {port}'" in line
    assert "'perdure server start --port N' changes it, --port 0 forgets it" in line
    assert "perdure: --port" not in line


def test_a_second_port_for_a_server_that_runs_is_refused(capsys, perdure_home, monkeypatch):
    record = ServerRecord(pid=1, process_started_s=0.0, port=4711)
    monkeypatch.setattr("perdure.server.running_server", lambda: record)
    line = error_line(capsys, "server", "start", "--port", 4712)
    assert "already runs on port 4711" in line


class Healthy(BaseHTTPRequestHandler):
    """A Prefect server that another home has started."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


def test_another_server_that_took_the_port_a_moment_before_is_not_taken_for_the_new_one(
    perdure_home, monkeypatch
):
    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        monkeypatch.setattr(
            "perdure.server_process.why_taken", lambda _port: None
        )  # it was still free
        with pytest.raises(PortTakenError, match="is taken by"):
            start_server(port=other.server_address[1])
        other.shutdown()
    assert not (perdure_home / "prefect" / "server.json").exists()
