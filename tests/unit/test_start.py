"""What a command or a container imports before it does anything: everybody waits for that."""

from __future__ import annotations

import subprocess
import sys

import pytest

AGENT = """
import sys, perdure.training.agent.agent
assert "torch" not in sys.modules
import perdure.training.runtime.session
assert "hyperscan" not in sys.modules
"""
COMMAND = """
import sys, perdure.cli, perdure.flows.pretrain
assert "torch" not in sys.modules
"""
FACE = """
import sys, perdure
assert not {"torch", "pydantic", "prefect"} & sys.modules.keys()
assert {"join", "checkpoints", "load_job"} <= set(dir(perdure))
assert not {"torch", "pydantic", "prefect"} & sys.modules.keys()
"""


@pytest.mark.parametrize(
    "program", [AGENT, COMMAND, FACE], ids=["agent and worker", "command and flow", "public face"]
)
def test_a_program_imports_nothing_that_takes_long_before_it_needs_it(program):
    subprocess.run([sys.executable, "-c", program], check=True)
