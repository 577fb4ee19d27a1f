"""What the loop does between two steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from training.health.heartbeat import HeartbeatWriter
from training.runtime.step_loop.loop import StepLoop
from training.runtime.step_loop.rank_recovery import Stand
from training.runtime.step_loop.step import Limits

SAVED_AT = {"position": 216}
AHEAD = {"position": 224}


@pytest.mark.parametrize(("pending", "is_last"), [("save", False), ("last_save", True)])
def test_a_save_has_the_position_after_its_step_though_the_next_batch_is_handed_out(
    tmp_path, pending, is_last
):
    # A fault in step 28 has the ranks take their state from each other, and what step 27 asked
    # for is done once more, while the batch of step 28 waits for the second try.
    saved: list[Any] = []
    host: Any = SimpleNamespace(
        save=lambda step, *, data, is_last: saved.append((step, data, is_last)),
        wishes=None,
        loss_factor=None,
    )
    loader: Any = SimpleNamespace(state_dict=lambda: AHEAD)
    nothing: Any = None
    loop = StepLoop(
        host,
        until=60,
        rank=0,
        seed=1,
        training=nothing,
        loader=loader,
        checkpointer=nothing,
        device=torch.device("cpu"),
        heartbeat=HeartbeatWriter(tmp_path / "heartbeat"),
        limits=Limits(),
        snapshot_every_steps=1,
        mender=None,
        reached=lambda _point, _step: None,
        stand=Stand(27, SAVED_AT, batch=(), pending=(pending,)),
    )
    step = loop.next_step()
    assert saved == [(27, SAVED_AT, is_last)]
    assert step is not None
    assert step.number == 28
