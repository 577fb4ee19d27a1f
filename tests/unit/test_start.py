"""What a command loads before it does anything: a person waits for that at every command."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["perdure.cli", "flows.pretrain", "training.agent.agent"])
def test_what_runs_beside_training_does_not_load_torch(module):
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
