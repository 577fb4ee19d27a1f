"""The end of a launched run, as the platform is told it: a table of exit codes.

The exit code of `perdure launch` is the only word that every platform understands. Each row says
what the platform does with it, as its documents have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from perdure.training.engines.launched.platforms import Platform
from perdure.training.journal.history import RunHistory


class LaunchEnd(StrEnum):
    """What the platform is to do."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    USER_MUST_MEND = "the user must mend"
    START_AGAIN = "start me again"
    START_ELSEWHERE = "start me again elsewhere"


AGAIN = (LaunchEnd.START_AGAIN, LaunchEnd.START_ELSEWHERE)


@dataclass(frozen=True, slots=True)
class PlatformEnd:
    """An end on a platform.

    Attributes:
        code: exit code of every node.
        platform_does: with that code; NODES stands for the nodes at fault.
    """

    code: int
    platform_does: str

    def without(self, nodes: Sequence[str]) -> Self:
        """The end with the names of the nodes at fault."""
        return replace(self, platform_does=self.platform_does.replace("NODES", ",".join(nodes)))


_DONE, _MEND, _AGAIN, _ELSEWHERE = 0, 65, 75, 76
_RETRYABLE, _RETRYABLE_ELSEWHERE = 200, 201  # above 127: a fault of the place, in the row below

_BY_HAND: Mapping[LaunchEnd, PlatformEnd] = {
    LaunchEnd.COMPLETED: PlatformEnd(_DONE, "nothing"),
    LaunchEnd.CANCELLED: PlatformEnd(1, "nothing"),
    LaunchEnd.USER_MUST_MEND: PlatformEnd(_MEND, "nothing"),
    LaunchEnd.START_AGAIN: PlatformEnd(_AGAIN, "nothing: start it again, and the run goes on"),
    LaunchEnd.START_ELSEWHERE: PlatformEnd(_ELSEWHERE, "nothing: start it without NODES"),
}
_SLURM = {
    **_BY_HAND,
    LaunchEnd.START_AGAIN: PlatformEnd(_AGAIN, "the batch script calls scontrol requeue"),
    LaunchEnd.START_ELSEWHERE: PlatformEnd(
        _ELSEWHERE, "the batch script requeues, with ExcNodeList=NODES"
    ),
}
_PODS = {
    **_BY_HAND,
    LaunchEnd.CANCELLED: PlatformEnd(3, "restartPolicy ExitCode: 1 to 127 are permanent"),
    LaunchEnd.USER_MUST_MEND: PlatformEnd(
        _MEND, "restartPolicy ExitCode: 1 to 127 are permanent, the job fails"
    ),
    LaunchEnd.START_AGAIN: PlatformEnd(
        _RETRYABLE, "restartPolicy ExitCode: above 127 the pods are started again"
    ),
    LaunchEnd.START_ELSEWHERE: PlatformEnd(
        _RETRYABLE_ELSEWHERE, "the pods are started again; keep them off NODES"
    ),
}
_MODELARTS = {
    **_BY_HAND,
    LaunchEnd.START_AGAIN: PlatformEnd(
        _RETRYABLE, "a retry, within job-retry-num and with job-unconditional-retry"
    ),
    LaunchEnd.START_ELSEWHERE: PlatformEnd(
        _RETRYABLE_ELSEWHERE, "a retry; take NODES out of the pool"
    ),
}

ENDS: Mapping[Platform, Mapping[LaunchEnd, PlatformEnd]] = {
    Platform.BY_HAND: _BY_HAND,
    Platform.MPI: _BY_HAND,
    Platform.SLURM: _SLURM,
    Platform.MODELARTS: _MODELARTS,
    Platform.ASCEND_OPERATOR: _PODS,
    Platform.KUBEFLOW: _PODS,
    Platform.INDEXED_JOB: _PODS,
}


def end_of(outcome: str, *, is_user_fault: bool, is_short_of_nodes: bool) -> LaunchEnd:
    """Decide what the platform is to do after a run has ended.

    Args:
        outcome: of the run, as the ledger has it.
        is_user_fault: whether its last fault is one of the program, its settings or its data.
        is_short_of_nodes: whether too few healthy nodes were left.
    """
    if outcome == "completed":
        return LaunchEnd.COMPLETED
    if outcome == "cancelled":
        return LaunchEnd.CANCELLED
    if is_short_of_nodes and not is_user_fault:
        return LaunchEnd.START_ELSEWHERE
    return LaunchEnd.USER_MUST_MEND


def again_without(history: RunHistory) -> tuple[LaunchEnd, tuple[str, ...]]:
    """Decide how a run is started again: without the nodes at fault, if there are any.

    A node that was only lost is none: the platform does not give it while it is away.

    Returns:
        The end, and those nodes.
    """
    nodes = tuple(node for node in history.isolated if not history.may_rejoin(node))
    return (LaunchEnd.START_ELSEWHERE if nodes else LaunchEnd.START_AGAIN), nodes
