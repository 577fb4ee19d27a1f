"""Preparation of a node for an attempt: variables of its processes, folder, checks.

A node's disk outlives containers: it has a folder for each life of a run's name. Checks run on a
supervisor's order before any attempt starts. Times are seconds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from perdure.training.commands.arguments import NNODES, NODE_RANK, read_script
from perdure.training.config.job import RESERVED_NAMES, Job
from perdure.training.environment import interface_variables
from perdure.training.masking import SECRETS_ENV
from perdure.training.node_checks.runner import NodeProgram
from perdure.training.platforms.forms import GRACE, NO_LIMIT
from perdure.training.processes import RANK_VARIABLES
from perdure.training.wire.agent import AgentConfig, CheckOrder, StartOrder
from perdure.training.wire.node import Check, NodeTask

LIFE_PREFIX = "life-"
PROC_START_CNT = "MA_PROC_START_CNT"
LAST_SAVE_S = 5.0  # after the processes, for saves that are nowhere else
# Arguments by which torchrun meets on its own machine: told of the other nodes beside them, it
# would wait for these without end.
_ALONE = re.compile(
    r"(?<![\w-])--(standalone(?![\w-])|nnodes[= ]1(:1)?(?![\d:])"
    r"|rdzv[-_]endpoint[= ](localhost|127\.))"
)
_COMMENT = re.compile(r"(?m)(?:^|(?<=\s))#.*$")


def platform_variables(
    config: AgentConfig, order: StartOrder, folder: Path, proc_start_cnt: int
) -> dict[str, str]:
    """Return the variables that ModelArts and Volcano set in a training container, and our own.

    Names follow ModelArts' list of container environment variables; MA_SCHEDULE_CNT and
    MA_PROC_START_CNT show a re-entrant script which kind of restart it is in.
    """
    mount = str(folder)
    return {
        "MASTER_ADDR": order.master_addr,
        "MASTER_PORT": str(order.master_port),
        "MA_CURRENT_IP": order.hosts[config.member],
        "MA_NUM_GPUS": str(order.slots_per_node),
        "MA_NUM_HOSTS": str(order.num_nodes),
        "MA_TASK_NAME": "worker",
        "MA_HOME": os.environ.get("HOME", mount),
        "MA_JOB_DIR": str(Path(order.cwd).resolve()),
        "MA_MOUNT_PATH": mount,
        "MA_LOG_DIR": order.log_path or mount,
        "MA_SCHEDULE_CNT": str(config.schedule_cnt),
        PROC_START_CNT: str(proc_start_cnt),
        GRACE: str(unmount_after_s(order.job)),
        "VC_TASK_INDEX": str(config.member),
        "VC_WORKER_NUM": str(order.num_nodes),
        "VC_WORKER_HOSTS": ",".join(order.hosts),
        "PERDURE_RUN_ID": config.run_id,
        "PERDURE_NODE": config.node,
        "PERDURE_PLACEMENT": str(order.placement),
        "PERDURE_ATTEMPT": str(order.attempt),
        **({"PERDURE_REJOIN_S": f"{order.rejoin_s:g}"} if order.rejoin_s else {}),
    }


def attempt_variables(
    environment: Mapping[str, str], order: StartOrder, secret_variables: Mapping[str, str]
) -> dict[str, str]:
    """Return what an attempt's processes inherit, and what the job sets for them.

    The supervisor may itself run as a rank of another program: its rank is not theirs.
    """
    foreign = RESERVED_NAMES | RANK_VARIABLES
    inherited = {name: value for name, value in environment.items() if name not in foreign}
    secrets = {SECRETS_ENV: ",".join(secret_variables)} if secret_variables else {}
    return {**inherited, **order.variables, **secret_variables, **secrets}


def unmount_after_s(job: Job) -> int:
    """After how long an ending container has no volumes, by the job or by the platform itself."""
    text = os.environ.get(GRACE, "")
    is_platforms = job.restart.unmount_after_s == NO_LIMIT and text.isdecimal()
    return int(text) if is_platforms else job.restart.unmount_after_s


def leaving_grace_s(job: Job, grace_s: float) -> float:
    """How long processes may live in a container that goes away: the last saves need its volumes.

    Args:
        job: the run's job.
        grace_s: limit where the volumes stay until all is done.
    """
    after_s = unmount_after_s(job)
    return grace_s if after_s < 0 else min(grace_s, max(after_s - LAST_SAVE_S, after_s / 2))


def rank_variables(
    config: AgentConfig, order: StartOrder, rank: int, local_rank: int
) -> dict[str, str]:
    """Return the variables by which a process knows its place, in torch's names.

    The rank of a launcher is the index of its node.
    """
    # Scripts of other launchers read these; the job's own value has precedence.
    count = {} if NNODES in order.variables else {NNODES: str(order.num_nodes)}
    node = {NODE_RANK: str(config.member), **count}
    if order.is_launcher:
        # torchrun sets these itself, and a plain script must not mistake itself for a rank.
        return {**node, **_torchrun_variables(config, order)}
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(order.slots_per_node * order.num_nodes),
        "LOCAL_WORLD_SIZE": str(order.slots_per_node),
        "NODE_RANK": str(config.member),
        "GROUP_RANK": str(config.member),
    }
    if order.is_command:
        return {**node, **place}  # its rank 0 opens the store at MASTER_PORT
    return {
        **place,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": config.run_id,
    }


def _torchrun_variables(config: AgentConfig, order: StartOrder) -> dict[str, str]:
    """Return the defaults of torchrun's arguments that make one gang of all nodes.

    Its own arguments have precedence, and so have the job's variables. A single node needs no
    address: torchrun chooses a free port there, also for a second launcher beside it.
    """
    values = {"PET_NPROC_PER_NODE": str(order.slots_per_node)}
    if order.num_nodes > 1 and not _stands_alone(order):
        values |= {
            "PET_NNODES": str(order.num_nodes),
            "PET_NODE_RANK": str(config.member),
            "PET_MASTER_ADDR": order.master_addr,
            "PET_MASTER_PORT": str(order.master_port),
        }
    return {name: value for name, value in values.items() if name not in order.variables}


def _stands_alone(order: StartOrder) -> bool:
    """Whether the command, or a script that it names, has torchrun meet on each node alone."""
    scripts = (read_script(part, Path(order.cwd)) for part in order.command)
    texts = (" ".join(order.command), *(text for text in scripts if text is not None))
    return any(_ALONE.search(_COMMENT.sub("", text)) for text in texts)


def node_folder(base: Path, created_s: float) -> Path:
    """Return the folder of a run below the folder of its name.

    Args:
        base: folder of the run's name on the node.
        created_s: when the run was created, seconds since the epoch.
    """
    return base / f"{LIFE_PREFIX}{created_s:.0f}"


class NodeChecks:
    """The checks of one container's node.

    Args:
        config: the agent's configuration.
        folder: the container's folder.
    """

    def __init__(self, config: AgentConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._program = NodeProgram()

    def run(self, order: CheckOrder) -> tuple[Check, ...]:
        """Check the node; takes seconds."""
        task = NodeTask(
            job=order.job,
            node=self._config.node,
            folder=str(self._folder),
            node_folder=self._config.node_folder,
            slots=order.slots_per_node,
            first_rank=self._config.member * order.slots_per_node,
            world_size=order.num_nodes * order.slots_per_node,
            state_bytes=order.state_bytes,
            is_new=order.is_new,
            gang_host=order.gang_host,
            gang_port=order.gang_port,
            timeout_s=order.timeout_s,
            pings=order.pings,
        )
        environment = {**interface_variables(self._config.host), **os.environ, **order.variables}
        return self._program.run(task, environment)

    def end(self) -> None:
        """End a check that is running."""
        self._program.end()
