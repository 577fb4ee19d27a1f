"""Tests on emulated NPUs, which `make test-npu` starts in the lab."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs the emulator where there is none."""
    if "ASCEND_EMULATOR" in os.environ:
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip("needs the lab: make test-npu"))
