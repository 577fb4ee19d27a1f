"""Questions to Slurm, from one of the nodes that it has given."""

from __future__ import annotations

import logging
import subprocess

from perdure.training.engines.launched.identity import NodeIdentity
from perdure.training.engines.launched.platforms import Platform

ANSWER_S = 10.0  # Slurm kills 30 s after its SIGTERM (KillWait), and the run has to save

_log = logging.getLogger("perdure.launch")


def is_cancelled(identity: NodeIdentity) -> bool:
    """Whether a person has cancelled the allocation of a node; every other end is none.

    Slurm shows a job that is ending as COMPLETING, whatever has ended it. Its filter knows more.
    """
    if not identity.allocation or identity.platform not in (Platform.SLURM, Platform.MPI):
        return False
    command = ["squeue", "-h", "-t", "CANCELLED", "-o", "%A", "-j", identity.allocation]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=ANSWER_S,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("Slurm does not tell whether the job was cancelled: %s", error)
        return False
    return identity.allocation in done.stdout.split()
