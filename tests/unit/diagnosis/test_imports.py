"""What a container has to import, and what it has not."""

from __future__ import annotations

import subprocess
import sys


def test_agent_and_worker_do_without_the_diagnosis_automaton():
    program = (
        "import sys, training.agent.agent, training.runtime.session\n"
        "assert 'hyperscan' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
