"""The order in which the UI lists the artifacts of a flow run."""

from __future__ import annotations

from uuid import UUID

import pytest

from perdure.tasks.artifacts import TOP, Artifacts

HIGH, LOW = UUID(int=0xF << 124), UUID(int=0x7 << 124)


@pytest.mark.parametrize("name", ["attempts", "loss"])
def test_what_needs_a_person_stands_at_the_top_even_if_it_comes_last(name):
    artifacts = Artifacts("run", None)
    assert artifacts._is_in_order(name, LOW)
    assert not artifacts._is_in_order(name, HIGH)
    assert artifacts._is_in_order(TOP, HIGH)
    assert not artifacts._is_in_order(TOP, LOW)
