"""The stacks of all ranks in a hang, beside the logs of the attempt in the store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perdure.storage.objects import ObjectStore
from perdure.training.agent.log_collection import logs_prefix
from perdure.training.diagnosis.standstill import RankProgress, standstill_of
from perdure.training.wire.agent import NodeText

HANG_REPORT = "hang.txt"

Stacks = Iterable[tuple[str, NodeText]]


def save_hang_report(
    store: ObjectStore,
    run_id: str,
    attempt: tuple[int, int],
    stacks: Stacks,
    progress: Sequence[RankProgress],
) -> str:
    """Save the stacks, and say where they are.

    Args:
        store: of the run.
        run_id: of the run.
        attempt: placement and attempt.
        stacks: of every process, with its node.
        progress: of the ranks, from which their headline comes.

    Raises:
        StorageError: they could not be saved.
    """
    key = f"{logs_prefix(run_id, *attempt)}{HANG_REPORT}"
    store.put(key, _text(stacks, progress).encode())
    placement, number = attempt
    command = f"perdure logs {run_id} --attempt {placement}.{number} --file {HANG_REPORT}"
    return f"`{command}` prints them. Stacks of all ranks: {key}."


def _text(stacks: Stacks, progress: Sequence[RankProgress]) -> str:
    cause = standstill_of(tuple(progress))
    lines = [cause.line, *cause.ranks] if cause is not None else []
    printed = [f"{one.name} on {node}\n{one.text.rstrip()}" for node, one in stacks]
    return "\n\n".join(["\n".join(lines), *printed]) + "\n"
