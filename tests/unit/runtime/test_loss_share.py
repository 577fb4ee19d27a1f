"""Losses that a program has divided by the micro-batches already."""

from __future__ import annotations

import logging

import pytest
import torch

from perdure.training.runtime.step_loop.batches import MAX_LOOKS, DivisionCheck, divisor_of

WEIGHT = torch.ones(4, requires_grad=True)


def loss() -> torch.Tensor:
    return (WEIGHT * 3.0).square().mean()


@pytest.mark.parametrize(
    ("made", "divisor"),
    [
        (lambda: loss() / 4, 4.0),
        (lambda: loss() / torch.tensor(4), 4.0),
        (lambda: loss() * 0.25, 4.0),
        (lambda: 0.25 * loss(), 4.0),
        ((loss() / 4).sum, None),
        (loss, None),
        (lambda: loss() * 0, None),
        (lambda: loss() * loss(), None),
        (lambda: loss() / loss(), None),
        (lambda: torch.ones(()), None),
    ],
)
def test_the_last_division_of_a_loss_is_known(made, divisor):
    assert divisor_of(made()) == divisor


@pytest.mark.parametrize(
    ("made", "num_micro_batches", "is_named"),
    [
        (lambda: loss() / 8, 8, True),
        (lambda: loss() * (1 / 6), 6, True),
        (lambda: loss() / 8, 4, False),
        (lambda: loss() / 1, 1, False),
        (loss, 8, False),
    ],
)
def test_a_division_by_the_micro_batches_is_named_once(made, num_micro_batches, is_named, caplog):
    noticed: list[str] = []
    check = DivisionCheck(noticed.append)
    with caplog.at_level(logging.WARNING, logger="perdure"):
        for _ in range(3):
            check.check(made(), num_micro_batches)
    assert len(caplog.messages) == int(is_named)
    assert all(f"divided by {num_micro_batches}" in line for line in caplog.messages)
    assert noticed == caplog.messages


def test_only_the_first_losses_are_looked_at(caplog):
    check = DivisionCheck()
    for _ in range(MAX_LOOKS):
        check.check(loss(), 8)
    check.check(loss() / 8, 8)
    assert caplog.messages == []
