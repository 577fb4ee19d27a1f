"""Shrinking: the fewest faults that still fail."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from training.drill.shrink import shrink

NUM = 40


@given(st.sets(st.integers(0, NUM - 1), max_size=4))
def test_what_fails_together_is_all_that_is_left(culprits):
    def fails(part: Sequence[int]) -> bool:
        return culprits <= set(part)

    assert shrink(range(NUM), fails) == sorted(culprits)


@given(st.lists(st.sets(st.integers(0, NUM - 1), min_size=1, max_size=3), min_size=1, max_size=3))
def test_of_several_reasons_one_is_left_and_nothing_of_it_can_go(reasons):
    def fails(part: Sequence[int]) -> bool:
        return any(reason <= set(part) for reason in reasons)

    left = shrink(range(NUM), fails)
    assert fails(left)
    assert not any(fails([one for one in left if one != gone]) for gone in left)


def test_what_fails_without_any_fault_is_not_looked_for_among_the_faults():
    asked: list[int] = []

    def fails(part: Sequence[int]) -> bool:
        asked.append(len(part))
        return True

    assert shrink(range(NUM), fails) == []
    assert asked == [0]


def test_one_culprit_among_fifty_is_found_in_a_few_runs():
    asked: list[int] = []

    def fails(part: Sequence[int]) -> bool:
        asked.append(len(part))
        return 37 in part

    assert shrink(range(50), fails) == [37]
    assert len(asked) < 20
