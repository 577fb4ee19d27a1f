"""Faults on purpose, in a rank whose facades promise their results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from storage.local import LocalStore
from tests.unit.runtime.trainees import Trainee
from tests.unit.runtime.worlds import Member, Promises, World
from training.injection.fired import fired_at_s
from training.runtime import drills
from training.runtime.drills import Drill
from training.runtime.process_group.connections import Sockets, shut_down
from training.specs.drill import DrillFault, DrillKind, DrillPoint

STEP = 5
RUN_ID = "run"
FAULT = DrillFault(kind=DrillKind.LINK, rank=1, step=STEP, point=DrillPoint.REDUCING)


@pytest.fixture
def world():
    world = World(2, Promises(keeps=True))
    yield world
    world.close()


def break_while_reducing(member: Member, folder: Path) -> Any:
    """Two reductions in each of two steps; in how many the links broke, and under what."""
    assert member.links is not None
    found = Drill(
        [FAULT], rank=member.rank, folder=folder, generations=member.generations,
        store=LocalStore(folder), run_id=RUN_ID,
    )  # fmt: skip
    member.links.on_begin = found.begins
    running: list[bool] = []

    def look_and_shut_down(sockets: Sockets) -> int:
        running.extend(not link.is_idle for link in member.generations.links().values())
        return shut_down(sockets)

    pytest.MonkeyPatch().setattr(drills, "shut_down", look_and_shut_down)
    member.enter_next()
    sums = []
    for step in (STEP - 1, STEP):
        found.reached("start", step)
        dist.barrier()
        dist.all_reduce(torch.ones(1))
        found.reached("backward", step)
        dist.broadcast(torch.ones(1), 0)
        for _ in range(2):
            total = torch.ones(2**20)
            dist.all_reduce(total)
            sums.append(float(total.sum()) / total.numel())
        found.reached("prepared", step)
        dist.all_reduce(torch.ones(1))
    return running, sums


def test_links_break_once_under_the_first_reduction_of_the_gradients_of_a_step(world, tmp_path):
    world.start(break_while_reducing, tmp_path)
    world.announce(1)
    world.hear_broken(0)
    assert len(fired_at_s(LocalStore(tmp_path), RUN_ID)[0]) == 1
    world.reconnect(1, 1)
    assert [world.hear_relinked(rank).problem for rank in range(2)] == [None, None]
    (_, first), (running, second) = world.hear_all()
    assert running == [True]
    assert first == second == [2.0] * 4


def test_damaged_memory_leaves_no_value_of_the_state_what_it_was(tmp_path):
    trainee = Trainee()
    trainee.step()
    found = Drill(
        [FAULT.model_copy(update={"kind": DrillKind.DEVICE_MEMORY, "point": DrillPoint.BACKWARD})],
        rank=FAULT.rank, folder=tmp_path, generations=None, store=LocalStore(tmp_path),
        run_id=RUN_ID,
    )  # fmt: skip
    found.training = trainee.training
    with pytest.raises(RuntimeError, match="UCE ERROR"):
        found.reached("backward", STEP)
    moments = [value for one in trainee.optimizer.state.values() for value in one.values()]
    assert len(moments) == 3 * len(list(trainee.model.parameters()))  # with their step counts
    for value in (*trainee.model.parameters(), *moments):
        assert torch.isnan(value).all()
    assert trainee.seen == -1
