"""Saving and restoring the full state of a training: bit-exact, on any number of ranks.

Tensors (model, optimizer, random states) go through torch.distributed.checkpoint's planners;
everything else (scheduler, scaler, data position, optimizer settings) is JSON in the manifest.
"""

from __future__ import annotations

import json
import logging
import mmap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from pydantic_core import from_json
from torch import Tensor

from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.checkpoint_server.client import CheckpointClient
from perdure.storage.manifest import LOSS, Manifest
from perdure.storage.partner_copies import CopyPlan
from perdure.storage.partnering import Partnering
from perdure.storage.ranks import from_first
from perdure.storage.restoring import TensorReader
from perdure.storage.retention import apply_retention
from perdure.storage.saving import DirectSaver, SaveHooks, Saver, TieredSaver
from perdure.storage.staging import GroupRanks, SavePlans, raw
from perdure.training.device import pin, synchronize
from perdure.training.runtime.context import WorkerContext
from perdure.training.runtime.program import Training
from perdure.training.runtime.state.initial import InitialState
from perdure.training.runtime.state.live import LiveState
from perdure.training.runtime.state.part_names import PartNames
from perdure.training.runtime.state.program_state import PROGRAM, with_room
from perdure.training.runtime.state.random_numbers import random_states, set_random_states
from perdure.training.runtime.state.restore import Restorer, StateOf
from perdure.training.telemetry.mounted_files import mounted_rank_table, super_pod_of

_log = logging.getLogger("perdure.runtime")

JSON_PAGE_BYTES = 4096
NO_HOOKS = SaveHooks()


