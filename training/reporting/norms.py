"""A threshold for the gradient norm, proposed from the norms that a run has shown.

A fixed number suits no two models: the proposal is a high quantile of the run's own norms, after
the warm-up, with a margin. Norms are of gradients before clipping; steps are completed optimizer
steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from perdure.training.journal.events import StepRecord
from perdure.training.reporting.pictures import new_figure, png_of

MIN_STEPS = 100
QUANTILE = 0.999
MARGIN = 2.0
# Norms fall steeply at the beginning, with or without a warm-up of the learning rate.
_BEGINNING = 0.05


@dataclass(frozen=True, slots=True)
class NormProposal:
    """A proposed threshold, with the norms that it comes from.

    Attributes:
        from_step: first step that counts.
        num_steps: steps that count.
        median: of their norms.
        quantile: the value of `QUANTILE` among them.
        largest: the largest of them.
        largest_step: its step.
        threshold: proposed for restart.abnormal_grad_norm.
        above: steps that would have been abnormal.
    """

    from_step: int
    num_steps: int
    median: float
    quantile: float
    largest: float
    largest_step: int
    threshold: float
    above: tuple[int, ...]


def norms_of_steps(records: Mapping[int, StepRecord]) -> dict[int, float]:
    """List the finite gradient norms of steps, in their order."""
    norms = ((step, records[step].grad_norm) for step in sorted(records))
    return {step: norm for step, norm in norms if norm is not None and math.isfinite(norm)}


def propose_threshold(norms: Mapping[int, float], *, warmup_steps: int) -> NormProposal | None:
    """Propose a threshold; None: fewer than `MIN_STEPS` steps show a norm after the warm-up.

    Args:
        norms: by step.
        warmup_steps: of the learning rate; they do not count.
    """
    if not norms:
        return None
    first = max(warmup_steps, round(_BEGINNING * max(norms))) + 1
    counted = {step: norm for step, norm in norms.items() if step >= first}
    if len(counted) < MIN_STEPS:
        return None
    ordered = sorted(counted.values())
    largest_step = max(counted, key=lambda step: counted[step])
    quantile = ordered[math.ceil(QUANTILE * len(ordered)) - 1]
    threshold = _round_up(MARGIN * quantile)
    return NormProposal(
        from_step=min(counted),
        num_steps=len(counted),
        median=ordered[len(ordered) // 2],
        quantile=quantile,
        largest=counted[largest_step],
        largest_step=largest_step,
        threshold=threshold,
        above=tuple(step for step, norm in counted.items() if norm >= threshold),
    )


def _round_up(value: float) -> float:
    """Round up to two significant digits: a threshold is no measurement."""
    if value <= 0:
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.6g}")


def norm_picture(norms: Mapping[int, float], proposal: NormProposal) -> bytes:
    """Draw the norm of every step with the quantile and the threshold, as PNG."""
    figure = new_figure(10, 4.5)
    axes = figure.add_subplot()
    axes.plot(list(norms), list(norms.values()), color="#1f5fa8", linewidth=0.8)
    quantile = f"{QUANTILE:.1%} quantile {proposal.quantile:.3g}"
    axes.axhline(proposal.quantile, color="#2e7d32", linestyle="--", linewidth=1.0, label=quantile)
    threshold = f"proposed threshold {proposal.threshold:g}"
    axes.axhline(proposal.threshold, color="#c0392b", linewidth=1.0, label=threshold)
    axes.axvspan(0, proposal.from_step, color="#000000", alpha=0.06, label="not counted")
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("gradient norm before clipping")
    axes.grid(alpha=0.25)
    axes.legend(loc="upper right")
    return png_of(figure)
