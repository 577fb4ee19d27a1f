"""The variables that a training container has on a platform. Times are seconds."""

from __future__ import annotations

import os
from pathlib import Path

from training.wire.agent import AgentConfig, StartOrder


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
        "MA_JOB_DIR": order.cwd,
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
    }
