"""Run pytest in a new Slurm lab: `python -m tests.slurm ARGUMENTS OF PYTEST`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.slurm.lab import APART, FOLDER_ENV, obstacle, reap_until

INSIDE = "--inside"


def main() -> int:
    """Make the lab's namespace and run pytest there. Returns the exit status."""
    arguments = sys.argv[1:]
    if arguments[:1] == [INSIDE]:
        return reap_until(subprocess.Popen([sys.executable, "-m", "pytest", *arguments[1:]]))
    if reason := obstacle():
        print(f"NOT TESTED on Slurm: {reason}", file=sys.stderr)
        return 1 if os.environ.get("CI") else 0
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="perdure-slurm-") as folder:
        Path(folder).chmod(0o755)  # munge wants its socket to be reached by everybody
        inside = [sys.executable, "-m", "tests.slurm", INSIDE, *arguments]
        environment = {**os.environ, FOLDER_ENV: folder}
        return subprocess.run(["unshare", *APART, *inside], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
