"""Operations that outlive their links: real ranks, sockets that are shut down under real transfers.

The test does the coordinator's part: it hears of a link that broke, and has links made anew.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.unit.runtime.worlds import TIMEOUT_S, Member, Promises, Reconnected, World
from training.recovery.protocol import WorkerFaultKind
from training.runtime.errors import WorkerError
from training.runtime.process_group.connections import Link, shut_down
from training.runtime.process_group.replay import ReplayableProcessGroup
from training.runtime.step_loop.worker_faults import look_at

MEBIBYTE = 2**20
LARGE = 64 * MEBIBYTE
HIT_AT_BYTES = MEBIBYTE  # of an operation, received
KEEPS = Promises(keeps=True)
SLOW_BYTES_PER_S = 16 * MEBIBYTE
_SO_MAX_PACING_RATE = 47  # of Linux
# tcp_info of Linux: 8 one-byte fields, 24 of four bytes, two rates, bytes_acked, bytes_received.
_RECEIVED_AT = 8 + 24 * 4 + 3 * 8


@pytest.fixture
def new_world():
    """Worlds whose operations are kept; no process of theirs outlives the test."""
    worlds: list[World] = []

    def new_world(size: int = 3, promises: Promises = KEEPS) -> World:
        worlds.append(World(size, promises))
        return worlds[-1]

    yield new_world
    for world in worlds:
        world.close()


def connections(link: Link) -> Iterator[socket.socket]:
    """The connections of a link that are still open."""
    for descriptor, target in link.sockets.items():
        # Gloo closes those that are broken, and something else may have their number then.
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            is_own = os.readlink(f"/proc/self/fd/{one.fileno()}") == target  # noqa: PTH115
            is_tcp = one.family in (socket.AF_INET, socket.AF_INET6)
            is_stream = is_tcp and one.type == socket.SOCK_STREAM
            if is_own and is_stream and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield one


def received_bytes(link: Link) -> int:
    """What has come over a link."""
    total = 0
    for one in connections(link):
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
        total += struct.unpack_from("Q", info, _RECEIVED_AT)[0]
    return total


def slow_down(link: Link) -> None:
    """Have what is sent over a link take seconds, or an operation could be over before a break."""
    for one in connections(link):
        one.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, SLOW_BYTES_PER_S)


class Breaker(threading.Thread):
    """Shuts down the connections of a rank in the middle of an operation, once.

    Attributes:
        strikes: for the link that it broke, what had come over it since the thread was made,
            and whether an operation ran on it right before and right after.
    """

    def __init__(self, member: Member) -> None:
        super().__init__(daemon=True)
        self.strikes: list[tuple[int, bool]] = []
        self._generations = member.generations
        self._before = {link: received_bytes(link) for link in self._links()}
        for link in self._before:
            slow_down(link)
        self.start()

    def run(self) -> None:
        until_s = time.monotonic() + TIMEOUT_S
        while not self.strikes and time.monotonic() < until_s:
            for link in self._links():
                if link not in self._before:
                    self._before[link] = 0
                    slow_down(link)
                came = received_bytes(link) - self._before[link]
                if came < HIT_AT_BYTES:
                    continue
                was_running = not link.is_idle
                assert shut_down(link.sockets) > 0
                self.strikes.append((came, was_running))
                return

    def _links(self) -> list[Link]:
        return [one for one in self._generations.links().values() if one.group is not None]


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


def summed(member: Member) -> float:
    tensor = torch.tensor([member.rank + 1.0])
    dist.all_reduce(tensor)
    return float(tensor)


def trouble_of(member: Member, do: Callable[[], Any]) -> WorkerFaultKind | None:
    """What `do` fails of, None when it is no fault of this rank: a generation is announced."""
    with pytest.raises((RuntimeError, WorkerError)) as caught:
        do()
    generations = member.generations
    is_interrupted = generations.announced > generations.current
    seen = look_at(caught.value, is_interrupted=is_interrupted)
    assert seen is not None, repr(caught.value)
    return seen.trouble


def hear_word(member: Member, word: str) -> None:
    """Wait until the test says so."""
    member.generations._open_store().store.wait([word], timedelta(seconds=TIMEOUT_S))


def say_word(world: World, word: str) -> None:
    world.store.set(word, "said")


# Operations that are cut short.


def reduce_large(member: Member) -> Any:
    """The same all-reduce twice, the second time over links that break; what came of it."""
    member.enter_next()
    own = noise(member.rank, LARGE)
    undisturbed, disturbed = own.clone(), own.clone()
    dist.all_reduce(undisturbed)
    breaker = Breaker(member) if member.rank == 1 else None
    dist.all_reduce(disturbed)
    strikes = breaker.strikes if breaker is not None else []
    return strikes, is_same(disturbed, undisturbed), summed(member)


def test_an_all_reduce_whose_connections_break_on_the_way_ends_with_the_same_bits(new_world):
    world = new_world()
    world.start(reduce_large)
    world.announce(1)
    world.hear_broken(0)
    world.reconnect(1, 1)
    told = [world.hear_relinked(rank) for rank in range(3)]
    assert [one.problem for one in told] == [None] * 3
    assert [one.operations for one in told] == [1, 1, 1]
    results = world.hear_all()
    assert_hit(results[1][0], of_bytes=2 * LARGE)
    assert [(same, after) for _, same, after in results] == [(True, 6.0)] * 3


def begin_several(rank: int, size: int) -> tuple[list[dist.Work], list[Tensor]]:
    """Several operations at once, in one order; what they write."""
    own = noise(rank, LARGE // 4)
    sums = [own * factor for factor in (1, 3)]
    gathered, part = torch.zeros(size * own.numel()), torch.zeros(own.numel() // 4)
    told = own.clone()
    # Written apart from what is read, and in place, and both at once.
    works = [
        dist.all_reduce(sums[0], async_op=True),
        dist.all_gather_into_tensor(gathered, own, async_op=True),
        dist.broadcast(told, 2, async_op=True),
        dist.reduce_scatter_tensor(part, own[: size * part.numel()].clone(), async_op=True),
        dist.barrier(async_op=True),
        dist.all_reduce(sums[1], async_op=True),
    ]
    return [work for work in works if work is not None], [*sums, gathered, told, part]


def run_several(member: Member) -> Any:
    """Several operations in a row, undisturbed and over links that break."""
    member.enter_next()
    works, undisturbed = begin_several(member.rank, member.size)
    for work in works:
        work.wait()
    breaker = Breaker(member) if member.rank == 1 else None
    works, disturbed = begin_several(member.rank, member.size)
    for work in works:
        work.wait()
    strikes = breaker.strikes if breaker is not None else []
    same = [is_same(one, other) for one, other in zip(disturbed, undisturbed, strict=True)]
    return strikes, same, summed(member)


# Not twice in a row: gloo's threads end the process ("terminate called after throwing an instance
# of gloo::IoException") in about one of ten second breaks, which is a death like any other.
def test_several_operations_end_with_the_same_bits_though_their_links_break(new_world):
    world = new_world()
    world.start(run_several)
    world.announce(1)
    world.hear_broken(0)
    world.reconnect(1, 1)
    told = [world.hear_relinked(rank) for rank in range(3)]
    assert [one.problem for one in told] == [None] * 3
    assert max(one.operations for one in told) >= 1, "by a rank that has entered some"
    results = world.hear_all()
    assert_hit(results[1][0], of_bytes=4 * LARGE)
    assert [(same, after) for _, same, after in results] == [([True] * 5, 6.0)] * 3


# Ranks that have come unequally far.


def get_ahead(member: Member, *, forgets: bool) -> Any:
    """Rank 1 completes operations that rank 2 has not entered, and uses what came of them.

    Then its connections break under one that runs.
    """
    member.enter_next()
    summed(member)
    if member.rank == 2:
        hear_word(member, "mended")
    own = torch.full((2,), member.rank + 1.0)
    gathered = [torch.zeros(2) for _ in range(member.size)] if member.rank == 0 else None
    told, total = torch.full((1,), 10.0 + member.rank), torch.full((1,), member.rank + 1.0)
    gather = dist.gather(own, gathered, 0, async_op=True)
    broadcast = dist.broadcast(told, 0, async_op=True)
    assert gather is not None
    assert broadcast is not None
    if member.rank == 1:
        gather.wait()
        broadcast.wait()
        own.zero_()
        told.mul_(2)
    reduce = dist.all_reduce(total, async_op=True)
    assert reduce is not None
    if member.rank == 1:
        break_ahead(member, reduce, forgets=forgets)
    for work in (gather, broadcast, reduce):
        work.wait()
    lists = [one.tolist() for one in gathered] if gathered is not None else []
    return lists, float(told), float(total)


def break_ahead(member: Member, running: dist.Work, *, forgets: bool) -> None:
    assert member.links is not None
    if forgets:
        member.links.let_go()
    (link,) = member.generations.links().values()
    assert not running.is_completed()
    assert not link.is_idle
    assert shut_down(link.sockets) > 0
    member.say("broke")


def get_ahead_and_keep(member: Member) -> Any:
    return get_ahead(member, forgets=False)


def test_ranks_repeat_what_one_of_them_lacks_and_results_in_use_are_not_written_again(new_world):
    world = new_world()
    world.start(get_ahead_and_keep)
    world.announce(1)
    assert world.hear(1) == "broke"
    world.hear_broken(0)
    world.reconnect(1, 1)
    told = [world.hear_relinked(rank) for rank in range(3)]
    assert [one.problem for one in told] == [None] * 3
    assert [one.operations for one in told] == [3, 3, 0], "rank 2 has entered none of them yet"
    say_word(world, "mended")
    results = world.hear_all()
    assert results[0][0] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], "of rank 1 what it was then"
    assert [told for _, told, _ in results] == [10.0, 20.0, 10.0]
    assert [total for _, _, total in results] == [6.0] * 3


def get_ahead_and_forget(member: Member) -> Any:
    """Likewise, but rank 1 keeps only the last operation: its step is over."""
    member.say(trouble_of(member, lambda: get_ahead(member, forgets=True)))
    member.enter_next()
    return summed(member)


def test_an_operation_that_is_not_kept_any_more_is_left_to_a_new_generation(new_world):
    world = new_world()
    world.start(get_ahead_and_forget)
    world.announce(1)
    assert world.hear(1) == "broke"
    world.hear_broken(0)
    world.reconnect(1, 1)
    told = [world.hear_relinked(rank) for rank in range(3)]
    assert [one.problem for one in told] == [
        None, "RuntimeError: operation 2 of 0 is not kept any more", None,
    ]  # fmt: skip
    say_word(world, "mended")
    world.announce(2)
    assert world.hear_all() == [None] * 3
    assert world.hear_all() == [6.0] * 3


def scatter_large(member: Member) -> Any:
    """An operation of a kind that is not kept, over connections that break."""
    member.enter_next()
    summed(member)
    parts = [noise(rank, LARGE) for rank in range(2)] if member.rank == 0 else None
    breaker = Breaker(member) if member.rank == 1 else None
    for link in member.generations.links().values():
        slow_down(link)
    work = dist.scatter(noise(2, LARGE), parts, 0, async_op=True)
    assert work is not None
    if breaker is not None:
        breaker.join()
        member.say(breaker.strikes)
    member.say(trouble_of(member, work.wait))
    member.enter_next()
    return summed(member)


def test_an_operation_that_cannot_run_again_fails_with_its_link_or_its_generation(new_world):
    world = new_world(2)
    world.start(scatter_large)
    world.announce(1)
    assert_hit(world.hear(1), of_bytes=LARGE)
    world.announce(2)  # gloo's scatter may wait for ever at both ends
    assert set(world.hear_all()) <= {WorkerFaultKind.LINK, None}
    assert world.hear_all() == [3.0, 3.0]


# New links that do not come about.


def wait_without_links(member: Member) -> Any:
    """Rank 1 waits in an operation that rank 0 never enters, and its connections break."""
    for _ in range(2):
        member.enter_next()
        member.say(summed(member))
        if member.rank == 1:
            work = dist.all_reduce(torch.ones(1), async_op=True)
            assert work is not None
            break_ahead(member, work, forgets=False)
            assert trouble_of(member, work.wait) is None
    member.enter_next()
    return summed(member)


@pytest.mark.parametrize(
    ("budget_s", "reconnected"),
    [
        pytest.param(0.3, [1], id="the budget is spent"),
        pytest.param(TIMEOUT_S, [1], id="a generation comes while links are made"),
        pytest.param(TIMEOUT_S, [0, 1], id="a generation comes while an operation runs again"),
    ],
)
def test_without_new_links_the_next_generation_begins_as_if_nothing_had_been(
    new_world, budget_s, reconnected
):
    world = new_world(2, Promises(keeps=True, budget_s=budget_s))
    world.start(wait_without_links)
    world.announce(1)
    for generation in (1, 2):
        assert world.hear_all() == [3.0, 3.0]
        assert world.hear(1) == "broke"
        world.forget_links()
        world.hear_broken(0)
        world.reconnect(generation, 1, ranks=reconnected)
        if budget_s == TIMEOUT_S:
            world.store.wait([f"g{generation}/0/l1/need/1"], timedelta(seconds=TIMEOUT_S))
        done = [world.hear_relinked(rank) for rank in reconnected] if len(reconnected) == 2 else []
        if budget_s < TIMEOUT_S:
            problem = world.hear_relinked(1).problem
            assert problem is not None
            assert "timeout" in problem
        world.announce(generation + 1)
        if not done and budget_s == TIMEOUT_S:
            assert world.hear_relinked(1).problem is not None
        assert [one.problem for one in done] == [None] * len(done)
    assert world.hear_all() == [3.0, 3.0]


# An operation that ends late.


def end_late(member: Member) -> Any:
    """Rank 0 hears of an operation's end on the old link while it runs again on the new one."""
    member.enter_next()
    summed(member)
    total = torch.full((1,), member.rank + 1.0)
    if member.rank == 1:
        _run_again_on(member, "go on")
        dist.all_reduce(total)
        member.say("done")
        return hear_word(member, "over")
    ends, begun = _hold_first_end()
    work = dist.all_reduce(total, async_op=True)
    assert work is not None
    end = ends.get(timeout=TIMEOUT_S)
    member.say("done")
    begun.get(timeout=TIMEOUT_S)
    end()
    member.say(work.is_completed())
    work.wait()
    return float(total)


