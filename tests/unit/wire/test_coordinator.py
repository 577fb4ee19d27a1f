"""The messages of an attempt's members as they go over the wire."""

from __future__ import annotations

import math

import pytest
from pydantic import SecretStr, ValidationError

from perdure.training.recovery.protocol import GenerationReport, NewGeneration, Plan, Trains
from perdure.training.recovery.repair import RankReport, RepairMode, RepairPlan, Vote
from perdure.training.recovery.replicas import ParallelLayout, RankOrder
from perdure.training.wire.coordinator import FROM_MEMBER, TO_MEMBER, AgentJoined, WorkerJoined
from perdure.training.wire.transport import dump_line


@pytest.mark.parametrize(
    "message",
    [
        WorkerJoined(token=SecretStr("s3cret"), rank=3, pid=17),
        AgentJoined(token=SecretStr("s3cret"), node="node-1", ranks=(2, 3)),
    ],
)
def test_a_token_goes_over_the_wire_in_clear_and_nowhere_else(message):
    line = dump_line(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert FROM_MEMBER.validate_json(line) == message
    assert "s3cret" not in f"{message!r} {message} {message.model_dump_json()}"


@pytest.mark.parametrize("norm", [math.inf, -math.inf, 3.5])
def test_a_number_that_is_infinite_arrives_as_it_is_both_ways(norm):
    # A scaler lets a step of infinite gradients pass, so votes hold such numbers.
    vote = Vote(step=4, loss=1.0, grad_norm=norm)
    report = GenerationReport(generation=2, report=RankReport(rank=0, step=4, votes=(vote,)))
    assert FROM_MEMBER.validate_json(dump_line(report)) == report
    plan = Plan(generation=2, plan=RepairPlan(mode=RepairMode.TRAIN, step=4, vote=vote))
    assert TO_MEMBER.validate_json(dump_line(plan)) == plan


@pytest.mark.parametrize(
    "layout",
    [
        None,
        ParallelLayout(dp=2, tp=4, optimizer_shards=2),
        ParallelLayout(dp=8, ep=2, etp=1, order=RankOrder.DP_LAST),
    ],
)
def test_a_layout_that_is_known_late_arrives_as_it_is(layout):
    message = Trains(generation=2, step=4, layout=layout)
    assert FROM_MEMBER.validate_json(dump_line(message)) == message


def test_a_rank_of_an_older_release_trains_without_a_layout():
    line = b'{"op": "trains", "generation": 2, "step": 4}'
    assert FROM_MEMBER.validate_json(line) == Trains(generation=2, step=4)


def test_a_loss_that_is_no_number_arrives_as_such():
    vote = Vote(step=4, loss=math.nan, grad_norm=1.0)
    plan = Plan(generation=2, plan=RepairPlan(mode=RepairMode.ACCEPT, step=4, vote=vote))
    received = TO_MEMBER.validate_json(dump_line(plan))
    assert isinstance(received, Plan)
    assert received.plan.vote is not None
    assert math.isnan(received.plan.vote.loss)


@pytest.mark.parametrize(
    "line",
    [b"", b"{}", b"[]", b'{"op": "explode"}', b'{"op": "generation", "number": 2, "more": 1}'],
)
def test_what_is_not_known_is_refused(line):
    with pytest.raises(ValidationError):
        TO_MEMBER.validate_json(line)
    with pytest.raises(ValidationError):
        FROM_MEMBER.validate_json(line)


def test_an_order_to_a_member_is_not_a_report_of_one():
    with pytest.raises(ValidationError):
        FROM_MEMBER.validate_json(dump_line(NewGeneration(number=2)))
