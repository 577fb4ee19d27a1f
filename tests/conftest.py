"""What every test may rely on: a Perdure home of its own, and no settings from outside."""

from __future__ import annotations

import logging
import os

import pytest
from hypothesis import settings

from tests.workplace import api, bench, prefect_server, session_home

__all__ = ["api", "bench", "prefect_server", "session_home"]

# A change is judged by the same examples wherever it is tested, however slow the machine; new
# ones are tried with HYPOTHESIS_PROFILE=random.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(autouse=True)
def perdure_home(tmp_path, monkeypatch):
    """A home folder for this test alone."""
    home = tmp_path / "home"
    monkeypatch.setenv("PERDURE_HOME", str(home))
    return home


@pytest.fixture(autouse=True)
def perdure_logger(monkeypatch):
    """For `caplog`, whatever a program that an earlier test ran in this process had set up."""
    logger = logging.getLogger("perdure")
    for name, value in (("handlers", []), ("level", logging.INFO), ("propagate", True)):
        monkeypatch.setattr(logger, name, value)
