"""Programs that a test runs in a process of their own: what a fault leaves stays with a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

LIMIT_S = 300.0
ROOT = Path(__file__).parents[2]


def run(source: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with these variables added to the environment."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        env={**os.environ, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def said(source: str, **variables: str) -> Any:
    """What a program prints as JSON in its last line; it has to end well."""
    done = run(source, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])
