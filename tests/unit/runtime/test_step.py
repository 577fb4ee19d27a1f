"""One optimizer step: all of it or nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perdure.training.config.model import ModelSpec, OptimizerSpec
from perdure.training.liveness.heartbeat import HeartbeatReader, HeartbeatWriter
from perdure.training.recovery.repair import StepPhase, Vote
from perdure.training.runtime.errors import NotApplied, NumericAnomaly
from perdure.training.runtime.program import Training
from perdure.training.runtime.step_loop.step import (
    Comparison,
    Limits,
    Step,
    StepContext,
    StepRequests,
)
from perdure.training.trainer.model import Decoder
from perdure.training.trainer.pretrain import make_optimizer, make_scheduler
from tests.unit.runtime.trainees import Loader

pytestmark = pytest.mark.usefixtures("group")

VOCAB = 32
SPEC = ModelSpec(num_layers=1, hidden_size=16, num_heads=2, seq_len=8)
OPTIMIZER = OptimizerSpec(lr=0.01, warmup_steps=4)
CLIP_NORM = 0.5
Spoil = Callable[[int, torch.Tensor], torch.Tensor]
ADAM = {"betas", "eps", "weight_decay"}
INPUTS = torch.randint(0, VOCAB, (8, 8), generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS.roll(-1, dims=1)


@dataclass
class Trainee:
    """A model in training, and steps over it."""

    training: Training
    heartbeat: HeartbeatWriter
    requests: StepRequests = field(default_factory=lambda: StepRequests(stop=False, save=False))
    limits: Limits = field(default_factory=Limits)
    skips: bool = False
    faults: dict[str, BaseException] = field(default_factory=dict)  # by the point they come at
    recoverable: tuple[type[BaseException], ...] = ()
    factor: float = 1.0
    asked: list[int] = field(default_factory=list)
    points: list[str] = field(default_factory=list)

    def reached(self, point: str, _number: int) -> None:
        self.points.append(point)
        if point in self.faults:
            raise self.faults.pop(point)

    def loss_factor(self, _number: int) -> float:
        return self.factor

    def _requests(self, number: int) -> StepRequests:
        self.asked.append(number)
        return self.requests

    def step(self, number: int = 1, *, micro_batches: int = 1) -> Step:
        faults: Any = self
        context = StepContext(
            training=self.training,
            device=torch.device("cpu"),
            heartbeat=self.heartbeat,
            faults=faults,
            requests=self._requests,
            is_recoverable=lambda error: isinstance(error, self.recoverable),
            limits=self.limits,
            comparison=Comparison(((0,),), every_steps=1),
            skips=self.skips,
        )
        batch = zip(INPUTS.chunk(micro_batches), TARGETS.chunk(micro_batches), strict=True)
        return Step(number, list(batch), context)

    def take(self, step: Step, *, spoil: Spoil = lambda _, loss: loss) -> Step:
        """Take the step, its losses by micro-batch changed by `spoil`."""
        with step:
            for index, (inputs, targets) in enumerate(step.micro_batches()):
                step.backward(spoil(index, self.training.model(inputs, targets)))
            step.apply()
        return step

    def state(self) -> dict[str, Any]:
        """Everything that a step may change."""
        scaler = self.training.scaler
        return {
            "model": {n: p.tolist() for n, p in self.training.model.named_parameters()},
            "optimizers": [plain(one.state_dict()) for one in self.training.optimizers],
            "schedulers": [dict(one.state_dict()) for one in self.training.schedulers],
            "scaler": dict(scaler.state_dict()) if scaler is not None else None,
        }


def plain(value: Any) -> Any:
    """A copy with lists for tensors, so that it may be compared."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else copy.copy(value)


@pytest.fixture
def make(tmp_path):
    def make(*, ddp: bool = True, scaler: torch.amp.GradScaler | None = None) -> Trainee:
        torch.manual_seed(0)
        plain = Decoder(SPEC, VOCAB)
        model: nn.Module = DistributedDataParallel(plain) if ddp else plain
        optimizer = make_optimizer(model, OPTIMIZER)
        scheduler = make_scheduler(optimizer, OPTIMIZER, steps=20)
        training = Training(model, [optimizer], [scheduler], scaler, Loader(), CLIP_NORM)
        return Trainee(training, HeartbeatWriter(tmp_path / "heartbeat-0"))

    return make


