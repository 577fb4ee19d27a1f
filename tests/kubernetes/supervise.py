"""Supervise a job in a process of its own, which a test may kill: `... supervise HOME JOB.json`."""

from __future__ import annotations

import sys
from pathlib import Path

from perdure.training.config.job import Job
from perdure.training.drill.driver import RunDriver
from tests.kubernetes.runs import KEYS, LIMIT_S


def main() -> None:
    """Run the job to its end, or until this process is killed."""
    home, file = Path(sys.argv[1]), Path(sys.argv[2])
    job = Job.model_validate_json(file.read_text(encoding="utf-8"))
    ended = RunDriver(home, limit_s=LIMIT_S, credentials=KEYS).run(job).ended
    sys.exit(0 if ended == "completed" else ended)


if __name__ == "__main__":
    main()
