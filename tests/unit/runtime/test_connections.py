"""Connections that are aborted on purpose, and operations whose end can be followed."""

from __future__ import annotations

import datetime as dt
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from perdure.training.runtime.process_group.generations import (
    GLOO,
    GroupConnection,
    GroupMembership,
    Sockets,
    StoreClient,
    new_sockets,
    open_sockets,
    shut_down,
)
from perdure.training.runtime.process_group.operations import start
from tests.waiting import BEYOND_A_TEST_S

HOST = "127.0.0.1"
CPU = torch.device("cpu")
FIRST = GroupMembership("world", 0, 2)


@pytest.fixture
def listener():
    with socket.create_server((HOST, 0)) as server:
        server.settimeout(240)
        yield server


def connected(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection."""
    near = socket.create_connection(listener.getsockname(), timeout=240)
    far, _ = listener.accept()
    far.settimeout(240)
    return near, far


def only(*ends: socket.socket) -> Sockets:
    found = open_sockets()
    return {end.fileno(): found[end.fileno()] for end in ends}


def test_what_was_there_before_is_not_new(listener):
    before = open_sockets()
    near, far = connected(listener)
    with near, far:
        assert set(new_sockets(before)) == {near.fileno(), far.fileno()}
    assert new_sockets(before) == {}


def test_a_socket_that_took_the_number_of_a_closed_one_is_new_and_left_alone(listener):
    near, far = connected(listener)
    before, old = open_sockets(), only(near)
    near.close()
    far.close()
    near, far = connected(listener)
    with near, far:
        (number,) = old
        assert number in (near.fileno(), far.fileno()), "the test needs the number once more"
        assert number in new_sockets(before)
        assert shut_down(old) == 0
        near.send(b"x")
        assert far.recv(1) == b"x"


def test_a_connection_that_is_shut_down_is_over_on_both_ends(listener):
    near, far = connected(listener)
    with near, far:
        assert shut_down(only(near)) == 1
        assert far.recv(1) == b""
        assert near.recv(1) == b""
        with pytest.raises(BrokenPipeError):
            near.send(b"x")


def test_a_thread_that_waits_on_a_connection_is_woken(listener):
    near, far = connected(listener)
    with near, far, ThreadPoolExecutor(1) as pool:
        near.settimeout(None)
        waiting = pool.submit(near.recv, 1)
        assert shut_down(only(near)) == 1
        assert waiting.result(240) == b""


def test_listeners_and_pipes_between_processes_are_left_alone(listener):
    one, other = socket.socketpair()
    with one, other:
        assert shut_down(only(listener, one, other)) == 0
        one.send(b"x")
        assert other.recv(1) == b"x"
    near, far = connected(listener)
    near.close()
    far.close()


def test_a_client_of_the_store_that_waits_is_freed_and_others_are_not():
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    client, other = StoreClient(HOST, store.port), StoreClient(HOST, store.port)
    client.store.set("here", "1")
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(client.store.get, "never")
        patient = pool.submit(other.store.get, "later")
        client.abort()
        with pytest.raises(dist.DistNetworkError):
            waiting.result(240)
        store.set("later", "2")
        assert patient.result(240) == b"2"
    with pytest.raises(dist.DistNetworkError):
        client.store.set("here", "3")


class DiesOncePublished(Store):
    """The store as a rank sees it that publishes its address and dies before it connects."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def wait(self, keys: list[str], *_: object) -> None:
        raise RuntimeError("killed")

    def get(self, key: str) -> bytes:
        raise RuntimeError("killed")

    def multi_get(self, keys: list[str]) -> list[bytes]:
        raise RuntimeError("killed")


def publish_and_die(store: Store, host: str) -> None:
    """Be rank 1, listen on an address of this machine, publish it, and die."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=60)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    with pytest.raises(RuntimeError, match="killed"):
        dist.ProcessGroupGloo(DiesOncePublished(store), 1, 2, options)
    options._devices = []  # closes the listener, as the death of a process does
    assert store.num_keys()


@pytest.fixture
def _on_loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # this rank is 127.0.0.1


# Of two ranks, gloo has the one with the higher address connect, and the other one wait for it.
HIGHER, LOWER = "127.0.0.2", "127.0.0.0"


@pytest.mark.usefixtures("_on_loopback")
def test_an_abort_frees_a_rank_whose_peer_died_between_its_address_and_its_connection():
    store = HashStore()
    publish_and_die(store, HIGHER)
    published = store.num_keys()
    connection = GroupConnection(GLOO, CPU)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(connection.connect, store, FIRST, timeout_s=BEYOND_A_TEST_S)
        while store.num_keys() == published:
            os.sched_yield()
        connection.abort()
        # Only the abort ends it: a rank that waits connects to nothing that could refuse it.
        with pytest.raises(RuntimeError, match="the connection was aborted"):
            waiting.result(240)


@pytest.mark.usefixtures("_on_loopback")
def test_a_rank_that_connects_to_a_peer_that_died_is_refused_without_an_abort():
    # The peer's listener died with it. Gloo tries four times within some 10 ms and gives up:
    # an abort may come before or after that, so a test of the abort needs a rank that waits.
    store = HashStore()
    publish_and_die(store, LOWER)
    with pytest.raises(RuntimeError, match="Connection refused"):
        GroupConnection(GLOO, CPU).connect(store, FIRST, timeout_s=BEYOND_A_TEST_S)


def test_a_connection_that_is_aborted_before_it_is_made_is_not_made():
    connection = GroupConnection(GLOO, CPU)
    connection.abort()
    with pytest.raises(RuntimeError, match="aborted"):
        connection.connect(HashStore(), FIRST, timeout_s=BEYOND_A_TEST_S)


RANKS = (0, 1)


@pytest.fixture(scope="module")
def groups():
    store = dist.HashStore()  # type: ignore[attr-defined]

    def connect(rank: int):
        return dist.ProcessGroupGloo(store, rank, len(RANKS), dt.timedelta(seconds=20))

    with ThreadPoolExecutor(len(RANKS)) as pool:
        return list(pool.map(connect, RANKS))


def on_both(groups, operation, arguments):
    """Start an operation on both ranks, follow it to its end; what each rank's outputs are."""
    given = [arguments(rank) for rank in RANKS]
    started = [
        start(group, operation, given[rank], rank=rank, size=len(RANKS))
        for rank, group in enumerate(groups)
    ]
    for work, finish in started:
        work.get_future().wait()
        finish()
    return [values(one[0]) for one in given]


def values(output):
    return output.tolist() if isinstance(output, torch.Tensor) else [one.tolist() for one in output]


def ramp(rank: int) -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3) + 10 * rank


