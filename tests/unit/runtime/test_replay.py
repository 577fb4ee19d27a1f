"""Operations that outlive their connections: real ranks, sockets shut down under real transfers.

The test does the coordinator's part: it receives the report of a break, and has ranks reconnect.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from perdure.training.recovery.protocol import WorkerFaultKind
from perdure.training.runtime.errors import Interrupted, WorkerError
from perdure.training.runtime.process_group.generations import (
    Generations,
    GroupConnection,
    GroupMembership,
    shut_down,
)
from perdure.training.runtime.process_group.operations import Operation
from perdure.training.runtime.process_group.replay import (
    ReplayableConnections,
    ReplayableProcessGroup,
)
from perdure.training.runtime.recoverable import classify
from tests.unit.runtime.worlds import TIMEOUT_S, Member, Replay, World, summed

CPU = torch.device("cpu")
MEBIBYTE = 2**20
LARGE = 64 * MEBIBYTE
HIT_AT_BYTES = MEBIBYTE  # of an operation, received
REPLAYS = Replay(is_on=True)
SLOW_BYTES_PER_S = 16 * MEBIBYTE
_SO_MAX_PACING_RATE = 47  # of Linux
# tcp_info of Linux: 8 one-byte fields, 24 of four bytes, two rates, bytes_acked, bytes_received.
_RECEIVED_AT = 8 + 24 * 4 + 3 * 8


@pytest.fixture
def new_world(make_world):
    def new_world(program: Any, size: int = 3, replay: Replay = REPLAYS) -> World:
        return make_world(program, replay, size=size)

    return new_world


def connections(connection: GroupConnection) -> Iterator[socket.socket]:
    """The connections of a connection that are still open."""
    for descriptor, target in connection.sockets.items():
        # Gloo closes those that are broken, and something else may have their number then.
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            is_own = os.readlink(f"/proc/self/fd/{one.fileno()}") == target  # noqa: PTH115
            is_tcp = one.family in (socket.AF_INET, socket.AF_INET6)
            is_stream = is_tcp and one.type == socket.SOCK_STREAM
            if is_own and is_stream and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield one


def received_bytes(connection: GroupConnection) -> int:
    """What has come over a connection."""
    total = 0
    for one in connections(connection):
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
        total += struct.unpack_from("Q", info, _RECEIVED_AT)[0]
    return total


def slow_down(connection: GroupConnection) -> None:
    """Have a transfer take seconds, or an operation could be over before a break."""
    for one in connections(connection):
        one.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, SLOW_BYTES_PER_S)


class Breaker(threading.Thread):
    """Shuts down the connections of a rank in the middle of an operation, once.

    Attributes:
        strikes: for the connection that it broke, what had come over it since the thread was made,
            and whether an operation ran on it right before and right after.
    """

    def __init__(self, member: Member) -> None:
        super().__init__(daemon=True)
        self.strikes: list[tuple[int, bool]] = []
        self._generations = member.generations
        self._before = {
            connection: received_bytes(connection) for connection in self._group_connections()
        }
        for connection in self._before:
            slow_down(connection)
        self.start()

    def run(self) -> None:
        until_s = time.monotonic() + TIMEOUT_S
        while not self.strikes and time.monotonic() < until_s:
            for connection in self._group_connections():
                if connection not in self._before:
                    self._before[connection] = 0
                    slow_down(connection)
                came = received_bytes(connection) - self._before[connection]
                if came < HIT_AT_BYTES:
                    continue
                was_running = not connection.is_idle
                assert shut_down(connection.sockets) > 0
                self.strikes.append((came, was_running))
                return

    def _group_connections(self) -> list[GroupConnection]:
        return [one for one in self._generations.connections().values() if one.group is not None]


def assert_hit(strikes: list[tuple[int, bool]], *, of_bytes: int) -> None:
    """That each of the breaks came into the middle of what was running."""
    assert len(strikes) == 1
    for came, was_running in strikes:
        assert HIT_AT_BYTES <= came < of_bytes
        assert was_running


def noise(rank: int, size_bytes: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(size_bytes // 4, generator=generator) - 0.5


def is_same(one: Tensor, other: Tensor) -> bool:
    """Bit by bit."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def fault_of(member: Member, do: Callable[[], Any]) -> WorkerFaultKind | None:
    """What `do` fails of, None when it is no fault of this rank: a generation is announced."""
    with pytest.raises((RuntimeError, WorkerError)) as caught:
        do()
    generations = member.generations
    is_interrupted = generations.announced > generations.current
    found = classify(caught.value, is_interrupted=is_interrupted)
    assert found is not None, repr(caught.value)
    return found.kind


