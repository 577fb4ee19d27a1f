"""The rendezvous store: where it listens, and who cannot write into it."""

from __future__ import annotations

import socket

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore

from perdure.training.processes import free_port
from perdure.training.wire.rendezvous import serve_store


def addresses() -> list[str]:
    """Of this machine, loopback first."""
    found = [
        one.address
        for assigned in psutil.net_if_addrs().values()
        for one in assigned
        if one.family == socket.AF_INET and one.address != "127.0.0.1"
    ]
    return ["127.0.0.1", "127.0.0.2", *found]


@pytest.mark.parametrize("host", addresses())
def test_a_store_is_reached_at_its_address_and_at_no_other_of_the_machine(host):
    store = serve_store(host, 0)
    # Another program may have the same port at another address, so that connecting tells nothing.
    listening = [
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == store.port
    ]
    assert listening == [host]
    TCPStore(host, store.port).set("written/by/a/rank", "1")
    assert store.check(["written/by/a/rank"])


def test_a_store_keeps_to_the_port_that_it_is_given_and_frees_it_with_its_end():
    port = free_port()
    for _ in range(2):
        store = serve_store("localhost", port)
        assert store.port == port
        with pytest.raises(OSError, match="in use"):
            serve_store("localhost", port)
        del store


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(OSError, match="assign"):
        serve_store("192.0.2.254", 0)
