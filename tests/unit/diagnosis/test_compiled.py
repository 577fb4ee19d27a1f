"""The patterns of the diagnosis are compiled beside the run, and no recovery waits for that."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
from perdure.training.diagnosis import compiled
from perdure.training.diagnosis.scan import scan_text

def compile_here(_patterns):
    raise AssertionError("compiled in the process of the supervisor")

compiled._compile = compile_here
compiled.start_compiler()
compiled.start_compiler()
findings = scan_text("RuntimeError: CUDA out of memory", year=2026).findings
assert findings, "the diagnosis works with the file of the other process"
assert compiled._compiler.poll() == 0
"""


@pytest.mark.long
def test_another_process_compiles_the_patterns_and_the_diagnosis_waits_for_it(perdure_home):
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
    (compiled,) = (perdure_home / "cache").iterdir()
    assert compiled.name.startswith("diagnosis-")
