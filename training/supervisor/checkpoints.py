"""The checkpoints of a run: which may be removed, which tiers hold them, which a command saved.

The run's ledger and fence say which attempt may be reading or writing; `perdure.storage.collect`
decides. Ages are differences of two times of the store. Times are seconds, steps completed
optimizer steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from perdure.storage.checkpoint import CheckpointStore, Tier
from perdure.storage.checkpoint_server.publish import shares_on_disk
from perdure.storage.collect import InUse, Listing, Removal, Rules, decide, take_listing
from perdure.storage.errors import PermanentError
from perdure.storage.local import LocalStore
from perdure.storage.share import SaveId
from perdure.training.agent.checkpoint_server import HELD_FILE, MemoryInventory
from perdure.training.config.job import Job
from perdure.training.journal.events import StepRecord
from perdure.training.journal.history import RunHistory
from perdure.training.journal.ledger import Ledger
from perdure.training.journal.steps import read_kept_steps
from perdure.training.processes import is_alive


def removals(
    job: Job,
    checkpoints: CheckpointStore,
    *,
    garbage_after_s: float,
    with_retention: bool,
) -> list[Removal]:
    """List what to delete of a run now, and why; nothing is deleted.

    Args:
        job: names the run and its retention policy.
        checkpoints: in the run's store.
        garbage_after_s: age from which the remains of a broken save are garbage.
        with_retention: whether the job's retention policy is applied, too.

    Raises:
        StorageError: the store does not answer.
        ValueError: the age is negative.
    """
    now_s = checkpoints.store.now_s()  # before the listing, which may take long: nothing is older
    # The ledger is read after the listing: an attempt that has started since restores the newest
    # whole step, and the newest two are never deleted.
    listing = take_listing(checkpoints)
    history = Ledger(checkpoints.store, job.run_id).read()
    in_use = in_use_by(history, checkpoints.read_fence())
    policy = None
    if with_retention:
        best = job.checkpoint.keep_best is not None
        policy = job.checkpoint.retention(losses_of(checkpoints, listing) if best else None)
    rules = Rules(garbage_after_s=garbage_after_s, retention=policy)
    return decide(listing, rules=rules, in_use=in_use, now_s=now_s)


def in_use_by(history: RunHistory, fence: tuple[int, int] | None) -> InUse:
    """Judge what the run's attempt may be reading and writing.

    Args:
        history: an empty history does not show whether an attempt is alive.
        fence: (placement, attempt) that owns the run.
    """
    view = history.open_attempt
    if view is not None:
        reading = frozenset({view.started.from_step})
        return InUse(is_living=True, reading=reading, is_restoring=view.first_step is None)
    # An attempt that owns the run and is not in the ledger yet, or an empty ledger: who knows.
    newest = history.attempts[-1].key if history.attempts else None
    has_ended = newest is not None and (fence is None or fence <= newest)
    return InUse(is_living=not has_ended)


def losses_of(checkpoints: CheckpointStore, listing: Listing) -> dict[int, float]:
    """Read the training loss of the committed steps, as far as it is on record."""
    recorded = read_kept_steps(checkpoints.store, checkpoints.run_id)
    losses = ((step, _loss_of(checkpoints, step, recorded)) for step in listing.committed)
    return {step: loss for step, loss in losses if loss is not None}


def _loss_of(
    checkpoints: CheckpointStore, step: int, recorded: Mapping[int, StepRecord]
) -> float | None:
    if step in recorded:
        return recorded[step].loss
    try:
        return checkpoints.manifest(step).loss
    except PermanentError:
        return None


def node_tiers(home: Path, run_id: str) -> dict[int, list[Tier]]:
    """Find by step the tiers of this machine that hold the share of every rank.

    Args:
        home: Perdure's folder on this machine.
        run_id: whose nodes run here.
    """
    nodes = home / "runs" / run_id / "nodes"
    tiers: defaultdict[int, list[Tier]] = defaultdict(list)
    for tier, held in ((Tier.MEMORY, _in_memory(nodes)), (Tier.DISK, _on_disk(nodes, run_id))):
        for step in _whole(held):
            tiers[step].append(tier)
    return dict(tiers)


def _whole(held: Iterable[tuple[SaveId, int]]) -> set[int]:
    ranks: defaultdict[SaveId, set[int]] = defaultdict(set)
    for save, rank in held:
        ranks[save].add(rank)
    return {save.step for save, saved_ranks in ranks.items() if len(saved_ranks) == save.world_size}


def _in_memory(nodes: Path) -> Iterator[tuple[SaveId, int]]:
    for path in nodes.glob(f"*/*/{HELD_FILE}"):
        try:
            held = MemoryInventory.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError):
            continue  # its container is just going away
        if is_alive(held.pid, held.process_started_s):
            yield from held.saves


def _on_disk(nodes: Path, run_id: str) -> Iterator[tuple[SaveId, int]]:
    for folder in nodes.glob("*/*/checkpoints"):
        for written in shares_on_disk(CheckpointStore(LocalStore(folder), run_id)):
            yield written.share.save_id, written.share.rank


@dataclass(frozen=True, slots=True)
class ProgramSave:
    """A complete checkpoint of a command, as it is listed.

    Attributes:
        attempt: PLACEMENT.ATTEMPT that saved it.
        is_kept: whether it is still there; None: not known on this machine.
    """

    step: int
    written_at_s: float
    size_bytes: int
    path: str
    attempt: str
    is_kept: bool | None


def saves_are_known(job: Job) -> bool:
    """Whether the checkpoints of a job's program are on record."""
    return not job.worker.is_command or job.worker.checkpoints is not None


def program_saves(history: RunHistory) -> list[ProgramSave]:
    """List what a command has saved, by steps; where a path was written again, the last save."""
    by_path = {record.path: record for record in history.checkpoints if record.path is not None}
    saves = [
        ProgramSave(
            step=checkpoint.step,
            written_at_s=checkpoint.written_s or checkpoint.at_s,
            size_bytes=checkpoint.size_bytes or 0,
            path=path,
            attempt=f"{checkpoint.placement}.{checkpoint.attempt}",
            # Elsewhere than on this machine a path says nothing here, unless it is there.
            is_kept=Path(path).exists() or (False if _is_local(history) else None),
        )
        for path, checkpoint in by_path.items()
    ]
    return sorted(saves, key=lambda save: save.step)


def _is_local(history: RunHistory) -> bool:
    engine = (history.job or {}).get("engine") or {}
    return engine.get("kind") == "local"
