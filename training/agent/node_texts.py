"""What a node knows beside what its workers print: device logs, driver tools, stacks."""

from __future__ import annotations

from perdure.training.agent.evidence import device_health, device_logs, stacks_of, without_secrets
from perdure.training.agent.workers import WorkerGroup
from perdure.training.wire.agent import NodeText


def evidence_of(group: WorkerGroup, tail_bytes: int) -> tuple[NodeText, ...]:
    """Device logs, and the output of the driver's tools; asks these one by one.

    Args:
        group: processes of the newest attempt.
        tail_bytes: of each log.
    """
    # One folder of a launcher has the logs of all its ranks.
    is_known = not group.order.is_launcher
    folders = {group.device_folder(r): r if is_known else None for r in group.ranks}
    devices = range(group.order.slots_per_node)
    texts = (*device_logs(folders, tail_bytes), *device_health(devices))
    return without_secrets(texts, group.secrets)


def worker_stacks(group: WorkerGroup) -> tuple[NodeText, ...]:
    """The stack of every thread of the workers; runs other programs."""
    # The command lines of the processes are among them.
    return without_secrets(stacks_of(group.stacks_targets()), group.secrets)