def weights(trainee: Trainee) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainee.training.model.parameters()])


def vote_of(step: Step) -> Vote:
    assert step.vote is not None
    return step.vote


def test_a_step_is_one_of_plain_pytorch(make):
    trainee, plain = make(), make(ddp=False)
    step = trainee.take(trainee.step())
    model, (optimizer,) = plain.training.model, plain.training.optimizers
    loss = model(INPUTS, TARGETS)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    optimizer.step()
    lr = optimizer.param_groups[0]["lr"]
    assert step.vote == Vote(step=1, loss=loss.item(), grad_norm=norm.item(), lr=lr)
    assert vote_of(step).grad_norm == norm.item() > CLIP_NORM
    assert torch.equal(weights(trainee), weights(plain))


@pytest.mark.parametrize("ddp", [True, False])
@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_accumulated_micro_batches_are_one_big_batch(make, micro_batches, ddp):
    whole, parts = make(ddp=ddp), make(ddp=ddp)
    for number in (1, 2, 3):
        big = whole.take(whole.step(number))
        small = parts.take(parts.step(number, micro_batches=micro_batches))
        assert vote_of(small).loss == pytest.approx(vote_of(big).loss, rel=1e-5)
        assert vote_of(small).grad_norm == pytest.approx(vote_of(big).grad_norm, rel=1e-4)
    torch.testing.assert_close(weights(parts), weights(whole), rtol=1e-3, atol=1e-5)


def test_a_loss_that_is_divided_by_the_micro_batches_already_is_named(make, caplog):
    trainee = make()
    trainee.take(trainee.step(micro_batches=4), spoil=lambda _, loss: loss / 4)
    (line,) = caplog.messages
    assert "divided by 4, the number of micro-batches" in line


def test_gradients_are_reduced_with_the_last_micro_batch_only(make):
    trainee = make()
    step = trainee.step(micro_batches=3)
    flags = [trainee.training.model.require_backward_grad_sync for _ in step.micro_batches()]
    assert flags == [False, False, True]


def test_batch_is_for_a_step_of_one_micro_batch(make):
    trainee = make()
    inputs, targets = trainee.step().batch()
    assert torch.equal(inputs, INPUTS)
    assert torch.equal(targets, TARGETS)
    with pytest.raises(ValueError, match=r"2 micro-batches, loop over step\.micro_batches"):
        trainee.step(micro_batches=2).batch()


def test_an_applied_step_advances_the_schedule_and_leaves_no_gradients(make):
    trainee = make()
    trainee.take(trainee.step())
    assert trainee.training.schedulers[0].get_last_lr()[0] == pytest.approx(0.01 * 2 / 4)
    assert all(p.grad is None for p in trainee.training.model.parameters())


def test_a_body_that_ends_without_apply_is_an_error(make):
    trainee = make()
    before = trainee.state()
    with pytest.raises(NotApplied, match=r"step 7: .*step\.apply"), trainee.step(7) as step:
        step.backward(trainee.training.model(*step.batch()))
    assert trainee.state() == before


def test_an_error_in_the_body_is_not_hidden(make):
    trainee = make()
    with pytest.raises(ZeroDivisionError), trainee.step():
        raise ZeroDivisionError


def added(value: float, *, to: int) -> Spoil:
    """Add to the loss of one micro-batch."""
    return lambda index, loss: loss + value if index == to else loss


def steep(_index: int, loss: torch.Tensor) -> torch.Tensor:
    """What is added is 0 with an infinite slope."""
    return loss + (loss - loss.detach()).sqrt()


