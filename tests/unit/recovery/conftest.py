"""Attempts in training, from which tests of recovery start."""

from __future__ import annotations

import pytest

from tests.unit.recovery.attempts import HSDP, AttemptHarness


@pytest.fixture
def harness() -> AttemptHarness:
    """Four ranks that hold the same state."""
    return AttemptHarness.of()


@pytest.fixture
def sharded() -> AttemptHarness:
    """Two ranks hold each shard: 0 and 2, 1 and 3."""
    return AttemptHarness.of(HSDP)
