"""The reference program, slowed down so that faults from outside hit it on any machine.

Its pauses do not change the numbers.
"""

from __future__ import annotations

import os
import time

from perdure.training.config.job import Job
from perdure.training.drill.job import PACE_ENV
from perdure.training.trainer import pretrain


def main(job: Job) -> None:
    """Train up to the job's target step."""
    pace_s = float(os.environ.get(PACE_ENV, "0"))
    pretrain.main(job, in_step=lambda: time.sleep(pace_s))
