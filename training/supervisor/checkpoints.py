"""The checkpoints of a run: which may be removed, and which tiers of this machine hold them.

Which attempt may be reading or writing comes from the run's ledger and fence;
`perdure.storage.collect` decides. Ages are differences of two times of the store. Times are
seconds, steps completed optimizer steps.

The checkpoints that a command keeps itself, as a supervisor sees them.

Which one it is started from again is decided here once for all nodes, so that none begins anew
beside others that resume. Steps are completed optimizer steps.
"""

from __future__ import annotations

import string
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from perdure.storage.checkpoint import CheckpointStore, Tier
from perdure.storage.checkpoint_server.publish import shares_on_disk
from perdure.storage.collect import InUse, Listing, Removal, Rules, decide, take_listing
from perdure.storage.errors import PermanentError, StorageError
from perdure.storage.file_sets import read_set
from perdure.storage.local import LocalStore
from perdure.storage.objects import ObjectStore
from perdure.storage.share import SaveId
from perdure.training.agent.checkpoint_server import HELD_FILE, MemoryInventory
from perdure.training.commands.checkpoint_store import (
    Save,
    Stored,
    list_stored_saves,
    needs_other_parts,
    save_prefix,
)
from perdure.training.config.job import Job
from perdure.training.engines.fleet import Fleet
from perdure.training.errors import EngineError
from perdure.training.journal.events import StepRecord
from perdure.training.journal.history import RunHistory
from perdure.training.journal.ledger import Ledger
from perdure.training.journal.steps import kept_steps
from perdure.training.processes import is_alive
from perdure.training.wire.agent import SavedCheckpoint, SavedQuery


def removals(
    job: Job,
    checkpoints: CheckpointStore,
    *,
    garbage_after_s: float,
    with_retention: bool,
) -> list[Removal]:
    """What to delete of a run now, and why; nothing is deleted.

    Args:
        job: of the run.
        checkpoints: of the run.
        garbage_after_s: age from which what a broken save left is garbage.
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
    """What the run's attempt may be reading and writing.

    Args:
        history: of the run; an empty one does not show whether an attempt is alive.
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
    """Training loss of the committed steps, as far as it is on record."""
    recorded = kept_steps(checkpoints.store, checkpoints.run_id)
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
    """By step, the tiers that hold the share of every rank.

    Args:
        home: Perdure's folder on this machine.
        run_id: of the run.
    """
    nodes = home / "runs" / run_id / "nodes"
    found: defaultdict[int, list[Tier]] = defaultdict(list)
    for tier, held in ((Tier.MEMORY, _in_memory(nodes)), (Tier.DISK, _on_disk(nodes, run_id))):
        for step in _whole(held):
            found[step].append(tier)
    return dict(found)


def _whole(held: Iterable[tuple[SaveId, int]]) -> set[int]:
    ranks: defaultdict[SaveId, set[int]] = defaultdict(set)
    for save, rank in held:
        ranks[save].add(rank)
    return {save.step for save, here in ranks.items() if len(here) == save.world_size}


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


PATH_ENV = "PERDURE_CHECKPOINT"
STEP_ENV = "PERDURE_CHECKPOINT_STEP"


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a command is started with because it has a checkpoint.

    Attributes:
        args: behind its own.
        variables: beside its own.
    """

    args: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ProgramSave:
    """A complete checkpoint of a command, as it is listed.

    Attributes:
        attempt: that saved it.
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
    """What a command has saved, by steps; of a path that was written again the last."""
    by_path = {one.path: one for one in history.checkpoints if one.path is not None}
    found = [
        ProgramSave(
            step=one.step,
            written_at_s=one.written_s or one.at_s,
            size_bytes=one.size_bytes or 0,
            path=path,
            attempt=f"{one.placement}.{one.attempt}",
            # Elsewhere than on this machine a path says nothing here, unless it is there.
            is_kept=Path(path).exists() or (False if _is_local(history) else None),
        )
        for path, one in by_path.items()
    ]
    return sorted(found, key=lambda one: one.step)


def _is_local(history: RunHistory) -> bool:
    engine = (history.job or {}).get("engine") or {}
    return engine.get("kind") == "local"


