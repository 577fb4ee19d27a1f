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
