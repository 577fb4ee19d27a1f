"""Collectives whose end can be followed, on two real gloo ranks in one process."""

from __future__ import annotations

import datetime as dt
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from training.runtime.process_group.connections import start

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
    return [one[0] for one in given]


def ramp(rank: int) -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3) + 10 * rank


# Both ranks together: 10, 12, 14 and 16, 18, 20.
HALVES = [[10.0, 12.0, 14.0], [16.0, 18.0, 20.0]]


def test_a_reduce_scatter_can_be_followed_to_its_end(groups):
    outputs = on_both(
        groups,
        "reduce_scatter_single",
        lambda rank: (torch.zeros(1, 3), ramp(rank), dist.ReduceScatterOptions()),
    )
    assert [one.tolist() for one in outputs] == [[half] for half in HALVES]


def test_several_are_scattered_at_once(groups):
    outputs = on_both(
        groups,
        "reduce_scatter_single_coalesced",
        lambda rank: ([torch.zeros(3), torch.zeros(1)], [ramp(rank), torch.ones(2)], None),
    )
    assert [[one.tolist() for one in rank] for rank in outputs] == [[h, [2.0]] for h in HALVES]


def test_the_parts_of_all_ranks_may_come_one_by_one(groups):
    outputs = on_both(
        groups,
        "reduce_scatter",
        lambda rank: ([torch.zeros(3)], [list(ramp(rank))], dist.ReduceScatterOptions()),
    )
    assert [rank[0].tolist() for rank in outputs] == HALVES


def test_the_kind_of_reduction_is_kept_and_what_was_given_is_not_written(groups):
    options = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
    wholes = [ramp(rank) for rank in RANKS]
    outputs = on_both(
        groups, "reduce_scatter_single", lambda rank: (torch.zeros(3), wholes[rank], options)
    )
    assert [one.tolist() for one in outputs] == [[10.0, 11.0, 12.0], [13.0, 14.0, 15.0]]
    assert [whole.tolist() for whole in wholes] == [ramp(rank).tolist() for rank in RANKS]


def test_other_collectives_are_as_gloo_has_them(groups):
    outputs = on_both(groups, "allreduce", lambda rank: ([ramp(rank)], dist.AllreduceOptions()))
    assert [rank[0].tolist() for rank in outputs] == [HALVES, HALVES]
