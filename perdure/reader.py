"""The checkpoints of a run for a notebook: which there are, and their tensors.

Nothing is written but the lease that keeps retention from deleting a step while it is read. Times
are seconds since the epoch, sizes bytes, steps completed optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from perdure.runs import named_job, store_of
from perdure.storage.address import StorageSpec, open_store
from perdure.storage.checkpoint import CheckpointStore, StepObjects, StepState, read_manifest
from perdure.storage.errors import Corrupt
from perdure.storage.loading import ShardReads
from perdure.storage.manifest import Manifest
from perdure.storage.restoring import planned
from perdure.storage.retention import reading
from perdure.storage.staging import DTYPES
from perdure.training.config.job import Job
from perdure.training.config.job_file import load_job
from perdure.training.errors import InputError

MAX_LISTED = 10


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint.

    Attributes:
        step: completed optimizer steps in its weights.
        size_bytes: all of its objects together.
        written_at_s: seconds since the epoch.
        placement: number of the placement that saved it; None where its manifest is damaged.
        attempt: number of the attempt on that placement; None where its manifest is damaged.
        loss: training loss of the step; None where the program's losses are not known.
    """

    step: int
    size_bytes: int
    written_at_s: float
    placement: int | None
    attempt: int | None
    loss: float | None


class CheckpointReader:
    """Reads the checkpoints of one run. The run may train on meanwhile.

    Args:
        store: the checkpoints of the run.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"CheckpointReader({self._store.run_id!r})"

    def list(self) -> tuple[Checkpoint, ...]:
        """The committed checkpoints, by ascending step.

        Raises:
            StorageError: the store does not answer.
        """
        return tuple(self._checkpoint(step) for step in self._committed())

    def latest(self) -> Checkpoint | None:
        """The newest committed checkpoint, None when the run has none yet.

        Raises:
            StorageError: the store does not answer.
        """
        committed = self._committed()
        return self._checkpoint(committed[-1]) if committed else None

    def load(
        self, step: int | None = None, names: str | Iterable[str] | None = None
    ) -> dict[str, Tensor]:
        """Tensors of a checkpoint, whole and on the CPU, whatever the sharding they were saved in.

        Beside the tensors it takes memory for one shard at most, which is the share of one rank in
        the checkpoint. It needs no process group.

        Args:
            step: of the checkpoint; None: the newest.
            names: names of tensors, or patterns of them with `*` and `?`: `model/*` stands for the
                weights without the optimizer's state. None: all tensors. Only then is every byte
                compared with its hash; otherwise `perdure checkpoints verify` does that.

        Returns:
            The tensors by name, in the order of the checkpoint.

        Raises:
            InputError: no such checkpoint is committed, or a name matches no tensor.
            Corrupt: the checkpoint is not as it was published.
            StorageError: the store does not answer.
        """
        picked = self._pick(step)
        with reading(self._store, picked):
            manifest = self._store.manifest(picked)
            state = _empty_state(manifest, names)
            reads = ShardReads(
                self._store,
                manifest,
                verify=frozenset(manifest.shards) if names is None else frozenset(),
            )
            planner, by_shard = planned(state, reads)
            for shard in sorted(by_shard):
                reads.read_shard(shard, by_shard[shard], planner, held=None)
        return state

    def _committed(self) -> Sequence[StepObjects]:
        return [step for step in self._store.list_steps() if step.state is StepState.COMMITTED]

    def _pick(self, step: int | None) -> int:
        steps = [objects.step for objects in self._committed()]
        if not steps:
            raise InputError("run", f"{self._store.run_id!r} has no committed checkpoint")
        if step is None:
            return steps[-1]
        if step not in steps:
            newest = ", ".join(map(str, steps[::-1][:MAX_LISTED]))
            raise InputError("step", f"{step} is not committed; committed: {newest}")
        return step

    def _checkpoint(self, step: StepObjects) -> Checkpoint:
        manifest = read_manifest(self._store, step)
        return Checkpoint(
            step=step.step,
            size_bytes=step.size_bytes,
            written_at_s=step.modified_s if manifest is None else manifest.written_at_s,
            placement=None if manifest is None else manifest.placement,
            attempt=None if manifest is None else manifest.attempt,
            loss=None if manifest is None else manifest.loss,
        )


def checkpoints(
    run: str | Path | Job, *, store: str | StorageSpec | None = None
) -> CheckpointReader:
    """Open the checkpoints of a run for reading.

    Args:
        run: run_id of a run that was started on this machine, a job file, or a job.
        store: where the checkpoints are, as `file:///folder` or `s3://bucket/prefix`, when this
            machine does not know the run; `run` is then its run_id.

    Raises:
        InputError: there is no such run or file, the address is none, or the run is of a command,
            which keeps its checkpoints itself.
    """
    if store is not None:
        return CheckpointReader(_checkpoint_store(run, store))
    job = _job_of(run)
    if job.worker.checkpoints is not None:
        raise InputError(
            "run",
            f"{job.run_id!r} is of a command, whose checkpoints are its own files; "
            f"'perdure checkpoints ls {job.run_id}' lists them",
        )
    return CheckpointReader(CheckpointStore(store_of(job), job.run_id))


def _job_of(run: str | Path | Job) -> Job:
    if isinstance(run, Job):
        return run
    return named_job(run) if isinstance(run, str) else load_job(run)


def _checkpoint_store(run: str | Path | Job, store: str | StorageSpec) -> CheckpointStore:
    if not isinstance(run, str):
        raise InputError("run", f"{run!r}: with a store, name the run by its run_id")
    try:
        spec = StorageSpec(address=store) if isinstance(store, str) else store
    except ValidationError as error:
        raise InputError("store", _first_problem(error)) from None
    try:
        return CheckpointStore(open_store(spec), run)
    except ValidationError as error:
        raise InputError("run", f"{run!r}: {_first_problem(error)}") from None


def _first_problem(error: ValidationError) -> str:
    return error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")


def _empty_state(manifest: Manifest, names: str | Iterable[str] | None) -> dict[str, Tensor]:
    """Memory for the tensors of these names, for all of them with None."""
    patterns = ["*"] if names is None else [names] if isinstance(names, str) else list(names)
    wanted = _matches(manifest.tensors, patterns)
    state: dict[str, Tensor] = {}
    for name, record in manifest.tensors.items():
        if name not in wanted:
            continue
        if record.dtype not in DTYPES:
            raise Corrupt(f"{name}: dtype {record.dtype} is unknown here")
        state[name] = torch.empty(record.shape, dtype=DTYPES[record.dtype])
    return state


def _matches(tensors: Mapping[str, object], names: Iterable[str]) -> set[str]:
    matches: set[str] = set()
    for name in names:
        matching = {name} if name in tensors else {t for t in tensors if fnmatchcase(t, name)}
        if not matching:
            examples = ", ".join(list(tensors)[:MAX_LISTED])
            raise InputError("names", f"{name!r} matches no tensor; there are {examples}")
        matches |= matching
    return matches