@pytest.mark.parametrize(
    ("spoil", "limits", "words", "culprit"),
    [
        *(
            (added(float(value), to=when), Limits(), r"loss is -?(nan|inf)", 0)
            for value in ("nan", "inf", "-inf")
            for when in (0, 1)
        ),
        # The reduced gradient does not show whose it was.
        (steep, Limits(), r"gradient norm is (nan|inf)", None),
        (added(0, to=0), Limits(loss=0.5), r"loss is 3\.\d+, the limit is 0\.5", 0),
        (
            added(0, to=0),
            Limits(grad_norm=0.25),
            r"gradient norm is \d\.\d+, the limit is 0\.25",
            None,
        ),
    ],
)
def test_an_abnormal_step_is_an_anomaly_with_its_culprit_and_applies_nothing(
    make, spoil, limits, words, culprit
):
    trainee = make()
    trainee.take(trainee.step(1))
    trainee.limits = limits
    before = trainee.state()
    step = trainee.step(2, micro_batches=2)
    with pytest.raises(NumericAnomaly, match=f"^{words} at step 2$"):
        trainee.take(step, spoil=spoil)
    assert vote_of(step).culprit == culprit
    assert trainee.state() == before
    assert step.phase is StepPhase.PREPARED
    assert not step.is_applied


@pytest.mark.parametrize(
    ("limits", "is_abnormal"),
    [
        (Limits(loss=3.0), True),
        (Limits(loss=3.0001), False),
        (Limits(grad_norm=7.0), True),
        (Limits(grad_norm=7.0001), False),
    ],
)
def test_a_limit_that_is_just_reached_counts(limits, is_abnormal):
    vote = Vote(step=1, loss=3.0, grad_norm=7.0)
    assert (limits.refusal(vote, has_scaler=False) is not None) == is_abnormal


@pytest.mark.parametrize("scaled", [False, True])
def test_an_abnormal_step_that_is_skipped_leaves_everything_for_the_next_batch(make, scaled):
    def trainee() -> Trainee:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
        return make(scaler=scaler)

    plain, skipping = trainee(), trainee()
    plain.take(plain.step(1))
    skipping.take(skipping.step(1))
    skipping.skips, skipping.limits = True, Limits(grad_norm=1e3)
    before, skipping.factor = skipping.state(), 1e4
    step = skipping.take(skipping.step(2))
    assert step.is_skipped
    assert not step.is_applied
    assert step.phase is StepPhase.RUN
    assert skipping.state() == before
    skipping.factor = 1.0
    assert skipping.take(skipping.step(2)).is_applied
    plain.take(plain.step(2))
    assert skipping.state() == plain.state()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_a_scaler_skips_the_update_of_gradients_that_overflow(make):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    trainee = make(scaler=scaler)
    before = weights(trainee)
    step = trainee.take(trainee.step(), spoil=lambda _, loss: loss * 1e4)
    assert step.is_applied
    assert torch.equal(weights(trainee), before)
    assert scaler.get_scale() == 2.0**119


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_loss_that_overflows_is_the_scalers_until_its_scale_shows_that_it_does_not_help(
    make, value
):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    trainee = make(scaler=scaler)
    before = weights(trainee)
    for scale in (2.0, 1.0, 0.5):
        step = trainee.take(trainee.step(), spoil=lambda _, loss: loss * value)
        assert step.is_applied
        assert scaler.get_scale() == scale
    assert torch.equal(weights(trainee), before)
    with pytest.raises(NumericAnomaly, match=r"^loss is "):
        trainee.take(trainee.step(), spoil=lambda _, loss: loss * value)


def test_a_scaler_that_is_switched_off_handles_nothing(make):
    trainee = make(scaler=torch.amp.GradScaler("cpu", enabled=False))
    before = weights(trainee)
    with pytest.raises(NumericAnomaly, match=r"^loss is inf"):
        trainee.take(trainee.step(), spoil=lambda _, loss: loss * float("inf"))
    assert torch.equal(weights(trainee), before)


@pytest.mark.parametrize(
    ("loss", "norm", "has_scaler", "words"),
    [
        (1.0, float("inf"), True, None),
        (float("nan"), float("nan"), True, None),
        (float("nan"), 1.0, True, "loss is nan"),
        (1.0, float("nan"), False, "gradient norm is nan"),
        (9.0, float("inf"), True, None),
        (9.0, 1.0, True, "loss is 9, the limit is 5"),
    ],
)
def test_a_scaler_handles_what_has_infinite_gradients(loss, norm, has_scaler, words):
    vote = Vote(step=1, loss=loss, grad_norm=norm)
    assert Limits(loss=5.0).refusal(vote, has_scaler=has_scaler) == words


