"""Steps and losses as programs print them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from perdure.training.commands.progress import LineReader, ProgressFormat, StepTracker, formats
from perdure.training.config.command import ProgressKind, ProgressSpec
from perdure.training.journal.events import StepRecord


def reader(*patterns: str, **fields: Any) -> LineReader:
    return LineReader(ProgressSpec(patterns=patterns, **fields))


OWN = r"^step (?P<step>\d+) loss (?P<loss>\S+)"


def shown(*patterns: str, **fields: Any) -> StepTracker:
    return StepTracker(reader(*(patterns or (OWN,)), **fields).read, 1, 2, num_devices=8)


def take(steps: StepTracker, *lines: str, since_s: float = 0.0, at_s: float = 1.0):
    return steps.take(lines, since_s=since_s, at_s=at_s)


def losses(records: list[StepRecord]) -> list[tuple[int, float | None]]:
    return [(record.step, record.loss) for record in records]


def test_every_kind_has_a_format():
    assert set(formats()) == set(ProgressKind)


@pytest.mark.parametrize("program", formats().values(), ids=lambda program: program.kind)
def test_a_format_finds_in_its_examples_what_they_show(program: ProgressFormat):
    readings = [
        LineReader(ProgressSpec(kind=program.kind)).read(example["line"])
        for example in program.example
    ]
    assert readings == [pytest.approx(example["shows"]) for example in program.example]
    assert any("step" in reading for reading in readings)
    assert any("loss" in reading for reading in readings)
    assert any(not reading for reading in readings), "a line that is none of a step"


def test_a_program_that_counts_from_zero_has_completed_one_step_more():
    assert reader(OWN, counts_from=0).read("step 0 loss 2.5") == {"step": 1, "loss": 2.5}


def test_a_loss_may_be_no_number():
    (record,) = take(shown(), "step 3 loss nan")
    assert record.loss is not None
    assert math.isnan(record.loss)
    assert take(shown(), "step 3 loss unknown") == take(shown(), "step 3 loss -")


def test_what_several_patterns_find_in_a_line_belongs_together():
    read = reader(r"step (?P<step>\d+)", r"gnorm=(?P<grad_norm>\S+)").read
    assert read("step 7 gnorm=0.5") == {"step": 7, "grad_norm": 0.5}


def test_steps_of_one_look_lie_evenly_in_its_time():
    records = take(shown(), *(f"step {n} loss 1" for n in (1, 2, 3, 4)), since_s=10, at_s=12)
    assert [record.at_s for record in records] == [10.5, 11.0, 11.5, 12.0]
    assert [record.step_s for record in records] == [0.0, 0.5, 0.5, 0.5]
    assert {(record.placement, record.attempt) for record in records} == {(1, 2)}


def test_the_time_of_a_step_is_that_between_lines_by_the_number_of_steps():
    steps = shown()
    take(steps, "step 10 loss 1", at_s=10.0)
    (record,) = take(steps, "step 20 loss 1", at_s=15.0)
    assert (record.step_s, steps.stride) == (0.5, 10)


def test_a_step_that_several_ranks_print_is_on_record_once():
    steps = shown()
    assert losses(take(steps, "step 1 loss 2", "step 2 loss 1", "step 1 loss 2")) == [
        (1, 2),
        (2, 1),
    ]
    assert take(steps, "step 2 loss 1", "step 1 loss 2") == []
    assert (steps.step, steps.num_shown) == (2, 2)


def test_a_program_that_its_launcher_has_started_again_counts_from_its_checkpoint():
    steps = shown()
    take(steps, *(f"step {n} loss 1" for n in range(1, 31)))
    assert losses(take(steps, "step 16 loss 9", "step 17 loss 8")) == [(16, 9), (17, 8)]
    assert steps.step == 17


def test_a_loss_that_stands_apart_is_of_the_newest_step():
    steps = shown(r"^bar (?P<step>\d+)", r"^\{'loss': (?P<loss>[\d.]+)")
    assert losses(take(steps, "bar 1", "bar 2")) == [(1, None), (2, None)]
    assert losses(take(steps, "{'loss': 3.5", "bar 10")) == [(10, 3.5)]
    assert take(steps, "bar 11") == [], "from the first loss on, a step has one"
    assert losses(take(steps, "bar 20", "{'loss': 2.5")) == [(20, 2.5)]


def test_a_loss_before_any_step_is_of_none():
    assert take(shown(r"^bar (?P<step>\d+)", r"loss (?P<loss>\S+)"), "loss 3.5") == []


def test_tokens_of_a_device_are_multiplied_by_their_number():
    steps = shown(r"step (?P<step>\d+) loss (?P<loss>\S+) tps (?P<device_tokens_per_s>\S+)")
    (record,) = take(steps, "step 1 loss 1 tps 1,000")
    assert record.tokens_per_s == 8000


def test_a_batch_of_an_epoch_is_a_step_of_all():
    read = LineReader(ProgressSpec(kind=ProgressKind.LIGHTNING)).read
    assert read("Epoch 1:  20%|##  | 2/10 [00:01<00:04, 2.00it/s]")["step"] == 12


def test_a_line_of_many_characters_is_no_line_of_a_step():
    assert reader(r"step (?P<step>\d+)").read("x" * 5000 + " step 1") == {}


def bar(step: int, total: int) -> str:
    return f"{100 * step // total:3d}%|##   | {step}/{total} [00:10<00:50,  4.00it/s]"


LOSS = "{'loss': '2.3', 'grad_norm': '1.0', 'learning_rate': '1e-05', 'epoch': '0.1'}"


def trainer_steps() -> StepTracker:
    kind = ProgressSpec(kind=ProgressKind.TRANSFORMERS)
    return StepTracker(LineReader(kind).read, 1, 1, num_devices=1)


def test_the_bar_of_an_evaluation_between_two_steps_is_no_step_of_the_training():
    steps = trainer_steps()
    take(steps, bar(500, 1000), LOSS)
    take(steps, bar(1, 500), bar(500, 500))
    assert (steps.step, steps.target) == (500, 1000)
    take(steps, bar(501, 1000), bar(1000, 1000), LOSS)
    take(steps, bar(40, 500))
    assert (steps.step, steps.target) == (1000, 1000), "nor the one after the last step"


def test_the_bar_of_an_evaluation_before_the_first_step_gives_way_to_the_training():
    steps = trainer_steps()
    take(steps, bar(1, 500), bar(500, 500))
    take(steps, bar(1, 100), LOSS)
    assert (steps.step, steps.target) == (1, 100)


def test_an_epoch_of_unknown_length_has_that_of_the_one_before():
    line = "epoch: {} step: {}, loss is 1.5".format
    read = LineReader(ProgressSpec(kind=ProgressKind.MINDSPORE)).read
    places = [(1, 1), (1, 2), (1, 3), (2, 1), (2, 3), (3, 2)]
    assert [read(line(*place))["step"] for place in places] == [1, 2, 3, 4, 6, 8]


def test_a_program_that_resumes_in_a_later_epoch_shows_steps_when_one_has_ended():
    line = "epoch: {} step: {}, loss is 1.5".format
    read = LineReader(ProgressSpec(kind=ProgressKind.MINDSPORE)).read
    assert [read(line(3, 1)), read(line(3, 2))] == [{}, {}]
    assert read(line(4, 1))["step"] == 7
    known = LineReader(ProgressSpec(kind=ProgressKind.MINDSPORE, steps_per_epoch=2)).read
    assert known(line(3, 1))["step"] == 5


def test_only_mindspores_lines_lack_the_length_of_an_epoch():
    with pytest.raises(ValueError, match="steps_per_epoch is for kind=mindspore"):
        ProgressSpec(kind=ProgressKind.MINDFORMERS, steps_per_epoch=5)
