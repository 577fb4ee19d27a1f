"""Faults injected in a rank whose process groups replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from perdure.storage.local import LocalStore
from perdure.training.config.drill import DrillFault, DrillKind, DrillPoint
from perdure.training.injection.inside import WorkerInjector, fired_at_s
from perdure.training.runtime.state.live import damage
from tests.unit.runtime.trainees import Trainee
from tests.unit.runtime.worlds import Member, Replay, World

STEP = 5
RUN_ID = "run"
FAULT = DrillFault(kind=DrillKind.LINK, rank=1, step=STEP, point=DrillPoint.REDUCING)


@pytest.fixture
def world():
    world = World(2, Replay(is_on=True))
    yield world
    world.close()


def break_while_reducing(member: Member, folder: Path) -> Any:
    """Two reductions in each of two steps; whether connections were in use when they broke."""
    assert member.connections is not None
    running: list[bool] = []

    def note_and_break() -> None:
        running.extend(
            not connection.is_idle for connection in member.generations.connections().values()
        )
        member.generations.break_connections()

    faults = WorkerInjector(
        [FAULT], rank=member.rank, store=LocalStore(folder), run_id=RUN_ID,
        damage_state=lambda: None, break_connections=note_and_break,
    )  # fmt: skip
    member.connections.on_begin = faults.on_collective
    member.enter_next()
    sums = []
    for step in (STEP - 1, STEP):
        faults.reached("start", step)
        dist.barrier()
        dist.all_reduce(torch.ones(1))
        faults.reached("backward", step)
        dist.broadcast(torch.ones(1), 0)
        for _ in range(2):
            total = torch.ones(2**23)  # long enough on a busy machine to be broken while it runs
            dist.all_reduce(total)
            sums.append(float(total.sum()) / total.numel())
        faults.reached("prepared", step)
        dist.all_reduce(torch.ones(1))
    return running, sums


def test_connections_break_once_under_the_first_reduction_of_a_steps_gradients(world, tmp_path):
    world.start(break_while_reducing, tmp_path)
    world.announce(1)
    world.receive_broken(0)
    assert len(fired_at_s(LocalStore(tmp_path), RUN_ID)[0]) == 1
    world.reconnect(1, 1)
    assert [world.reconnected(rank).problem for rank in range(2)] == [None, None]
    (_, first), (running, second) = world.receive_all()
    assert running == [True]
    assert first == second == [2.0] * 4


def test_damaged_memory_leaves_no_value_of_the_state_what_it_was(tmp_path):
    trainee = Trainee()
    trainee.step()
    memory = {"kind": DrillKind.DEVICE_MEMORY, "point": DrillPoint.BACKWARD}
    faults = WorkerInjector(
        [FAULT.model_copy(update=memory)],
        rank=FAULT.rank, store=LocalStore(tmp_path), run_id=RUN_ID,
        damage_state=lambda: damage(trainee.training), break_connections=lambda: None,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="UCE ERROR"):
        faults.reached("backward", STEP)
    moments = list(trainee.training.kept_tensors())
    assert len(moments) == 3 * len(list(trainee.model.parameters()))  # with their step counts
    for value in (*trainee.model.parameters(), *moments):
        assert torch.isnan(value).all()
    assert trainee.seen == -1