def test_a_scaled_step_is_the_unscaled_one(make):
    scaled, plain = make(scaler=torch.amp.GradScaler("cpu", init_scale=1024.0)), make()
    first = scaled.take(scaled.step())
    second = plain.take(plain.step())
    assert vote_of(first).loss == vote_of(second).loss
    assert vote_of(first).grad_norm == pytest.approx(vote_of(second).grad_norm)
    torch.testing.assert_close(weights(scaled), weights(plain))


@pytest.mark.parametrize(
    "requested",
    [(True, False, False), (False, True, False), (False, False, True), (True, True, True)],
)
def test_the_requests_for_the_step_boundary_are_part_of_the_vote(make, requested):
    trainee = make()
    stop, save, pause = requested
    trainee.requests = StepRequests(stop=stop, save=save, pause=pause)
    vote = vote_of(trainee.take(trainee.step(9)))
    assert (vote.stop, vote.save, vote.pause) == requested
    assert trainee.asked == [9]


def test_the_heartbeat_has_how_long_the_vote_took(make, tmp_path):
    trainee = make()
    trainee.take(trainee.step())
    beat = HeartbeatReader.of(tmp_path, 0).read()
    assert beat is not None
    assert beat.latency_ns > 0
    assert beat.left == beat.entered


def test_a_program_without_a_scheduler_is_fine(make):
    trainee = make()
    trainee.training.schedulers = []
    trainee.take(trainee.step())
    assert trainee.training.lr == pytest.approx(0.01 / 4)


def test_the_rate_on_record_is_that_of_the_step(make):
    trainee = make()
    schedule = trainee.training.schedulers[0]
    for number in (1, 2, 3):
        (wanted,) = {float(rate) for rate in schedule.get_last_lr()}
        assert vote_of(trainee.take(trainee.step(number))).lr == wanted
    trainee.training.schedulers = []
    trainee.training.optimizers[0].param_groups[0]["lr"] = torch.tensor(0.25)
    assert vote_of(trainee.take(trainee.step(4))).lr == 0.25


def test_every_optimizer_runs_in_a_step(make):
    whole, split = make(), make()
    split.training.optimizers = [
        torch.optim.AdamW([p], lr=OPTIMIZER.lr, **{k: v for k, v in group.items() if k in ADAM})
        for one in split.training.optimizers
        for group in one.param_groups
        for p in group["params"]
    ]
    split.training.schedulers = [
        make_scheduler(one, OPTIMIZER, steps=20) for one in split.training.optimizers
    ]
    for number in (1, 2, 3):
        whole.take(whole.step(number))
        split.take(split.step(number))
    assert torch.equal(weights(whole), weights(split))


def test_a_step_passes_its_points_in_their_order(make):
    trainee = make()
    trainee.take(trainee.step())
    expected = ["start", "backward", "prepared", "voted", "applying", "half_applied", "applied"]
    assert trainee.points == expected


@pytest.mark.parametrize(
    ("point", "phase"),
    [
        ("backward", StepPhase.RUN),
        ("prepared", StepPhase.PREPARED),
        ("voted", StepPhase.VOTED),
        ("applying", StepPhase.APPLYING),
        ("half_applied", StepPhase.APPLYING),
    ],
)
def test_a_recoverable_fault_leaves_the_step_quietly_with_how_far_it_was(make, point, phase):
    trainee = make()
    fault = ConnectionError("broken")
    trainee.recoverable, trainee.faults = (ConnectionError,), {point: fault}
    step = trainee.take(trainee.step())
    assert step.error is fault
    assert fault.__traceback__ is None, "its frames hold what the step made"
    assert (step.phase, step.is_applied) == (phase, False)
    assert step.is_dirty == (phase is StepPhase.APPLYING)


