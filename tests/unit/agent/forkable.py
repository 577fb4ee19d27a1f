"""What tests have a fork server run: functions without arguments, each a whole process."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def print_findings() -> None:
    """Print what this process finds."""
    findings: dict[str, Any] = {
        "environment": dict(os.environ),
        "arguments": sys.argv[1:],
        "cwd": str(Path.cwd()),
        "leads_session": os.getsid(0) == os.getpid(),
        "parent": os.getppid(),
        "name": Path("/proc/self/comm").read_text().strip(),
        "input": sys.stdin.read(),
        "has_torch": "torch" in sys.modules,
        "has_colorsys": "colorsys" in sys.modules,
    }
    print(json.dumps(findings))


def end_with() -> None:
    """Exit with sys.exit() of the argument, a JSON value."""
    sys.exit(json.loads(sys.argv[1]))


def fail() -> None:
    """End by an exception."""
    raise ValueError("own")


def print_pid() -> None:
    """Print the pid, into a file that is named after the request."""
    print(os.getpid())


def stay() -> None:
    """Print that it is up, and stay."""
    print("up", flush=True)
    time.sleep(600)
