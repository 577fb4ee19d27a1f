"""The fault of a launcher that has started fewer ranks than the job has; pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from perdure.training.diagnosis.evidence import Evidence
from perdure.training.diagnosis.plain_fault import build_plain_fault
from perdure.training.recovery.faults import Fault, FaultClass

CODE = "SMALL_WORLD"
_WHY = (
    "The launcher of the command did not start all ranks of the job as one gang: fewer ranks train "
    "together than the job describes, or each node trains by itself."
)
_ACTION = (
    "torchrun: leave out --standalone, --nnodes, --node_rank and --nproc_per_node, which Perdure "
    "sets in PET_NNODES and so on. Another launcher: give it ${MA_NUM_HOSTS} nodes, "
    "${VC_TASK_INDEX} as the number of the node, ${MA_NUM_GPUS} ranks per node, ${MASTER_ADDR} and "
    "${MASTER_PORT}. If so few ranks are meant, set engine.nodes and engine.slots_per_node to them."
)


def blame_small_world(evidence: Evidence) -> Iterator[Fault]:
    """Blame the start of a command whose ranks are too few, if they are."""
    small = evidence.small_world
    if small is None:
        return
    fault = build_plain_fault(
        FaultClass.LAUNCH_MISCONFIGURED, evidence, small.line, code=CODE, why=_WHY
    )
    yield replace(fault, action=_ACTION)
