"""The threshold of the gradient norm that a run's own norms propose."""

from __future__ import annotations

import pytest

from perdure.training.reporting.norms import (
    NormProposal,
    norm_picture,
    propose_threshold,
)
from tests.values import not_none


def norms_of(num_steps: int, level: float = 1.0, **spikes: float) -> dict[int, float]:
    """Norms around a level, with a steep beginning and spikes at steps."""
    noise = [0.8 + 0.4 * (step * 0.618034 % 1) for step in range(num_steps + 1)]
    norms = {step: level * noise[step] for step in range(1, num_steps + 1)}
    norms |= {step: level * 50.0 / step for step in range(1, min(num_steps, 20) + 1)}
    return norms | {int(step.removeprefix("at_")): norm for step, norm in spikes.items()}


def proposed(norms: dict[int, float], warmup_steps: int = 0) -> NormProposal:
    return not_none(propose_threshold(norms, warmup_steps=warmup_steps))


@pytest.mark.parametrize("level", [0.01, 0.4, 1.0, 37.0, 5e4])
def test_the_threshold_follows_the_level_of_the_run(level):
    proposal = proposed(norms_of(2000, level))
    assert 2.0 * 1.1 * level <= proposal.threshold <= 2.0 * 1.3 * level
    assert proposal.above == ()
    assert (proposal.from_step, proposal.num_steps) == (101, 1900)


@pytest.mark.parametrize(
    ("spikes", "above"),
    [({"at_1500": 40.0}, (1500,)), ({"at_700": 9.0, "at_1999": 8.0}, (700, 1999)), ({}, ())],
)
def test_spikes_of_the_past_do_not_raise_it_and_are_counted(spikes, above):
    proposal = proposed(norms_of(4000, **spikes))
    assert proposal.above == above
    assert proposal.largest == max((*spikes.values(), proposal.quantile, proposal.largest))
    assert proposal.threshold < 3.0


@pytest.mark.parametrize(("num_steps", "warmup"), [(0, 0), (99, 0), (104, 0), (2000, 1950)])
def test_too_few_steps_propose_nothing(num_steps, warmup):
    assert propose_threshold(norms_of(num_steps), warmup_steps=warmup) is None


def test_a_warm_up_does_not_count():
    norms = norms_of(1000) | dict.fromkeys(range(1, 301), 100.0)
    assert proposed(norms, warmup_steps=300).threshold < 3.0


def test_the_picture_is_a_png():
    norms = norms_of(300)
    assert norm_picture(norms, proposed(norms)).startswith(b"\x89PNG")
