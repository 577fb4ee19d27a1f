"""Process groups whose inside is swapped: real processes, and a coordinator's part by hand.

Both kinds of group: the plain one that NCCL and HCCL have, and the replayable one that gloo has.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.nn.parallel import DistributedDataParallel

from perdure.training.runtime.errors import Interrupted
from perdure.training.runtime.process_group.generations import open_sockets
from perdure.training.runtime.recoverable import classify
from perdure.training.runtime.step_loop.wrappers import settle_buckets
from tests.unit.runtime.worlds import Member, Replay, summed


@pytest.fixture(params=[None, Replay()], ids=["plain", "replayable"])
def new_world(make_world, request):
    return lambda program, size=2, **which: make_world(program, request.param, size=size, **which)


def caught(do: Any) -> BaseException:
    """What `do` raises."""
    try:
        do()
    except BaseException as error:  # noqa: BLE001 the test looks at it
        return error
    raise AssertionError("nothing was raised")


# A generation that ends.


def wait_in_vain(member: Member) -> Any:
    """Rank 0 waits in a collective that rank 1 never enters, until a generation is announced."""
    member.enter_next()
    member.send(summed(member))
    error: BaseException | None = None
    if member.rank == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        member.send("waits")
        error = caught(work.wait)
        again = caught(lambda: summed(member))
        assert isinstance(again, Interrupted), "the old connections are not used any more"
        found = classify(error, is_interrupted=True)
        assert found is not None
        assert found.kind is None
        member.send("failed")
    member.enter_next()
    return summed(member)


def test_a_generation_ends_a_collective_that_waits_and_the_next_one_works(new_world):
    world = new_world(wait_in_vain)
    assert world.receive_all() == [3.0, 3.0]
    assert world.receive(0) == "waits"
    world.announce(2, ranks=[0])
    assert world.receive(0) == "failed", "though rank 1 does not know of it, and keeps its end open"
    world.announce(2, ranks=[1])
    assert world.receive_all() == [3.0, 3.0]


def connect_in_vain(member: Member) -> Any:
    """Rank 0 makes a connection that rank 1 never makes, until a generation is announced."""
    member.enter_next()
    member.send("entered")
    if member.rank == 0:
        error = caught(lambda: summed(member))
        assert classify(error, is_interrupted=True) is not None, repr(error)
    member.enter_next()
    return summed(member)


def test_a_generation_ends_the_making_of_a_connection_and_the_next_one_works(new_world):
    world = new_world(connect_in_vain)
    assert world.receive_all() == ["entered", "entered"]
    world.store.wait(["g1/0/0/0"], timedelta(seconds=60))  # where gloo's rank 0 is to be found
    world.announce(2)
    assert world.receive_all() == [3.0, 3.0]


def enter_late(member: Member) -> Any:
    """Enter a generation after the next one was announced."""
    member.enter_next()
    member.send("first")
    member.enter_next()
    assert member.generations.current == 3
    member.generations.announce(2)
    assert member.generations.announced == 3, "an older one is no news"
    error = caught(lambda: member.generations.enter(2))
    assert isinstance(error, Interrupted)
    member.generations.enter(3)
    return summed(member)


def test_a_generation_that_is_over_already_is_not_entered(new_world):
    world = new_world(enter_late)
    assert world.receive_all() == ["first", "first"]
    world.announce(3)
    assert world.receive_all() == [3.0, 3.0]


def live_long(member: Member) -> Any:
    """Take part in several generations; how many sockets there are in each."""
    counts = []
    for _ in range(6):
        member.enter_next()
        summed(member)
        counts.append(len(open_sockets()))
        member.send("done")
    return counts


def test_generations_that_are_over_leave_no_sockets_behind(new_world):
    world = new_world(live_long)
    for generation in range(2, 7):
        assert world.receive_all() == ["done", "done"]
        world.announce(generation)
    assert world.receive_all() == ["done", "done"]
    for counts in world.receive_all():
        assert counts[-1] <= counts[1]


# A rank that dies, and another in its place.


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def gradients(wrapped: nn.Module, rank: int) -> list[list[float]]:
    wrapped.zero_grad()
    wrapped(torch.full((4, 3), float(rank + 1))).sum().backward()
    return [
        parameter.grad.flatten().tolist()
        for parameter in wrapped.parameters()
        if parameter.grad is not None
    ]


def survive(member: Member) -> Any:
    """Train with a rank that dies, and go on with the one in its place."""
    member.enter_next()
    wrapped = DistributedDataParallel(model())
    settle_buckets(wrapped)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "both"))
    first = gradients(wrapped, member.rank)
    member.send(first)
    if member.rank == 1:
        time.sleep(600)  # until it is killed
    work = dist.all_reduce(torch.ones(1), async_op=True)
    member.send("waits")
    found = classify(caught(work.wait), is_interrupted=False)
    member.send(found.kind if found is not None else None)
    member.enter_next()
    assert gradients(wrapped, member.rank) == first
    return summed(member, mesh.get_group("both"))


def join_later(member: Member) -> Any:
    """Build alone what the others have built together, and take part."""
    with member.generations.alone():
        wrapped = DistributedDataParallel(model())
        settle_buckets(wrapped)
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "both"))
    member.enter_next()
    member.send(gradients(wrapped, member.rank))
    return summed(member, mesh.get_group("both"))


def test_survivors_notice_a_death_and_go_on_with_a_new_process_nothing_built_again(new_world):
    world = new_world(survive)
    first, second = world.receive_all()
    assert first == second
    assert world.receive(0) == "waits"
    world.processes[1].kill()
    assert world.receive(0) == "connection"
    world.start(join_later, ranks=[1])
    world.announce(2)
    assert world.receive(1) == first
    assert world.receive_all() == [3.0, 3.0]


# The results of collectives.


def run_all(member: Member) -> dict[str, Any]:
    """Every collective through the group; rank's own number is its rank + 1."""
    member.enter_next()
    return results_of_all(member.rank, member.size)