@dataclass(frozen=True, slots=True)
class NewestSave:
    """Finds the checkpoint from which a command goes on.

    Attributes:
        job: of the run.
        fleet: its nodes.
        store: of the run.
    """

    job: Job
    fleet: Fleet
    store: ObjectStore

    def newest(
        self, history: RunHistory, *, cwd: str, variables: dict[str, str]
    ) -> SavedCheckpoint | None:
        """The newest complete checkpoint that every node can have; None where there is none.

        One that was written before the run was created is none of it. Without uploads the nodes
        share their storage: what one of them sees, all do. Of a checkpoint in parts each node
        must have or get its own, of one and the same save.

        Raises:
            EngineError: nodes or store do not say what they have.
        """
        spec = self.job.worker.checkpoints
        if spec is None:
            return None
        query = SavedQuery(
            spec=spec,
            cwd=cwd,
            variables=variables,
            run_id=self.job.run_id,
            since_s=history.created_s,
            until_s=_ended_s(history),
            is_in_parts=self.job.saves_in_parts,
        )
        by_node = self.fleet.saved(query)
        found = [one for saved in by_node.values() for one in saved]
        try:
            if self.job.saves_in_parts:
                return self._newest_in_parts(found)
            if spec.upload:
                stored = self._stored()
                found = [*found, *stored]
                found = [one for one in found if _can_have(by_node, stored, one.step)]
        except StorageError as error:
            raise EngineError(f"the checkpoints of the command in the store: {error}") from error
        return max(found, key=lambda one: (one.step, one.written_s), default=None)

    def _stored(self) -> list[SavedCheckpoint]:
        """What the store has; the path is where it lay."""
        saves = list_stored_saves(self.store, self.job.run_id)
        found = (self._stored_one(save, members[0]) for save, members in saves.items())
        return [one for one in found if one is not None]

    def _stored_one(self, save: Save, member: int) -> SavedCheckpoint | None:
        made = read_set(self.store, save_prefix(self.job.run_id, save, member))
        if made is None:
            return None
        return SavedCheckpoint(
            step=save.step,
            path=made.path,
            size_bytes=made.size_bytes,
            written_s=made.written_s,
            saved_in=save.attempt,
        )

    def _newest_in_parts(self, found: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
        """The newest save of which each node has its part, or can get it, as member 0 has it."""
        num_members, run_id = self.job.engine.nodes, self.job.run_id
        stored = list_stored_saves(self.store, run_id)
        for save in reversed(within_reach(found, stored, num_members)):
            by = stored.get(save, [])
            parts = (read_set(self.store, save_prefix(run_id, save, one)) for one in by)
            lacks = set(range(num_members)) - set(by)
            # Of parts of which the others read, too, those that nodes alone have are no use.
            if lacks and any(one is None or needs_other_parts(one) for one in parts):
                continue
            here = (one for one in found if _save_of(one) == save and one.member == 0)
            one = next(here, None) or self._stored_one(save, 0)
            if one is not None:
                return one
        return None


def within_reach(found: Iterable[SavedCheckpoint], stored: Stored, num_members: int) -> list[Save]:
    """Saves of which every member has its part on its node, or has stored it; the oldest first."""
    members = {save: set(by) for save, by in stored.items()}
    for one in found:
        save = _save_of(one)
        if save is not None and one.member is not None:
            members.setdefault(save, set()).add(one.member)
    return sorted(save for save, by in members.items() if by >= set(range(num_members)))


def _save_of(one: SavedCheckpoint) -> Save | None:
    return Save(one.step, one.saved_in) if one.saved_in is not None else None


def _can_have(
    by_node: Mapping[str, Sequence[SavedCheckpoint]],
    stored: Sequence[SavedCheckpoint],
    step: int,
) -> bool:
    """Whether every node has a step, or can get it."""
    if any(one.step == step for one in stored):
        return True
    return all(any(one.step == step for one in saved) for saved in by_node.values())


def _ended_s(history: RunHistory) -> float:
    """When the last attempt that has ended did; the earliest sign of it counts."""
    ended = [view.ended for view in history.attempts if view.ended is not None]
    if not ended:
        return history.created_s
    last = ended[-1]
    fault_s = last.fault.at_s if last.fault is not None else None
    signs = (last.at_s, last.noticed_s, last.lived_s, fault_s)
    return min(one for one in signs if one is not None)


def resumption(job: Job, saved: SavedCheckpoint | None) -> Resumption:
    """How a command is started that has this checkpoint."""
    if saved is None:
        return Resumption()
    own = {PATH_ENV: saved.path, STEP_ENV: str(saved.step)}
    spec = job.worker.resume
    if spec is None:
        return Resumption(variables=tuple(own.items()))
    added = {name: string.Template(text).safe_substitute(own) for name, text in spec.env.items()}
    return Resumption(spec.args, tuple({**added, **own}.items()))
