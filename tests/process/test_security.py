"""What a peer in the network, and a reader of files, gets of a living run."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import psutil
import pytest

from tests.process.harness import Running

pytestmark = [pytest.mark.process, pytest.mark.prefect]

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def living(bench) -> Iterator[Running]:
    """A run of two ranks in the middle of its training."""
    running: Running = bench.start(bench.pair("sealed", steps=2000))
    running.reach(3)
    yield running
    running.kill_supervisor()
    for process in running.local.processes():
        process.kill()


def listening(running: Running) -> dict[int, str]:
    """Ports and addresses that processes of a run listen on."""
    found = {}
    for process in running.local.processes():
        for one in process.net_connections("inet"):
            if one.status == psutil.CONN_LISTEN:
                found[one.laddr.port] = one.laddr.ip
    return found


def test_every_socket_of_a_run_listens_on_its_nodes_own_address_alone(living):
    folder = living.folder
    (agent,) = (json.loads(path.read_text()) for path in folder.glob("nodes/*/*/address.json"))
    (coordinator,) = (
        json.loads(path.read_text())
        for path in folder.glob("nodes/*/*/attempts/*/coordinator-address.json")
    )
    ports = listening(living)
    assert {agent["port"], coordinator["port"], coordinator["store_port"]} <= ports.keys()
    assert len(ports) >= 6, "the metrics and each rank's process groups listen, too"
    assert set(ports.values()) == {HOST}
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)


def test_files_that_hold_a_job_or_a_token_are_their_owners_alone(living):
    files = [
        *living.folder.glob("*.json"),
        *living.folder.glob("nodes/*/*/*.json"),
        *living.folder.glob("nodes/*/*/attempts/*/*.json"),
        *(living.bench.home / "prefect").glob("*.json"),
    ]
    names = {path.name for path in files}
    assert {"job.json", "containers.json", "agent.json", "coordinator-config.json"} <= names
    assert {"coordinator-address.json", "server.json"} <= names
    open_to_others = [path for path in files if path.stat().st_mode & 0o077]
    assert {path.name for path in open_to_others} <= {"held.json", "metrics-address.json"}
    (container,) = living.folder.glob("nodes/*/p*")
    for folder in (living.folder, container, living.bench.home / "prefect"):
        assert not folder.stat().st_mode & 0o077, folder
