"""The gang before the first step: real processes that wait for one that does not come."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import pytest
import torch

from perdure.training.node_checks.collectives import Seat, check_gang
from perdure.training.processes import free_port

pytestmark = pytest.mark.process

WORLD_SIZE = 3
LATER_S = 1.0


def _seat(rank: int, port: int, together: Any, given: Any) -> None:
    together.wait(60)
    time.sleep(LATER_S * rank)
    seat = Seat(rank, WORLD_SIZE, "127.0.0.1", port, join_s=3.0, timeout_s=10.0)
    given.put((rank, [(one.name, one.outcome) for one in check_gang(seat, torch.device("cpu"))]))


def checks_of(ranks: list[int]) -> dict[int, list[tuple[str, str]]]:
    """What each rank finds, of those that come."""
    # Not forked: a fork of a process in which torch has threads may wait for them for ever.
    context, port = multiprocessing.get_context("spawn"), free_port()
    given = context.Queue()
    together = context.Barrier(len(ranks))
    processes = [
        context.Process(target=_seat, args=(rank, port, together, given)) for rank in ranks
    ]
    for process in processes:
        process.start()
    try:
        return dict(given.get(timeout=60) for _ in ranks)
    finally:
        for process in processes:
            process.join(10)
            process.kill()


@pytest.mark.long
def test_who_waits_later_than_the_first_rank_has_joined_all_the_same():
    joined_in_vain = [("join", "ok"), ("all_reduce", "warning")]
    assert checks_of([0, 1]) == {0: joined_in_vain, 1: joined_in_vain}


@pytest.mark.long
def test_ranks_that_all_come_reduce_together():
    well = [("join", "ok"), ("all_reduce", "ok")]
    assert checks_of([0, 1, 2]) == {0: well, 1: well, 2: well}