@pytest.mark.parametrize("is_in_apply", [True, False])
def test_a_step_that_is_applied_is_not_applied_again(make, is_in_apply):
    plain, cut = make(), make()
    plain.take(plain.step())
    cut.recoverable = (ConnectionError,)
    step = cut.step()
    if is_in_apply:
        cut.faults = {"applied": ConnectionError()}
        cut.take(step)
    else:
        with step:
            cut.take(step)
            raise ConnectionError  # in a collective behind apply()
    assert step.error is not None
    assert (step.is_applied, step.is_dirty) == (True, False)
    step.finish(step.vote)
    assert cut.state() == plain.state()


@pytest.mark.parametrize("point", ["backward", "voted", "applied"])
def test_state_beside_is_updated_once_for_each_step_that_is_applied(make, point):
    cut = make()
    updates: list[float] = []
    cut.training.on_applied = lambda: updates.append(cut.training.lr)
    cut.recoverable, cut.faults = (ConnectionError,), {point: ConnectionError()}
    step = cut.take(cut.step())
    if not step.is_applied:
        assert updates == []
        cut.take(step)
    step.finish(step.vote)
    assert len(updates) == 1


def test_a_fault_of_another_kind_is_the_programs_own(make):
    trainee = make()
    trainee.recoverable, trainee.faults = (ConnectionError,), {"backward": KeyError("own")}
    with pytest.raises(KeyError):
        trainee.take(trainee.step())


@pytest.mark.parametrize(
    ("limits", "faults", "phase"),
    [
        (Limits(), {"prepared": ConnectionError()}, StepPhase.PREPARED),
        (Limits(), {"voted": ConnectionError()}, StepPhase.VOTED),
        # A user may accept an abnormal step.
        (Limits(loss=0.5), {}, StepPhase.PREPARED),
    ],
)
def test_a_gradient_that_is_held_is_applied_later_as_if_nothing_had_happened(
    make, limits, faults, phase
):
    plain, cut = make(), make()
    undisturbed = plain.take(plain.step())
    cut.recoverable = (ConnectionError, NumericAnomaly)
    cut.limits, cut.faults = limits, dict(faults)
    step = cut.take(cut.step())
    assert (step.phase, step.is_applied) == (phase, False)
    agreed = undisturbed.vote if faults else step.vote
    step.finish(agreed)
    assert step.is_applied
    assert not step.is_dirty
    assert step.vote == agreed
    assert cut.state() == plain.state()


def test_a_limit_is_for_the_loss_of_all_micro_batches_together(make):
    trainee = make()
    trainee.limits = Limits(loss=5.0)
    trainee.take(trainee.step(micro_batches=4))
    assert trainee.asked == [1]


def test_the_loss_of_a_schedule_that_runs_backward_itself_is_reported(make):
    trainee = make()
    step = trainee.step(micro_batches=2)
    with step:
        losses = [trainee.training.model(*batch) / 2 for batch in step.micro_batches()]
        for loss in losses:
            loss.backward()
        step.report_loss(torch.stack(losses).sum())
        step.apply()
    assert step.vote == trainee_vote(make(), micro_batches=2)


def trainee_vote(trainee: Trainee, *, micro_batches: int) -> Vote | None:
    """What an ordinary step agrees on."""
    return trainee.take(trainee.step(micro_batches=micro_batches)).vote


def test_an_injected_fault_multiplies_the_loss_of_a_step_and_its_gradients_alike(make):
    plain, drilled = make(), make()
    drilled.factor = 100.0
    first, second = plain.take(plain.step()), drilled.take(drilled.step(micro_batches=2))
    assert vote_of(second).loss == pytest.approx(100 * vote_of(first).loss, rel=1e-4)
    assert vote_of(second).grad_norm == pytest.approx(100 * vote_of(first).grad_norm, rel=1e-4)


def test_an_injected_fault_strikes_a_program_that_runs_backward_itself(make):
    plain, drilled = make(), make()
    drilled.factor = 100.0
    step = drilled.step()
    with step:
        for batch in step.micro_batches():
            loss = step.drilled(drilled.training.model(*batch))
            loss.backward()
            step.report_loss(loss)
        step.apply()
    first = vote_of(plain.take(plain.step()))
    assert vote_of(step).loss == pytest.approx(100 * first.loss, rel=1e-4)
    assert vote_of(step).grad_norm == pytest.approx(100 * first.grad_norm, rel=1e-4)
