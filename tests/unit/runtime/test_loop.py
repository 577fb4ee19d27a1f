"""What the loop does between two steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perdure.training.liveness.heartbeat import HeartbeatWriter
from perdure.training.recovery.repair import Vote
from perdure.training.runtime.agent_requests import AgentRequests
from perdure.training.runtime.program import Training
from perdure.training.runtime.step_loop.loop import StepLoop
from perdure.training.runtime.step_loop.rank_recovery import RankState
from tests.unit.runtime.trainees import Place
from tests.unit.storage.nodes import Cluster

SAVED_AT = {"position": 216}
AHEAD = {"position": 224}


def loop_at(tmp_path: Path, state: RankState, *, checkpointer: Any, data: Any) -> StepLoop:
    """That of a single rank which is to train up to step 60."""
    Cluster.at(tmp_path)
    model = torch.nn.Linear(1, 1)
    faults: Any = SimpleNamespace(reached=lambda _point, _step: None)
    records: Any = SimpleNamespace(unsaved=dict, saved=lambda: None, notice=lambda _: None)
    loop = StepLoop(
        60,
        context=Place(tmp_path, 1, (None,), (None,)).context(0, 1),
        training=Training(model, [torch.optim.SGD(model.parameters())], [], None, data, 1.0),
        checkpointer=checkpointer,
        device=torch.device("cpu"),
        heartbeat=HeartbeatWriter(tmp_path / "heartbeat"),
        faults=faults,
        records=records,
        requests=AgentRequests(),
        recovery=None,
    )
    loop.begin()
    loop.state = state
    return loop


@pytest.mark.parametrize(("pending", "is_last"), [("save", False), ("last_save", True)])
def test_a_save_has_the_position_after_its_step_though_the_next_batch_is_handed_out(
    tmp_path, pending, is_last
):
    # A fault in step 28 has the ranks take their state from each other, and what step 27 asked
    # for is done once more, while the batch of step 28 waits for the second try.
    saved: list[Any] = []
    checkpointer: Any = SimpleNamespace(
        restore=lambda: 27,
        save=lambda step, **given: saved.append((step, given["data"], given["loss"])),
        settle=lambda _timeout_s: saved.append("settled"),
        is_behind=True,
    )
    vote = Vote(step=27, loss=2.5, grad_norm=1.0)
    state = RankState(27, SAVED_AT, vote=vote, batch=(), pending=(pending,))
    data: Any = SimpleNamespace(state_dict=lambda: AHEAD, epoch=0)
    step = loop_at(tmp_path, state, checkpointer=checkpointer, data=data).next_step()
    assert saved == [(27, SAVED_AT, 2.5), *["settled"] * is_last]
    assert step is not None
    assert step.number == 28


def test_a_batch_outlives_a_device_that_is_stopped_before_its_step_is_handed_out(
    tmp_path, monkeypatch
):
    drawn: list[str] = []

    def draw() -> list[str]:
        drawn.append(f"batch {len(drawn)}")
        return drawn[-1:]

    data: Any = SimpleNamespace(state_dict=lambda: SAVED_AT, epoch=0, position=216, next_step=draw)
    checkpointer: Any = SimpleNamespace(restore=lambda: 27)
    loop = loop_at(tmp_path, RankState(27, SAVED_AT), checkpointer=checkpointer, data=data)

    def stopped(*_: object, **__: object) -> None:
        raise RuntimeError("FORCE STOP")

    with monkeypatch.context() as patched:
        patched.setattr("perdure.training.runtime.step_loop.loop.seed_step", stopped)
        with pytest.raises(RuntimeError, match="FORCE STOP"):
            loop.next_step()
    step = loop.next_step()
    assert step is not None
    assert (step.number, step.data) == (28, ["batch 0"])
    assert drawn == ["batch 0"]
    assert loop.state.batch is None


@pytest.mark.parametrize("has_trained", [True, False])
def test_a_program_that_ends_within_a_step_has_the_one_before_saved(tmp_path, has_trained):
    done: list[Any] = []
    checkpointer: Any = SimpleNamespace(
        restore=lambda: 27,
        prepare=lambda: done.append("prepared"),
        save=lambda step, **given: done.append((step, given["data"])),
        settle=lambda _timeout_s: done.append("settled"),
        is_behind=True,
    )
    data: Any = SimpleNamespace(
        state_dict=lambda: SAVED_AT, epoch=0, position=216, next_step=lambda: ["batch"]
    )
    state = RankState(27, SAVED_AT, pending=("prepare",) * has_trained)
    loop = loop_at(tmp_path, state, checkpointer=checkpointer, data=data)
    loop.stays = True
    step = loop.next_step()
    assert step is not None
    loop.end_at(27)
    assert loop.next_step() is None
    # Without a step of its own the process has nothing to save, but waits for what it restored.
    assert done == (["prepared", (27, SAVED_AT), "settled"] if has_trained else ["settled"])
