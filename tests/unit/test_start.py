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


@pytest.mark.parametrize("program", [AGENT, COMMAND], ids=["agent and worker", "command and flow"])
def test_a_program_imports_neither_torch_nor_the_diagnosis_automaton_before_it_needs_them(program):
    subprocess.run([sys.executable, "-c", program], check=True)