class Checkpointer:
    """Saves and restores one training; through the node's checkpoint server where there is one.

    Args:
        context: rank, job and folders of this process.
        checkpoints: the run's checkpoints in the store.
        training: what is saved.
        device: the rank's accelerator, or the CPU.
        hooks: called while a save takes long.

    Attributes:
        live: the state of the training.
    """

    def __init__(
        self,
        context: WorkerContext,
        checkpoints: CheckpointStore,
        training: Training,
        device: torch.device,
        *,
        hooks: SaveHooks = NO_HOOKS,
    ) -> None:
        self._context = context
        self._checkpoints = checkpoints
        self._loader = training.loader
        self._device = device
        self._hooks = hooks
        self._saver: Saver | None = None
        self._is_refused = False  # by the checkpoint server, for lack of memory
        self._newest_saved: int | None = 0
        self._generation = 0
        self._copies = CopyPlan()  # of the generations before
        self.live = LiveState(training)
        self._names = PartNames.of(context)
        self._ranks = GroupRanks(device)
        self._restorer = Restorer(
            context, checkpoints, self._ranks, TensorReader(device), self._load, hooks.on_wait
        )

    def prepare(self) -> None:
        """Have the checkpoint server allocate memory, for the optimizer's state too. Collective."""
        plans = SavePlans(self._device)
        saver = self._new_saver(plans)
        refusal = saver.prepare(lambda: self._full_state({})[0])
        if refusal is not None:
            if not self._is_refused:
                _log.warning(f"saves go to the store while training waits: {refusal}")
            saver.close()
            saver = self._new_saver(plans, is_direct=True)
        elif self._is_refused:
            _log.warning("saves go to memory again: there is room")
        self._is_refused = refusal is not None
        saver.meet_partners(self._restorer.from_memory)
        self._restorer.from_memory = None  # once: later saves are copied themselves
        self._saver = saver

    def forget(self, generation: int) -> None:
        """Drop what was agreed with the other ranks: some of them are new processes.

        A save that was being copied is discarded; the next one prepares again. After a roll-back,
        training repeats steps that it has saved: their files get names of this generation, or
        they would be written over files that are published, or being uploaded. Which save is whole
        on partner nodes is kept: a lost node may be why the ranks are new, and then no other is.
        """
        self._generation = generation
        self._newest_saved = None
        self._restorer.from_memory = None  # as with ranks that are new
        if self._saver is not None:
            self._copies = self._saver.copies
            self._saver.close()
        self._saver = None

    def last_save(
        self,
        step: int,
        savers: Sequence[int],
        *,
        data: dict[str, Any],
        timeout_s: float,
        loss: float | None = None,
        attachments: dict[str, str] | None = None,
    ) -> None:
        """Save with a few ranks that together hold the state; in the store when this returns.

        Collective for the savers alone. Their files have names of their own: the ranks may have
        begun to save the same step together.

        Args:
            step: completed steps.
            savers: who saves, one rank per replica group, this one among them.
            data: position of the data after `step`.
            timeout_s: for the store.
            loss: loss at `step`, for people.
            attachments: objects that the store gets with this rank's file, by key.

        Raises:
            StorageError: it is not committed.
            RuntimeError: another saver is gone.
        """
        if step in self._checkpoints.steps():
            return
        tensors, extra = self._full_state(data, loss=loss)
        plans = SavePlans(self._device, is_alone=len(savers) == 1)
        if not plans.is_alone:
            plans.group = dist.new_group(list(savers), use_local_synchronization=True)
        saver = self._new_saver(plans)
        saver.narrow(savers)
        saver.save(tensors, step, extra, attachments=attachments)
        saver.settle(timeout_s)

    def _new_saver(self, plans: SavePlans, *, is_direct: bool = False) -> Saver:
        context = self._context
        common: dict[str, Any] = {
            "plans": plans,
            "run_id": context.job.run_id,
            "placement": context.placement,
            "attempt": context.attempt,
            "rank": context.rank,
            "world_size": context.world_size,
            "hooks": self._hooks,
            "synchronize": partial(synchronize, self._device),
            "first_file": 2 * self._generation * context.world_size,
            "copies": self._copies,
        }
        if context.checkpoint_server is None or is_direct:
            return DirectSaver(checkpoints=self._checkpoints, **common)
        owner = (context.placement, context.attempt)  # whose failures are reported to us
        return TieredSaver(
            client=CheckpointClient(context.checkpoint_server, owner=owner),
            announce=str(context.metrics_path),
            pin=self._pin,
            partnering=self._partnering(),
            **common,
        )

    def _pin(self, memory: mmap.mmap) -> Callable[[], None]:
        return pin(torch.frombuffer(memory, dtype=torch.uint8), self._device)

    def _partnering(self) -> Partnering | None:
        spec = self._context.job.checkpoint
        if not spec.partner_copies:
            return None
        node = self._context.node
        super_pod = super_pod_of(mounted_rank_table(), node)
        return Partnering(node, spec.partner_copies, spec.failure_domains, super_pod)

    def save(
        self,
        step: int,
        *,
        data: dict[str, Any],
        attachments: dict[str, str] | None = None,
        loss: float | None = None,
    ) -> bool:
        """Save on all ranks. With a checkpoint server this returns once the state is copied.

        Args:
            step: completed optimizer steps.
            data: position of the data after `step`. The loader itself may be further by a batch,
                which was handed out for a step that is to be executed again.
            attachments: objects that the store gets before the checkpoint, by key.
            loss: loss at `step`, for people; the manifest has it.

        Returns:
            False when the step was saved before: the same state.

        Raises:
            StorageError: this save, or the previous save, failed; it was not committed.
        """
        if step == self._newest_saved:
            return False
        if self._saver is None or self._is_refused:  # there may be room in memory by now
            self.prepare()
        if self._is_committed(step):
            return False
        tensors, extra = self._full_state(data, loss=loss)
        assert self._saver is not None  # noqa: S101 made by prepare
        self._saver.save(tensors, step, extra, attachments=attachments)
        self._newest_saved = step
        return True

    @property
    def is_behind(self) -> bool:
        """Whether what `save` returns from may not be in the store yet."""
        return self._saver is not None and self._saver.is_behind

    def settle(self, timeout_s: float) -> None:
        """Wait until everything that was saved is committed. Collective.

        Raises:
            StorageError: on every rank, when one of them could not publish.
        """
        saver = self._saver
        if saver is None:
            saver = self._new_saver(SavePlans(self._device))  # what was restored is published
        saver.settle(timeout_s)

    def apply_retention(self, step: int) -> None:
        """Delete what the job does not keep now that `step` is committed; on the first rank."""
        if self._context.rank == 0:
            retention = self._context.job.checkpoint.retention()
            apply_retention(self._checkpoints, retention, protect={step})

    def restore(self) -> int:
        """Restore the newest step that the nodes or the store have whole. Collective.

        A run that has none yet takes over what its job names of another run.

        Returns:
            Its step, 0 when there is none.

        Raises:
            InputError: the other run's checkpoint does not exist, or does not fit.
            Corrupt: every checkpoint is damaged, and the state was touched on the way: new
                processes start from nothing.
            StorageError: the store has a whole checkpoint, and yet some rank cannot read it.
        """
        step = self._restorer.restore()
        spec = self._context.job.init_from
        if step == 0 and spec is not None:
            InitialState(spec, self._checkpoints, self.live, self._device, names=self._names).load()
        return step

    def _is_committed(self, step: int) -> bool:
        if self.is_behind:
            return False  # the checkpoint server finds out, and training waits for no request
        return bool(from_first(lambda: step in self._checkpoints.steps(), self._ranks))

    def _load(self, read: Callable[[StateOf], Manifest | None]) -> Manifest | None:
        """Fill the training with what `read` fills tensors with; None when it gave up."""
        tensors, _ = self.live.tensors()
        saved = self._names.tensors(tensors)
        beside, _ = self.live.program.take()
        room: dict[str, Tensor] = {}
        local_tensors: dict[str, Tensor] = {}

        def state_of(manifest: Manifest) -> dict[str, Tensor]:
            self._names.check(manifest.tensors, step=manifest.step)
            local_tensors.clear()  # an older checkpoint than at the previous try
            names = self._names.live_names(manifest.tensors, PROGRAM)
            records = {live: manifest.tensors[name] for name, live in names.items()}
            layouts = {name: (record.dtype, record.shape) for name, record in records.items()}
            room.clear()
            room.update(with_room(beside, layouts))
            own_bytes = {n for n in manifest.tensors if n.startswith(self._random_prefix)}
            if self._names.settings is not None:
                own_bytes.add(self._names.settings)
            for name in own_bytes:
                shape = manifest.tensors[name].shape
                local_tensors[name] = torch.empty(shape, dtype=torch.uint8)
            return {**saved, **self._names.tensors(room), **local_tensors}

        manifest = read(state_of)
        if manifest is None:
            return None
        extra: dict[str, Any] = dict(manifest.extra)
        if self._names.settings is not None:
            extra |= _settings_of(_json_of(local_tensors.pop(self._names.settings)))
        self.live.put(tensors, extra)
        self._put_beside(extra.get("program", {}), room, step=manifest.step)
        self._loader.load_state_dict(extra["data"])
        # A rank that the saved world did not have keeps the state its seed gave it.
        prefix = self._random_prefix
        set_random_states(
            {n.removeprefix(prefix): s for n, s in local_tensors.items()}, self._device
        )
        self._newest_saved = manifest.step
        return manifest

    def _put_beside(
        self, documents: Mapping[str, Any], tensors: Mapping[str, Tensor], *, step: int
    ) -> None:
        lacking = self.live.program.put(documents, tensors)
        if lacking and self._context.rank == 0:
            _log.warning(
                f"the checkpoint of step {step} has nothing of {', '.join(lacking)}, which the "
                "program registers as state: it begins anew"
            )

    def _full_state(
        self, data: dict[str, Any], *, loss: float | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Collect the state to save: tensors by name, and the rest as JSON."""
        live, settings = self.live.tensors()
        beside, documents = self.live.program.take()
        tensors = self._names.tensors(live | beside)
        rank_settings = {"optimizer": settings, "program": documents}
        if self._names.settings is not None:
            tensors[self._names.settings] = _json_tensor(rank_settings)
        for name, state in random_states(self._device).items():
            tensors[self._random_prefix + name] = state
        extra = {"data": data, **rank_settings, **self.live.parts()}
        if loss is not None:
            extra[LOSS] = loss
        # JSON has no tuples: convert here, and not in the manifest's validation.
        return tensors, json.loads(json.dumps(extra))

    @property
    def _random_prefix(self) -> str:
        return f"random/rank{self._context.rank:05d}/"


def _json_tensor(document: Any) -> Tensor:
    """Encode JSON in whole pages: a longer number in it shall not change the plan of saves."""
    text = json.dumps(document).encode()
    padded = text.ljust(-(-len(text) // JSON_PAGE_BYTES) * JSON_PAGE_BYTES)
    return torch.frombuffer(bytearray(padded), dtype=torch.uint8)


def _settings_of(document: dict[str, Any]) -> dict[str, Any]:
    """Read the settings of a part; those of older checkpoints are the optimizer's alone."""
    return document if "program" in document else {"optimizer": document}


def _json_of(tensor: Tensor) -> Any:
    return from_json(bytes(raw(tensor)))
