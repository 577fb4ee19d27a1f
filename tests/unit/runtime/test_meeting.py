"""The place where ranks wait for each other without a limit, as at the end of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from perdure.training.runtime.process_group.attempt_groups import meet
from perdure.training.runtime.process_group.generations import StoreClient
from perdure.training.runtime.recoverable import classify
from tests.waiting import wait_for

HOST = "127.0.0.1"
SIZE = 3


@pytest.fixture
def server() -> TCPStore:
    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(SIZE) as executor:
        yield executor


def begin(pool: ThreadPoolExecutor, client: StoreClient) -> Future[None]:
    return pool.submit(meet, PrefixStore("g1/meetings", client.store), SIZE)


def await_arrivals(server: TCPStore, number: int) -> None:
    wait_for(lambda: server.add("g1/meetings/arrivals", 0) == number, what=f"{number} arrivals")


def test_ranks_meet_again_and_again_and_none_leaves_before_the_last_has_come(server, pool):
    clients = [StoreClient(HOST, server.port) for _ in range(SIZE)]
    for first in range(SIZE):
        *early, last = clients[first:] + clients[:first]
        waiting = [begin(pool, client) for client in early]
        await_arrivals(server, SIZE * (first + 1) - 1)
        assert not any(meeting.done() for meeting in waiting)
        for meeting in [*waiting, begin(pool, last)]:
            meeting.result(60)


def test_a_rank_that_waits_is_set_free_where_its_generation_ends(server, pool):
    client = StoreClient(HOST, server.port)
    waiting = begin(pool, client)
    await_arrivals(server, 1)
    client.abort()
    error = waiting.exception(60)
    assert error is not None
    fault = classify(error, is_interrupted=True)
    assert fault is not None
    assert fault.kind is None