def wait_for(member: Member, signal: str) -> None:
    """Wait until the test releases this."""
    member.generations._open_store().store.wait([signal], timedelta(seconds=TIMEOUT_S))


def release(world: World, signal: str) -> None:
    world.store.set(signal, "set")


def replace_broken(world: World) -> None:
    """Have the ranks replace the connections of generation 1 once one reports a break."""
    world.receive_broken(0)
    world.reconnect(1, 1)


def replayed(world: World) -> list[int]:
    """How many operations each rank has replayed, all of them reconnected."""
    reports = [world.reconnected(rank) for rank in range(world.size)]
    assert [one.problem for one in reports] == [None] * world.size
    return [one.operations for one in reports]


# Operations that are cut short.


Begin = Callable[[int, int], tuple[list[Any], list[Tensor]]]


def begin_one(rank: int, _size: int) -> tuple[list[Any], list[Tensor]]:
    """One all-reduce; what it writes."""
    total = noise(rank, LARGE)
    return [dist.all_reduce(total, async_op=True)], [total]


def begin_several(rank: int, size: int) -> tuple[list[Any], list[Tensor]]:
    """Several operations at once, in one order; what they write."""
    own = noise(rank, LARGE // 4)
    sums = [own * factor for factor in (1, 3)]
    gathered, part = torch.zeros(size * own.numel()), torch.zeros(own.numel() // 4)
    sent = own.clone()
    # Written apart from what is read, and in place, and both at once.
    works = [
        dist.all_reduce(sums[0], async_op=True),
        dist.all_gather_into_tensor(gathered, own, async_op=True),
        dist.broadcast(sent, 2, async_op=True),
        dist.reduce_scatter_tensor(part, own[: size * part.numel()].clone(), async_op=True),
        dist.barrier(async_op=True),
        dist.all_reduce(sums[1], async_op=True),
    ]
    return works, [*sums, gathered, sent, part]


def run_twice(member: Member, begin: Begin) -> Any:
    """The same operations undisturbed and over connections that break; what came of them."""
    member.enter_next()
    outputs, breaker = [], None
    for is_disturbed in (False, True):
        if is_disturbed and member.rank == 1:
            breaker = Breaker(member)
        works, written = begin(member.rank, member.size)
        for work in works:
            work.wait()
        outputs.append(written)
    strikes = breaker.strikes if breaker is not None else []
    return strikes, [is_same(*both) for both in zip(*outputs, strict=True)], summed(member)


# Not twice in a row: gloo's threads end the process ("terminate called after throwing an instance
# of gloo::IoException") in about one of ten second breaks, which is a death like any other.
@pytest.mark.parametrize(
    ("begin", "of_bytes", "num_outputs"),
    [
        pytest.param(begin_one, 2 * LARGE, 1, id="an all-reduce", marks=pytest.mark.long),
        pytest.param(begin_several, 4 * LARGE, 5, id="several operations at once"),
    ],
)
def test_operations_whose_connections_break_on_the_way_end_with_the_same_bits(
    new_world, begin, of_bytes, num_outputs
):
    world = new_world(partial(run_twice, begin=begin))
    replace_broken(world)
    counts = replayed(world)
    assert max(counts) >= 1, "by a rank that has entered some"
    # On a busy machine a rank may not have begun it when the connections break.
    assert begin is begin_several or set(counts) <= {0, 1}
    results = world.receive_all()
    assert_hit(results[1][0], of_bytes=of_bytes)
    assert [(same, after) for _, same, after in results] == [([True] * num_outputs, 6.0)] * 3


# Ranks that have come unequally far.


def get_ahead(member: Member, *, forgets: bool) -> Any:
    """Rank 1 completes operations that rank 2 has not entered, and uses what came of them.

    Then its connections break under one that runs.
    """
    member.enter_next()
    summed(member)
    if member.rank == 2:
        wait_for(member, "reconnected")
    own = torch.full((2,), member.rank + 1.0)
    gathered = [torch.zeros(2) for _ in range(member.size)] if member.rank == 0 else None
    sent, total = torch.full((1,), 10.0 + member.rank), torch.full((1,), member.rank + 1.0)
    gather = dist.gather(own, gathered, 0, async_op=True)
    broadcast = dist.broadcast(sent, 0, async_op=True)
    assert gather is not None
    assert broadcast is not None
    if member.rank == 1:
        gather.wait()
        broadcast.wait()
        own.zero_()
        sent.mul_(2)
    reduce = dist.all_reduce(total, async_op=True)
    assert reduce is not None
    if member.rank == 1:
        break_ahead(member, reduce, forgets=forgets)
    for work in (gather, broadcast, reduce):
        work.wait()
    lists = [one.tolist() for one in gathered] if gathered is not None else []
    return lists, float(sent), float(total)


def break_ahead(member: Member, running: dist.Work, *, forgets: bool) -> None:
    assert member.connections is not None
    if forgets:
        member.connections.end_step()
    (connection,) = member.generations.connections().values()
    assert not running.is_completed()
    assert not connection.is_idle
    assert shut_down(connection.sockets) > 0
    member.send("broke")


def test_ranks_repeat_what_one_of_them_lacks_and_results_in_use_are_not_written_again(new_world):
    world = new_world(partial(get_ahead, forgets=False))
    assert world.receive(1) == "broke"
    replace_broken(world)
    assert replayed(world) == [3, 3, 0], "rank 2 has entered none of them yet"
    release(world, "reconnected")
    results = world.receive_all()
    assert results[0][0] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], "of rank 1 what it was then"
    assert [sent for _, sent, _ in results] == [10.0, 20.0, 10.0]
    assert [total for _, _, total in results] == [6.0] * 3


def get_ahead_and_forget(member: Member) -> Any:
    """Likewise, but rank 1 keeps only the last operation: its step is over."""
    member.send(fault_of(member, lambda: get_ahead(member, forgets=True)))
    member.enter_next()
    return summed(member)


def test_an_operation_that_is_not_kept_any_more_is_left_to_a_new_generation(new_world):
    world = new_world(get_ahead_and_forget)
    assert world.receive(1) == "broke"
    replace_broken(world)
    assert [world.reconnected(rank).problem for rank in range(3)] == [
        None, "RuntimeError: operation 2 of 0 is not kept any more", None,
    ]  # fmt: skip
    release(world, "reconnected")
    world.announce(2)
    assert world.receive_all() == [None] * 3
    assert world.receive_all() == [6.0] * 3


def scatter_large(member: Member) -> Any:
    """An operation of a kind that is not kept, over connections that break."""
    member.enter_next()
    summed(member)
    parts = [noise(rank, LARGE) for rank in range(2)] if member.rank == 0 else None
    breaker = Breaker(member) if member.rank == 1 else None
    for connection in member.generations.connections().values():
        slow_down(connection)
    work = dist.scatter(noise(2, LARGE), parts, 0, async_op=True)
    assert work is not None
    if breaker is not None:
        breaker.join()
        member.send(breaker.strikes)
    member.send(fault_of(member, work.wait))
    member.enter_next()
    return summed(member)


def test_an_operation_that_cannot_run_again_fails_with_its_connection_or_its_generation(new_world):
    world = new_world(scatter_large, size=2)
    assert_hit(world.receive(1), of_bytes=LARGE)
    world.announce(2)  # gloo's scatter may wait for ever at both ends
    assert set(world.receive_all()) <= {WorkerFaultKind.CONNECTION, None}
    assert world.receive_all() == [3.0, 3.0]


# New connections that do not come about.


def wait_without_connections(member: Member) -> Any:
    """Rank 1 waits in an operation that rank 0 never enters, and its connections break."""
    for _ in range(2):
        member.enter_next()
        member.send(summed(member))
        if member.rank == 1:
            work = dist.all_reduce(torch.ones(1), async_op=True)
            assert work is not None
            break_ahead(member, work, forgets=False)
            assert fault_of(member, work.wait) is None
    member.enter_next()
    return summed(member)


@pytest.mark.parametrize(
    ("budget_s", "reconnected"),
    [
        pytest.param(0.3, [1], id="the budget is spent"),
        pytest.param(TIMEOUT_S, [1], id="a generation comes while ranks reconnect"),
        pytest.param(TIMEOUT_S, [0, 1], id="a generation comes while an operation runs again"),
    ],
)
def test_without_new_connections_the_next_generation_begins_as_if_nothing_had_been(
    new_world, budget_s, reconnected
):
    replay = Replay(is_on=True, budget_s=budget_s)
    world = new_world(wait_without_connections, size=2, replay=replay)
    for generation in (1, 2):
        assert world.receive_all() == [3.0, 3.0]
        assert world.receive(1) == "broke"
        world.forget_breaks()
        world.receive_broken(0)
        world.reconnect(generation, 1, ranks=reconnected)
        if budget_s == TIMEOUT_S:
            world.store.wait([f"g{generation}/0/l1/need/1"], timedelta(seconds=TIMEOUT_S))
        done = [world.reconnected(rank) for rank in reconnected] if len(reconnected) == 2 else []
        if budget_s < TIMEOUT_S:
            problem = world.reconnected(1).problem
            assert problem is not None
            assert "timeout" in problem
        world.announce(generation + 1)
        if not done and budget_s == TIMEOUT_S:
            assert world.reconnected(1).problem is not None
        assert [one.problem for one in done] == [None] * len(done)
    assert world.receive_all() == [3.0, 3.0]


# An operation that ends late.


def end_late(member: Member) -> Any:
    """Rank 0 learns of an end on the old connection while the operation is replayed."""
    member.enter_next()
    summed(member)
    total = torch.full((1,), member.rank + 1.0)
    if member.rank == 1:
        _hold_replay(member, "go on")
        dist.all_reduce(total)
        member.send("done")
        return wait_for(member, "over")
    ends, begun = _hold_first_end()
    work = dist.all_reduce(total, async_op=True)
    assert work is not None
    end = ends.get(timeout=TIMEOUT_S)
    member.send("done")
    begun.get(timeout=TIMEOUT_S)
    end()
    member.send(work.is_completed())
    work.wait()
    return float(total)


def _hold_replay(member: Member, signal: str) -> None:
    """Have this rank replay nothing before the test releases it."""
    replay = ReplayableProcessGroup.replay

    def later(group: ReplayableProcessGroup, connection: GroupConnection, first: int) -> int:
        wait_for(member, signal)
        return replay(group, connection, first)

    ReplayableProcessGroup.replay = later  # type: ignore[method-assign, assignment]


def _hold_first_end() -> tuple[SimpleQueue[Callable[[], None]], SimpleQueue[int]]:
    """Have the first end of an operation wait to be called, as that of a thread that is slow.

    Returns:
        That end, and how many operations run again, each as soon as it is there.
    """
    ends: SimpleQueue[Callable[[], None]] = SimpleQueue()
    begun: SimpleQueue[int] = SimpleQueue()
    ended, replay = ReplayableProcessGroup._ended, ReplayableProcessGroup.replay

    def hold(group: ReplayableProcessGroup, *arguments: Any) -> None:
        ReplayableProcessGroup._ended = ended  # type: ignore[method-assign]
        ends.put(partial(ended, group, *arguments))

    def count(group: ReplayableProcessGroup, connection: GroupConnection, first: int) -> int:
        begun.put(number := replay(group, connection, first))
        return number

    ReplayableProcessGroup._ended = hold  # type: ignore[method-assign, assignment]
    ReplayableProcessGroup.replay = count  # type: ignore[method-assign, assignment]
    return ends, begun


def test_an_end_that_comes_late_does_not_hand_out_what_is_being_written_again(new_world):
    world = new_world(end_late, size=2)
    assert world.receive_all() == ["done", "done"]
    world.reconnect(1, 1)  # a connection of another group may have broken
    assert world.receive(0) is False
    release(world, "go on")
    assert replayed(world) == [1, 1]
    assert world.receive(0) == 3.0
    release(world, "over")


def test_what_ends_an_operation_does_not_keep_its_connection_alive():
    # It runs in gloo's thread, which would join itself with the last reference to a group.
    generations = Generations(0, device=CPU, op_timeout_s=60, open_store=not_asked)
    connections = ReplayableConnections(
        generations, open_store=not_asked, report=not_asked, budget_s=1.0, replays=False
    )
    group = ReplayableProcessGroup(generations, connections, GroupMembership("all", 0, 2))
    future: torch.futures.Future[Any] = torch.futures.Future()
    work = SimpleNamespace(get_future=lambda: future)
    connection = GroupConnection("gloo", CPU)
    connection.group = SimpleNamespace(allreduce=lambda *_: work)  # type: ignore[assignment]
    group._connection, alive = connection, weakref.ref(connection)
    arguments = ([torch.ones(1)], None)
    operation = Operation("allreduce", arguments, None, 1)
    group._begin(operation, arguments)
    assert not connection.is_idle
    running = connection.running
    group._connection = None
    del connection
    assert alive() is None
    future.set_result([torch.ones(1)])
    assert operation.is_done
    assert running.is_none


def exchange_for_ever(tensor: Tensor, rank: int) -> None:
    """Send to the other rank and receive from it in turns."""
    for count in itertools.count(rank):
        (dist.send if count % 2 else dist.recv)(tensor, 1 - rank)


def exchange_until_announced(member: Member, times: int) -> Any:
    """Exchange tensors with the other rank; each generation that comes cuts a transfer short."""
    tensor = torch.ones(1000)
    for _ in range(times):
        member.enter_next()
        summed(member)
        member.send("begins")
        with pytest.raises((Interrupted, RuntimeError)):
            exchange_for_ever(tensor, member.rank)
    member.enter_next()
    return summed(member)


def test_a_generation_ends_each_transfer_that_waits(new_world):
    # Gloo alone goes on waiting in up to one of five transfers that an abort cuts short.
    times = 12
    world = new_world(partial(exchange_until_announced, times=times), 2)
    for generation in range(2, times + 2):
        assert world.receive_all() == ["begins"] * 2
        world.announce(generation)
    assert world.receive_all() == [3.0, 3.0]


def test_a_transfer_in_which_gloo_waits_for_ever_ends_with_its_generation():
    generations = Generations(0, device=CPU, op_timeout_s=60, open_store=not_asked)
    generations.current = generations.announced = 1
    connections = ReplayableConnections(
        generations, open_store=not_asked, report=not_asked, budget_s=1.0, replays=False
    )
    group = ReplayableProcessGroup(generations, connections, GroupMembership("all", 0, 2))
    waits, is_over = threading.Event(), threading.Event()
    connection = GroupConnection("gloo", CPU)

    class Stuck(dist.Work):
        def wait(self, timeout: Any = None) -> bool:
            waits.set()
            return is_over.wait(TIMEOUT_S)

    connection.group = SimpleNamespace(recv=lambda *_: Stuck())  # type: ignore[assignment]
    generations._connections["all"] = connection
    work = group.recv([torch.ones(1)], 1)
    assert not work.is_completed()
    assert waits.wait(TIMEOUT_S)
    generations.announced = 2
    connections.fail()
    with pytest.raises(RuntimeError, match="generation 2 is announced"):
        work.wait()
    assert not connection.is_idle, "gloo's thread is still in it"
    is_over.set()


def not_asked(*_: object) -> Any:
    raise AssertionError("it is not asked for here")
