"""The variables of a process beside its job's own: its platform's and its rank's.

Times are seconds.
"""

from __future__ import annotations

import os
from pathlib import Path

from perdure.training.agent.command_line import of_node
from perdure.training.wire.agent import AgentConfig, StartOrder


def platform_variables(
    config: AgentConfig, order: StartOrder, folder: Path, proc_start_cnt: int
) -> dict[str, str]:
    """The variables that ModelArts and Volcano set in a training container, and our own.

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
        "MA_PROC_START_CNT": str(proc_start_cnt),
        "MA_FAILOVER_TERMINATION_GRACE_PERIOD_SECONDS": str(order.failover_grace_s),
        "VC_TASK_INDEX": str(config.member),
        "VC_WORKER_NUM": str(order.num_nodes),
        "VC_WORKER_HOSTS": ",".join(order.hosts),
        "PERDURE_RUN_ID": config.run_id,
        "PERDURE_NODE": config.node,
        "PERDURE_PLACEMENT": str(order.placement),
        "PERDURE_ATTEMPT": str(order.attempt),
        **({"PERDURE_REJOIN_S": f"{order.rejoin_s:g}"} if order.rejoin_s else {}),
    }


def rank_variables(
    config: AgentConfig, order: StartOrder, rank: int, local_rank: int
) -> dict[str, str]:
    """The variables by which a process knows its place, in torch's names.

    Args:
        config: of the agent.
        order: the attempt.
        rank: global rank, or the index of the node where the command is a launcher.
        local_rank: on this node.
    """
    node = of_node(config.member, order.num_nodes, order.variables)
    if order.is_launcher:
        # torchrun sets these itself, and a plain script must not mistake itself for a rank.
        return node
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
