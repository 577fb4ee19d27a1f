"""Which NPUs of this machine the nodes of the local engine have: each its own, as real nodes do.

torch_npu counts the devices of a process from 0, whatever ASCEND_RT_VISIBLE_DEVICES makes of them,
so that every node's local rank r uses device r of those that it sees.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from perdure.training.wire.node import VISIBLE

_DEVICE = re.compile(r"davinci([0-9]+)")


def devices_of_node(
    number: int, slots: int, environment: Mapping[str, str], *, dev: Path = Path("/dev")
) -> dict[str, str]:
    """The variable that shows a node its devices; empty where this machine has no NPUs.

    With fewer devices than all nodes and spares need, the last ones begin with the first devices
    again: a spare has no use for them before another node is gone.

    Args:
        number: of the node, from 0.
        slots: devices of each node.
        environment: of the supervisor; its ASCEND_RT_VISIBLE_DEVICES limits what there is.
        dev: where the driver's device files are.
    """
    visible = environment.get(VISIBLE)
    if visible:
        devices = [part.strip() for part in visible.split(",")]
    else:
        matches = (_DEVICE.fullmatch(file.name) for file in dev.iterdir())
        devices = [str(index) for index in sorted(int(match[1]) for match in matches if match)]
    num_nodes = len(devices) // slots
    if num_nodes == 0:
        return {VISIBLE: visible} if visible else {}
    first = number % num_nodes * slots
    return {VISIBLE: ",".join(devices[first : first + slots])}