def run_all_alone(member: Member) -> dict[str, Any]:
    """Likewise, of a rank that is alone in its world: no generation is ever entered."""
    with member.generations.alone():
        return results_of_all(member.rank, member.size)


def results_of_all(rank: int, size: int) -> dict[str, Any]:
    def own(count: int = 1) -> Tensor:
        return torch.full((count,), rank + 1.0)

    results: dict[str, Tensor] = {}
    dist.all_reduce(results.setdefault("all_reduce", own()))
    dist.reduce(results.setdefault("reduce", own()), 0)
    dist.broadcast(results.setdefault("broadcast", own()), 1)
    gathered = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(gathered, own(2))
    results["all_gather"] = torch.stack(gathered)
    dist.all_gather_into_tensor(
        results.setdefault("all_gather_into", torch.zeros(size * 2)), own(2)
    )
    whole = torch.arange(size, dtype=torch.float32) + 10 * rank
    dist.reduce_scatter_tensor(results.setdefault("reduce_scatter", torch.zeros(1)), whole.clone())
    parts = list(whole.clone().split(1))
    dist.reduce_scatter(results.setdefault("reduce_scatter_list", torch.zeros(1)), parts)
    lists = [torch.zeros(1) for _ in range(size)] if rank == 0 else None
    dist.gather(own(), lists, 0)
    results["gather"] = torch.stack(lists) if lists is not None else torch.zeros(0)
    dist.scatter(results.setdefault("scatter", torch.zeros(1)), parts if rank == 0 else None, 0)
    dist.all_to_all_single(results.setdefault("all_to_all", torch.zeros(size)), whole.clone())
    coalesced = [own(), own(2)]
    with _coalescing_manager():
        for tensor in coalesced:
            dist.all_reduce(tensor)
    results["coalesced"] = torch.cat(coalesced)
    dist.barrier()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    return {**{name: tensor.tolist() for name, tensor in results.items()}, "objects": objects}


def test_every_collective_gives_its_result(new_world):
    world = new_world(run_all)
    first, second = world.receive_all()
    common = {
        "all_reduce": [3.0],
        "broadcast": [2.0],
        "all_gather": [[1.0, 1.0], [2.0, 2.0]],
        "all_gather_into": [1.0, 1.0, 2.0, 2.0],
        "coalesced": [3.0, 3.0, 3.0],
        "objects": [{"rank": 0}, {"rank": 1}],
    }
    assert {name: first[name] for name in common} == common
    assert {name: second[name] for name in common} == common
    assert (first["reduce"], first["gather"]) == ([3.0], [[1.0], [2.0]])
    assert (first["reduce_scatter"], second["reduce_scatter"]) == ([10.0], [12.0])
    assert (first["reduce_scatter_list"], second["reduce_scatter_list"]) == ([10.0], [12.0])
    assert (first["scatter"], second["scatter"]) == ([0.0], [1.0])
    assert (first["all_to_all"], second["all_to_all"]) == ([0.0, 10.0], [1.0, 11.0])


def test_a_rank_that_is_alone_gets_results_as_if_every_rank_had_brought_the_same(new_world):
    world = new_world(run_all_alone, ranks=[0])
    assert world.receive(0) == {
        "all_reduce": [1.0],
        "reduce": [1.0],
        "broadcast": [1.0],
        "all_gather": [[1.0, 1.0], [1.0, 1.0]],
        "all_gather_into": [1.0, 1.0, 1.0, 1.0],
        "reduce_scatter": [0.0],
        "reduce_scatter_list": [0.0],
        "gather": [[1.0], [1.0]],
        "scatter": [0.0],
        "all_to_all": [0.0, 1.0],
        "coalesced": [1.0, 1.0, 1.0],
        "objects": [{"rank": 0}, {"rank": 0}],
    }


def use_smaller_groups(member: Member) -> Any:
    """Groups of one rank, and of some, in two generations."""
    results = []
    single = dist.new_group([member.rank], use_local_synchronization=True)
    assert summed(member, single) == member.rank + 1.0, "it needs no other rank, and no generation"
    for _ in range(2):
        member.enter_next()
        results.append(summed(member, single))
        if member.rank > 0:
            pair = dist.new_group([1, 2], use_local_synchronization=True)
            results.append(summed(member, pair))
        results.append(summed(member))
        member.send("done")
    return results


def test_smaller_groups_have_connections_of_their_own(new_world):
    world = new_world(use_smaller_groups, size=3)
    assert world.receive_all() == ["done"] * 3
    world.announce(2)
    assert world.receive_all() == ["done"] * 3
    assert world.receive_all() == [[1.0, 6.0] * 2, [2.0, 5.0, 6.0] * 2, [3.0, 5.0, 6.0] * 2]
