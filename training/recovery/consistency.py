"""Whether ranks that should hold the same values do: what differs, on whom, and what it means.

Each rank brings hashes of its weights and reduced gradients to the vote of a step. What is not
sharded is equal on all ranks; what is sharded, on the ranks that hold the same shard. Pure. Steps
are completed optimizer steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

FIRST_STEPS = 2  # the second sees what the optimizer made of the first
OFF = "watch.consistency_every_steps: 0"
_NAMED_RANKS = 8


@dataclass(frozen=True, slots=True)
class Hashes:
    """What one rank brings to a vote.

    Attributes:
        weights: of parameters that are not sharded, before the step.
        gradients: of the same parameters, after the reduction and before clipping.
        shards: of the gradients of this rank's shards, and of what the program compares.
    """

    weights: int
    gradients: int
    shards: int


NOTHING = Hashes(0, 0, 0)  # of no values


class Cause(StrEnum):
    """Why ranks differ, as far as the step and the ranks show."""

    PROGRAM = "program"  # it has not reduced gradients, or began with different weights
    CORRUPTION = "corruption"  # values have changed after they were equal


@dataclass(frozen=True, slots=True)
class Difference:
    """Ranks that do not hold what others do.

    Attributes:
        culprits: ranks that differ from most of those they should be equal to; empty where no
            value is that of most ranks.
        text: one line for the user.
    """

    cause: Cause
    culprits: tuple[int, ...]
    text: str


def is_due(step: int, *, aligned_at: int, every_steps: int) -> bool:
    """Whether a step is compared. The same on every rank.

    Args:
        step: the one in work.
        aligned_at: from which all ranks began together: a start, a restore, a repair.
        every_steps: 0: never.
    """
    if every_steps == 0:
        return False
    return step - aligned_at <= FIRST_STEPS or step % every_steps == 0


def find_difference(
    hashes: Sequence[Hashes], groups: Sequence[Sequence[int]], *, step: int, aligned_at: int
) -> Difference | None:
    """What differs in a step, None when nothing does. The same on every rank.

    Args:
        hashes: by rank.
        groups: ranks that hold the same shards, every rank in one of them.
        step: the one in work.
        aligned_at: from which all ranks began together.
    """
    everyone = range(len(hashes))
    weights = _odd_ones(everyone, [rank_hashes.weights for rank_hashes in hashes])
    gradients = _odd_ones(everyone, [rank_hashes.gradients for rank_hashes in hashes])
    of_shards = [rank_hashes.shards for rank_hashes in hashes]
    shards = [_odd_ones(group, of_shards) for group in groups]
    differences = [odd for odd in (weights, gradients, *shards) if odd is not None]
    if not differences:
        return None
    values = "weights" if weights is not None else "gradients"
    is_clear = all(differences)
    culprits = tuple(sorted({rank for odd in differences for rank in odd})) if is_clear else ()
    was_equal = step - aligned_at > FIRST_STEPS
    # In the first steps of a run it is not known which values the user wants.
    if step <= FIRST_STEPS or (not culprits and not was_equal):
        return Difference(Cause.PROGRAM, culprits, _program_text(values, step))
    return Difference(Cause.CORRUPTION, culprits, _corruption_text(values, culprits, step))


def _odd_ones(ranks: Sequence[int], values: Sequence[int]) -> tuple[int, ...] | None:
    """Those that differ from most; empty where there is no most; None where all are equal."""
    counts = Counter(values[rank] for rank in ranks)
    if len(counts) == 1:
        return None
    value, count = counts.most_common(1)[0]
    if 2 * count <= len(ranks):
        return ()
    return tuple(rank for rank in ranks if values[rank] != value)


def _program_text(values: str, step: int) -> str:
    if values == "weights":
        return (
            f"the ranks have different weights at step {step}: build the same on each (one seed) "
            "and wrap the model in DistributedDataParallel or FSDP2 before session.register(); "
            f"for ranks that differ on purpose, {OFF}"
        )
    return (
        f"the ranks have different gradients at step {step}, so that each would train a model of "
        "its own: wrap the model in DistributedDataParallel or FSDP2, and register and call the "
        f"wrapped model; for ranks that differ on purpose, {OFF}"
    )


def _corruption_text(values: str, culprits: Sequence[int], step: int) -> str:
    if not culprits:
        return f"the ranks have different {values} at step {step}, and were equal before"
    named = ", ".join(str(rank) for rank in culprits[:_NAMED_RANKS])
    more = " and others" if len(culprits) > _NAMED_RANKS else ""
    ranks = "rank" if len(culprits) == 1 else "ranks"
    return f"{values} of {ranks} {named}{more} differ from those of most ranks at step {step}"
