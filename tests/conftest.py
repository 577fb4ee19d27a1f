"""What every test may rely on: a Perdure home of its own, and no settings from outside."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def perdure_home(tmp_path, monkeypatch):
    """A home folder for this test alone."""
    home = tmp_path / "home"
    monkeypatch.setenv("PERDURE_HOME", str(home))
    return home