# Both ranks together: 10, 12, 14 and 16, 18, 20.
HALVES = [[10.0, 12.0, 14.0], [16.0, 18.0, 20.0]]


@pytest.mark.parametrize(
    ("operation", "arguments", "expected"),
    [
        (
            "reduce_scatter_single",
            lambda rank: (torch.zeros(1, 3), ramp(rank), dist.ReduceScatterOptions()),
            [[half] for half in HALVES],
        ),
        (
            "reduce_scatter_single_coalesced",
            lambda rank: ([torch.zeros(3), torch.zeros(1)], [ramp(rank), torch.ones(2)], None),
            [[half, [2.0]] for half in HALVES],
        ),
        (
            "reduce_scatter",
            lambda rank: ([torch.zeros(3)], [list(ramp(rank))], dist.ReduceScatterOptions()),
            [[half] for half in HALVES],
        ),
        (
            "allreduce",
            lambda rank: ([ramp(rank)], dist.AllreduceOptions()),
            [[HALVES], [HALVES]],
        ),
    ],
)
def test_an_operation_can_be_followed_to_its_end(groups, operation, arguments, expected):
    assert on_both(groups, operation, arguments) == expected


def test_the_kind_of_reduction_is_kept_and_what_was_given_is_not_written(groups):
    options = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
    wholes = [ramp(rank) for rank in RANKS]
    outputs = on_both(
        groups, "reduce_scatter_single", lambda rank: (torch.zeros(3), wholes[rank], options)
    )
    assert outputs == [[10.0, 11.0, 12.0], [13.0, 14.0, 15.0]]
    assert [whole.tolist() for whole in wholes] == [ramp(rank).tolist() for rank in RANKS]
