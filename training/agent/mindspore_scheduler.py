"""The scheduler of a MindSpore cluster whose ranks the agent starts itself, without msrun.

The first node's agent starts it as msrun does: the job's own command in the role of the scheduler,
which stays inside `init()`. Ranks whose scheduler is gone train into nowhere for half a minute.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LOG = "scheduler.log"


def cluster_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return MindSpore's variables of a rank, by the variables that the agent gives each rank."""
    return {
        "MS_ROLE": "MS_WORKER",
        "MS_NODE_ID": variables["RANK"],
        "MS_WORKER_NUM": variables["WORLD_SIZE"],
        "MS_SCHED_HOST": variables["MASTER_ADDR"],
        "MS_SCHED_PORT": variables["MASTER_PORT"],
        "MS_TOPO_TIMEOUT": variables.get("MS_TOPO_TIMEOUT", "600"),
        "RANK_ID": variables["RANK"],
        "RANK_SIZE": variables["WORLD_SIZE"],
        "DEVICE_ID": variables["LOCAL_RANK"],
    }


@dataclass(slots=True)
class MindSporeScheduler:
    """The scheduler's process.

    Attributes:
        log: its output.
    """

    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(
        cls, command: tuple[str, ...], variables: Mapping[str, str], *, cwd: str, log: Path
    ) -> MindSporeScheduler:
        """Start it, with the command and the variables of the first rank.

        Raises:
            OSError: it does not start.
        """
        environment = {**variables, "MS_ROLE": "MS_SCHED", "MS_NODE_ID": "scheduler"}
        for name in ("RANK", "LOCAL_RANK", "RANK_ID", "DEVICE_ID", "PERDURE_HEARTBEAT"):
            environment.pop(name, None)  # it is no rank
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        return cls(process, log)

    @property
    def has_failed(self) -> bool:
        """Whether it has ended while ranks still need it."""
        return self.process.poll() not in (None, 0)

    def end(self) -> None:
        """Kill it: no rank is left. Without `release()` it would wait for half a minute."""
        self.process.kill()
        self.process.wait()
