"""Tests of Perdure on emulated NPUs; they run in the lab, `python -m tests.ascend.lab`."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.training.drill.driver import RunOutcome
from tests.ascend.product import runs


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the runs."""
    return tmp_path_factory.mktemp("npu")


@pytest.fixture(scope="session")
def undisturbed(home: Path) -> RunOutcome:
    """The job on four NPUs without a fault."""
    return runs.run(home, "undisturbed")
