"""How a rank leaves when its attempt is not saved inside its processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from perdure.training.diagnosis.exits import EXIT_RESTART_ME
from perdure.training.recovery.repair import Move, RepairMode, RepairPlan, SkippedBatch, Vote
from perdure.training.runtime.errors import GivenUp, Interrupted
from perdure.training.runtime.step_loop.rank_recovery import RankRecovery, RankState

PEER_CLOSED = "[gloo/transport/tcp/pair.cc:538] Connection closed by peer [::1]:4123"
RESTART = "the ladder asks for a restart"
WRAPPED = "Got the following error when running the callback: "


def recovery(*, announced: int) -> RankRecovery:
    """Of rank 3, whose coordinator has given the attempt up."""

    def newer_than(_generation: int) -> int:
        raise GivenUp(RESTART)

    groups: Any = SimpleNamespace(
        client=SimpleNamespace(newer_than=newer_than, send=lambda _message: None),
        generations=SimpleNamespace(announced=announced, current=1),
    )
    context: Any = SimpleNamespace(rank=3)
    heartbeat: Any = SimpleNamespace(beat=lambda **_: None)
    nothing: Any = None
    return RankRecovery(
        *(groups, context, nothing, nothing, torch.device("cpu"), heartbeat, nothing, nothing)
    )


@pytest.mark.parametrize(
    ("announced", "error", "ran_into"),
    [
        (2, Interrupted("generation 2 is announced"), "; it ran into: "),
        (2, RuntimeError(f"{WRAPPED}Interrupted: generation 2 is announced"), "; it ran into: "),
        (2, RuntimeError(f"{WRAPPED}RuntimeError: {PEER_CLOSED}"), "; it ran into: "),
        pytest.param(1, GivenUp(RESTART), f"; it ran into: {RESTART}", id="a pause"),
        pytest.param(1, None, "\n", id="a process that was to take another's place"),
    ],
)
def test_a_rank_without_a_fault_of_its_own_requests_a_restart(announced, error, ran_into, caplog):
    state = RankState(4, {}, is_fresh=error is None)
    with pytest.raises(SystemExit) as ended:
        recovery(announced=announced).rejoin(state, error=error)
    assert ended.value.code == EXIT_RESTART_ME
    assert f"rank 3 ends: {RESTART}{ran_into}" in caplog.text


def test_a_rank_with_a_fault_of_its_own_leaves_the_traceback():
    error = RuntimeError("UCE ERROR")
    with pytest.raises(RuntimeError) as raised:
        recovery(announced=1).rejoin(RankState(4, {}), error=error)
    assert raised.value is error


def test_the_batch_of_a_step_in_flight_is_kept_by_a_plan_that_fails():
    state = RankState(74, {})
    batch: Any = ["the batch of step 75"]
    flying: Any = SimpleNamespace(number=75, data=batch, vote=None, is_dirty=True)
    state.in_flight = flying
    plan = RepairPlan(mode=RepairMode.ROLL_BACK, step=72, rolls_back=True)
    recovery(announced=2)._end_step_in_flight(state, plan)
    assert state.batch is batch
    assert state.is_dirty, "the optimizer was running, and the next plan has to know"
    assert state.in_flight is None


class Counting:
    """A loader of batches of 8 samples."""

    def __init__(self, position: int) -> None:
        self.position = position

    def next_step(self) -> None:
        self.position += 8

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}


@pytest.mark.parametrize(("is_held", "position"), [(True, 88), (False, 80)])
def test_a_rank_passes_over_what_the_others_have_and_gives_up_the_batch_it_holds(is_held, position):
    batches = tuple(
        SkippedBatch(step=11, start=start, stop=start + 8, loss=None, grad_norm=None)
        for start in (72, 80, 88)
    )
    loader: Any = Counting(position)  # a batch that is held was handed out
    state = RankState(10, {}, batch=["of 80"] if is_held else None, skipped=batches[:1])
    state.catch_up(batches, loader)
    assert (state.batch, state.skipped) == (None, batches)
    assert state.data == {"position": 96}


@pytest.mark.parametrize(("target", "goes_back"), [(3, False), (2, True)])
def test_a_rank_that_is_given_a_state_takes_no_snapshot_of_its_own(target, goes_back):
    taken: list[str] = []
    parts: Any = SimpleNamespace(
        extra={"data": {}},
        restore=lambda _tensors: None,
        adopt=lambda _extra, _fill: taken.append("snapshot"),
        load_state_dict=lambda _data: None,
    )
    own = recovery(announced=2)
    own.snapshots = parts
    own.training = cast("Any", SimpleNamespace(loader=parts))
    own.checkpointer = cast("Any", SimpleNamespace(live=parts))
    moves = (Move(source=0, target=target),)
    plan = RepairPlan(mode=RepairMode.ROLL_BACK, step=72, rolls_back=True, moves=moves)
    own._roll_back(RankState(74, {}), plan)
    assert taken == ["snapshot"] * goes_back


@pytest.mark.parametrize(
    ("savers", "vote", "done"),
    [
        ((3, 2), Vote(step=6, loss=1.5, grad_norm=2.0), ["record 6: 1.5", "save 6"]),
        ((2,), Vote(step=6, loss=1.5, grad_norm=2.0), []),
        ((3, 2), None, ["save 6"]),
    ],
)
def test_a_last_save_takes_the_record_of_a_step_that_was_applied_in_the_recovery(
    savers, vote, done
):
    calls: list[str] = []

    def add(step: int, vote: Vote, _loader: object, *, step_s: float) -> None:
        assert step_s > 0
        calls.append(f"record {step}: {vote.loss}")

    own: Any = recovery(announced=2)
    own.groups.client.close = lambda: None
    own.context.job = SimpleNamespace(engine=SimpleNamespace(grace_s=30.0))
    own.training = SimpleNamespace(loader=None)
    own.records = SimpleNamespace(add=add, surviving=dict)
    own.checkpointer = SimpleNamespace(
        last_save=lambda step, _savers, **_: calls.append(f"save {step}")
    )
    plan = RepairPlan(mode=RepairMode.LAST_SAVE, step=6, savers=savers)
    with pytest.raises(SystemExit) as ended:
        own._save_and_end(RankState(6, {}, vote=vote), plan)
    assert ended.value.code == EXIT_RESTART_ME
    assert calls == done
