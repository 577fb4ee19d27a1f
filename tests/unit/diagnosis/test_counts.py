"""How far a program came, by what it prints of its own count."""

from __future__ import annotations

import pytest

from perdure.training.diagnosis.counts import Count, farthest_counts, find_counts, find_target

MEGATRON = "".join(f" [x] iteration {at:8d}/    6000 | lm loss: 2.1 |\n" for at in (140, 150))


def bar(step: int, total: int, name: str = "") -> str:
    return f"\r{name}{100 * step // total:3d}%|##   | {step}/{total} [00:10<00:50,  4.00it/s]"


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        (MEGATRON, [Count(150, 6000, 10, "iteration")]),
        (bar(72, 74, "Train:  ") + bar(73, 74, "Train:  "), [Count(73, 74, 1, "bar")]),
        (bar(19, 100) + bar(20, 100), [Count(20, 100, 1, "bar")]),
        ("step 3/100 loss 2.1\nstep 4/100 loss 2.0\n", [Count(4, 100, 1, "step")]),
        ("global_step: 30 / 300, loss 1.2\n", [Count(30, 300, 30, "step")]),
        ("Steps: [10 of 90]\nSteps: [12 of 90]\n", [Count(12, 90, 2, "step")]),
        ("Epoch 2/10\nEpoch 3/10\n", [Count(3, 10, 1, "epoch")]),
        (
            "Epoch [1/5], Step [100/600]\nEpoch [1/5], Step [200/600]\n",
            [Count(200, 600, 100, "step"), Count(1, 5, 1, "epoch")],
        ),
        ("\x1b[31miter 5/9\x1b[0m\n", [Count(5, 9, 5, "step")]),
    ],
    ids=["Megatron", "named bar", "bar", "step", "global step", "steps of", "epochs", "both",
         "colored"],
)  # fmt: skip
def test_the_last_count_of_each_kind_is_read_with_its_target(text, counts):
    assert find_counts(text) == counts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "iter 150: loss 3.1\n",
        "Eval step 3/100\n",
        "Validation: iteration 3/ 100\n",
        bar(5, 20, "Evaluating: "),
        bar(3, 40, "Epoch 3: "),
        bar(3, 40, "Map: "),
        bar(2, 5),
        "step 3/0\n",
        "downloaded 3/4 files; see http://host/step/3\n",
        "Step [0/90] loss 2.1\nStep [0/90] loss 1.9\n",
    ],
    ids=["nothing", "no target", "eval", "validation", "bar of an evaluation", "bar of an epoch",
         "bar of a data set", "a short bar", "no length", "a path", "the first of each epoch"],
)  # fmt: skip
def test_what_does_not_count_the_training_is_no_count(text):
    assert find_counts(text) == []


def test_the_bar_of_the_training_is_the_one_that_evaluations_interrupt():
    evaluation = bar(1, 50) + bar(50, 50)
    text = bar(19, 74) + evaluation + bar(20, 74) + evaluation
    assert [(count.step, count.target) for count in find_counts(text)] == [(20, 74)]
    at_the_end = bar(74, 74) + evaluation
    assert not any(count.is_short for count in find_counts(at_the_end))
    every_epoch = bar(50, 50) + bar(1, 50) + bar(20, 50)
    assert [(count.step, count.target) for count in find_counts(every_epoch)] == [(20, 50)]


LOSS = "\n{'loss': '2.1', 'grad_norm': '1.0', 'epoch': '0.1'}\n"


def bar_with_loss(step: int, total: int) -> str:
    return f"\r 10%|##   | {step}/{total} [00:10<00:50,  4.00it/s, loss=2.1]"


@pytest.mark.parametrize(
    ("text", "end"),
    [
        (bar(990, 1000) + bar_with_loss(49, 50) + bar_with_loss(50, 50), (50, 50)),
        (bar(60, 100) + LOSS + bar(49, 50) + LOSS + bar(50, 50), (50, 50)),
        (bar(990, 1000) + bar(19, 50) + LOSS + bar(20, 50), (20, 50)),
        (bar(19, 74) + LOSS + bar(20, 74) + bar(1, 50) + bar(50, 50), (20, 74)),
        (bar(20, 74) + LOSS + bar(50, 50) + "\n{'eval_loss': 2.0, 'loss': 2.1}\n", (20, 74)),
        (bar(20, 74) + LOSS + bar(50, 50) + "\nval loss 2.0\n", (20, 74)),
    ],
    ids=[
        "an estimate", "two trainings", "the second is short", "an evaluation at the end",
        "an evaluation and its loss", "a validation and its loss",
    ],
)  # fmt: skip
def test_the_bar_of_the_training_is_the_one_with_losses(text, end):
    assert [(count.step, count.target) for count in find_counts(text)] == [end]


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("python train.py --max-steps 300 --lr 1e-4", 300),
        ("--train-iters=6000", 6000),
        ("  train_iters ..................................... 6000", 6000),
        ("  Total optimization steps = 6,000", 6000),
        ("--training.steps 40", 40),
        ("max_steps=-1, warmup_steps=100, save_steps: 20", None),
    ],
)
def test_settings_name_the_target_of_steps_that_are_printed_without_one(text, target):
    assert find_target(text) == target
    steps = "step 39 loss 2.1\nstep 40 loss 2.0\n"
    counts = [Count(40, target, 1, "step")] if target is not None else []
    assert find_counts(steps, setting=target) == find_counts(f"{text}\n{steps}") == counts


def test_of_several_outputs_the_farthest_count_of_each_kind_remains():
    counts = [
        Count(10, 60, 10, "iteration"),
        Count(60, 60, 10, "iteration"),
        Count(1, 2, 1, "epoch"),
    ]
    assert farthest_counts(counts) == counts[1:]


def test_the_text_of_a_count_says_where_it_ended():
    assert Count(150, 6000, 10, "iteration").text == "ended at iteration 150 of 6000"
    assert Count(40, 300, 1).text == "ended at 40 of 300"
    assert Count(3, 10, 1, "epoch").text == "ended at epoch 3 of 10"
