"""Tests of Perdure on emulated NPUs; they run in the lab, `python -m tests.ascend.lab`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.ascend.product import runs
from training.drill.driver import RunOutcome


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs the emulator where there is none."""
    if "ASCEND_EMULATOR" in os.environ:
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip("needs the lab: make test-npu"))


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the runs."""
    return tmp_path_factory.mktemp("npu")


@pytest.fixture(scope="session")
def undisturbed(home: Path) -> RunOutcome:
    """The job on four NPUs without a fault."""
    return runs.run(home, "undisturbed")
