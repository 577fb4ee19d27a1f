"""The checks of a node made on this machine, without containers. Times are seconds."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Mapping

from training.environment import variables_of
from training.health.monitor.checking import NodeProgram
from training.job import Job
from training.processes import free_port
from training.wire.check import Check, NodeTask

MAX_RANKS = 4
LOOPBACK = "127.0.0.1"


def check_here(job: Job, *, environment: Mapping[str, str]) -> tuple[Check, ...]:
    """Check this machine as a node of the job, with the gang as processes of it.

    Args:
        job: whose nodes are meant; of its ranks at most MAX_RANKS are started.
        environment: of the processes, with the keys of the store.
    """
    ranks = min(job.engine.world_size, MAX_RANKS)
    variables = variables_of(job)
    with tempfile.TemporaryDirectory(prefix="perdure-preflight-") as folder:
        task = NodeTask(
            job=job.model_dump_json(),
            node=socket.gethostname(),
            folder=folder,
            node_folder=None,
            slots=ranks,
            first_rank=0,
            world_size=ranks,
            is_new=True,
            gang_host=LOOPBACK if job.preflight.gang else None,
            gang_port=free_port(),
            timeout_s=job.preflight.limit_s,
            with_store=job.storage.credentials_block is None,
        )
        return NodeProgram().run(task, {**environment, **variables})
