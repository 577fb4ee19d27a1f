"""The shortest part of a list that still fails: delta debugging.

Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input" (IEEE TSE 28, 2002):
without one of ever smaller pieces, as long as what remains fails. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shrink(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """A part of `items` that fails, and does not without any one of its items.

    Args:
        items: that fail together.
        fails: whether a part of them, in their order, still does; the fewer calls the better.
    """
    left = list(items)
    if fails([]):
        return []
    num_pieces = 2
    while len(left) > 1:
        pieces = _cut(left, num_pieces)
        smaller = next((piece for piece in pieces if len(pieces) > 1 and fails(piece)), None)
        if smaller is not None:
            left, num_pieces = smaller, 2
            continue
        others = (_without(pieces, number) for number in range(len(pieces)))
        # Of two pieces, each is what remains without the other.
        smaller = next((one for one in others if num_pieces > 2 and fails(one)), None)
        if smaller is not None:
            left, num_pieces = smaller, max(num_pieces - 1, 2)
        elif num_pieces >= len(left):
            break
        else:
            num_pieces = min(num_pieces * 2, len(left))
    return left


def _cut(items: list[T], num_pieces: int) -> list[list[T]]:
    bounds = [len(items) * n // num_pieces for n in range(num_pieces + 1)]
    return [items[a:b] for a, b in itertools.pairwise(bounds)]


def _without(pieces: list[list[T]], number: int) -> list[T]:
    return [item for n, piece in enumerate(pieces) if n != number for item in piece]
