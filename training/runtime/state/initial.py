"""The beginning of a run from the checkpoint of another run: weights, and the optimizer's moments.

Hyperparameters, schedule, step and data position are the new run's own. Which step it is stays
settled: whatever restarts the run before its first checkpoint begins from the same one. Collective.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from contextlib import nullcontext, suppress

import torch
import torch.distributed as dist
from pydantic_core import from_json
from torch import Tensor

from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.errors import Corrupt, NotFound, PreconditionFailed
from perdure.storage.loading import load
from perdure.storage.manifest import Manifest
from perdure.storage.ranks import from_first
from perdure.storage.retention import reading
from perdure.storage.staging import GroupRanks
from perdure.training.config.run_name import InitFromSpec, OptimizerStart
from perdure.training.errors import InputError
from perdure.training.runtime.state.live import MODEL, STATE, LiveState
from perdure.training.runtime.state.part_names import ALIKE, PartNames
from perdure.training.runtime.state.restore import readers_of

_log = logging.getLogger("perdure.runtime")


class InitialState:
    """Initial state of a new run.

    Args:
        spec: the job's section.
        run_store: checkpoints of the new run.
        live: the state of the training.
        device: the rank's accelerator, or the CPU.
        names: the rank's tensor names in checkpoints.
    """

    def __init__(
        self,
        spec: InitFromSpec,
        run_store: CheckpointStore,
        live: LiveState,
        device: torch.device,
        *,
        names: PartNames = ALIKE,
    ) -> None:
        self._spec = spec
        self._run_store = run_store
        self._source = CheckpointStore(run_store.store, spec.run)
        self._live = live
        self._device = device
        self._names = names

    def load(self) -> None:
        """Fill the training.

        Raises:
            InputError: there is no such checkpoint, or it is of another model or optimizer.
            StorageError: it cannot be read.
        """
        step = self._step()
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        with reading(self._source, step) if is_first else nullcontext():
            text, problem = from_first(lambda: self._manifest(step), GroupRanks(self._device))
            if problem is not None:
                raise InputError(*problem)
            manifest = Manifest.model_validate_json(text)
            self._fill(manifest)
        if is_first:
            _log.info(
                f"begins with the weights of run {self._spec.run} at step {step}, optimizer: "
                f"{self._spec.optimizer}"
            )

    def _step(self) -> int:
        step = from_first(self._settled, GroupRanks(self._device))
        if step is None:
            raise InputError(*self._spec.missing(()))
        return int(step)

    def _settled(self) -> int | None:
        """Choose the step, on the first rank; None where the other run has none."""
        if self._spec.step is not None:
            return self._spec.step
        store = self._run_store.store
        key = f"runs/{self._run_store.run_id}/init-from/{self._spec.run}.json"
        with suppress(NotFound):
            return int(from_json(store.get(key))["step"])
        newest = self._source.latest()
        if newest is None:
            return None
        try:
            store.put(key, json.dumps({"step": newest}).encode(), if_absent=True)
        except PreconditionFailed:  # another attempt was first
            return int(from_json(store.get(key))["step"])
        return newest

    def _manifest(self, step: int) -> tuple[str | None, tuple[str, str] | None]:
        """Read the manifest of a step, or return the field at fault and why; on the first rank."""
        try:
            return self._source.manifest(step).model_dump_json(), None
        except NotFound:
            return None, self._spec.missing(self._source.steps())
        except Corrupt as exc:
            return None, ("init_from.step", str(exc))

    def _fill(self, manifest: Manifest) -> None:
        keeps = self._spec.optimizer is OptimizerStart.KEEP
        tensors, settings = self._live.tensors() if keeps else (self._live.model_tensors(), {})
        # A learning rate may be a tensor, too: hyperparameters are the new run's.
        wanted = self._names.tensors(
            {n: tensor for n, tensor in tensors.items() if n.startswith((MODEL, STATE))}
        )
        self._names.check(manifest.tensors, step=manifest.step)
        saved_names = {name for name in manifest.tensors if not self._names.is_anothers(name)}
        check_fit(manifest, wanted, saved_names=saved_names, keeps_optimizer=keeps)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        hashing = readers_of(sorted(manifest.shards), [frozenset()] * world_size)
        verify = frozenset(shard for shard, reader in hashing.items() if reader == rank)
        load(wanted, manifest, checkpoints=self._source, verify=verify)
        parts = self._live.parts()
        scale = manifest.extra.get("scaler")
        if keeps and parts["scaler"] is not None and scale is not None:
            parts["scaler"] = scale
        self._live.put(tensors, {"optimizer": settings, **parts})


def check_fit(
    manifest: Manifest,
    wanted: Mapping[str, Tensor],
    *,
    saved_names: Collection[str],
    keeps_optimizer: bool,
) -> None:
    """Check that a checkpoint has what is wanted of it, and no more.

    Args:
        manifest: the checkpoint's tensors.
        wanted: by the names in it.
        saved_names: the names in it that are this rank's.
        keeps_optimizer: whether the optimizer's state is wanted, too.

    Raises:
        InputError: it is of another model, or of another optimizer.
    """
    prefixes = (MODEL, STATE) if keeps_optimizer else (MODEL,)
    fitting_names = {name for name in saved_names if name.startswith(prefixes)}
    source = f"run {manifest.run_id} at step {manifest.step}"
    for name in sorted(fitting_names ^ wanted.keys()):
        has = f"{source} has no" if name in wanted else "this run has no"
        beside = "which this run has" if name in wanted else f"which {source} has"
        raise _misfit(name, f"{has} {name}, {beside}")
    for name, tensor in wanted.items():
        shape = tuple(manifest.tensors[name].shape)
        if shape != tuple(tensor.shape):
            raise _misfit(name, f"{name} is {shape} in {source}, and {tuple(tensor.shape)} here")


def _misfit(name: str, text: str) -> InputError:
    if name.startswith(STATE):
        return InputError("init_from.optimizer", f"keep: {text}; reset leaves the optimizer's out")
    return InputError("init_from.run", f"another model: {text}")
