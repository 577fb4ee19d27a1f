"""The undisturbed runs that curves are compared with, made once in a session."""

from __future__ import annotations

import signal

import pytest

from tests.process.harness import Running


@pytest.fixture(scope="session", autouse=True)
def interruptible():
    """A shell that starts tests in the background has SIGINT ignored, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def undisturbed_pair(bench) -> Running:
    """The two-rank job without a fault."""
    running = bench.start(bench.pair("undisturbed-pair", env={"PACE_S": "0"}))
    assert running.finish() == 0, running.out
    return running


@pytest.fixture(scope="session")
def undisturbed(bench) -> Running:
    """The small job without a fault: what every curve is compared with."""
    running = bench.start(bench.job("undisturbed", env={"PACE_S": "0"}))
    assert running.finish() == 0, running.out
    return running