def _run_again_on(member: Member, word: str) -> None:
    """Have this rank run nothing again before the test says so."""
    run_again = ReplayableProcessGroup.run_again

    def later(group: ReplayableProcessGroup, link: Link, first: int) -> int:
        hear_word(member, word)
        return run_again(group, link, first)

    ReplayableProcessGroup.run_again = later  # type: ignore[method-assign, assignment]


def _hold_first_end() -> tuple[SimpleQueue[Callable[[], None]], SimpleQueue[int]]:
    """Have the first end of an operation wait to be called, as that of a thread that is slow.

    Returns:
        That end, and how many operations run again, each as soon as it is there.
    """
    ends: SimpleQueue[Callable[[], None]] = SimpleQueue()
    begun: SimpleQueue[int] = SimpleQueue()
    ended, run_again = ReplayableProcessGroup._ended, ReplayableProcessGroup.run_again

    def hold(group: ReplayableProcessGroup, *arguments: Any) -> None:
        ReplayableProcessGroup._ended = ended  # type: ignore[method-assign]
        ends.put(partial(ended, group, *arguments))

    def told(group: ReplayableProcessGroup, link: Link, first: int) -> int:
        begun.put(count := run_again(group, link, first))
        return count

    ReplayableProcessGroup._ended = hold  # type: ignore[method-assign, assignment]
    ReplayableProcessGroup.run_again = told  # type: ignore[method-assign, assignment]
    return ends, begun


def test_an_end_that_is_told_late_does_not_hand_out_what_is_being_written_again(new_world):
    world = new_world(2)
    world.start(end_late)
    world.announce(1)
    assert world.hear_all() == ["done", "done"]
    world.reconnect(1, 1)  # a link of another group may have broken
    assert world.hear(0) is False
    say_word(world, "go on")
    assert [world.hear_relinked(rank) for rank in range(2)] == [Reconnected(1, None)] * 2
    assert world.hear(0) == 3.0
    say_word(world, "over")
