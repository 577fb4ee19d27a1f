"""Saving and restoring the full state of a training: bit-exact, on any number of ranks.

Tensors (model, optimizer, random states) go through torch.distributed.checkpoint's planners;
everything else (scheduler, scaler, data position, optimizer settings) is JSON in the manifest.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from storage import dcp
from storage.checkpoint import CheckpointStore
from storage.checkpoint_server.client import CheckpointClient
from storage.errors import StorageError
from storage.gather import gather_json
from storage.manifest import Manifest
from storage.staging import SavePlans
from storage.tiers import Signs, TieredSaver
from training.device import device_rng_state, pin, set_device_rng_state, synchronize
from training.runtime.context import WorkerContext
from training.runtime.program import Loader, Training
from training.runtime.state.live import LiveState
from training.runtime.state.random_numbers import python_states, set_python_states
from training.runtime.state.restore import Restorer, StateOf, from_first

_log = logging.getLogger("perdure.runtime")

NO_SIGNS = Signs()


class Checkpointer:
    """Saves and restores one training; through the node's checkpoint server where there is one.

    Args:
        context: of this process.
        checkpoints: of the run, in the store.
        training: what is saved.
        data: its position.
        device: of this rank.
        signs: of life, while something takes long.
    """

    def __init__(
        self,
        context: WorkerContext,
        checkpoints: CheckpointStore,
        training: Training,
        data: Loader,
        device: torch.device,
        *,
        signs: Signs = NO_SIGNS,
    ) -> None:
        self._context = context
        self._checkpoints = checkpoints
        self._training = training
        self._data = data
        self._device = device
        self._signs = signs
        self._saver: TieredSaver | None = None
        self._is_prepared = False
        self._newest_saved: int | None = 0
        self._generation = 0
        self.live = LiveState(training)
        self._restorer = Restorer(context, checkpoints, device, self._load, signs.waits)

    def prepare(self) -> None:
        """Have the checkpoint server make room, once the optimizer has its state. Collective."""
        checkpoint_server = self._context.checkpoint_server
        self._is_prepared = True
        if checkpoint_server is None:
            return
        saver = self._new_saver(checkpoint_server, SavePlans(self._device))
        tensors, _ = self._full_state({})
        refused = [why for why in gather_json(_refusal(saver, tensors), self._device) if why]
        if refused:
            _log.info(f"saves go to the store while training waits: {refused[0]}")
            saver.close()
            return
        self._saver = saver

    def forget(self, generation: int) -> None:
        """Let go of what was agreed with the other ranks: some of them are new processes.

        A save that was being copied is discarded; the next one prepares anew. After going back,
        training comes by steps that it has saved: their files get names of this generation, or
        they would be written over files that are published, or on their way.
        """
        self._generation = generation
        self._is_prepared = False
        self._newest_saved = None
        if self._saver is not None:
            self._saver.close()
            self._saver = None

    def last_save(
        self, step: int, savers: Sequence[int], *, data: dict[str, Any], timeout_s: float
    ) -> None:
        """Save with a few ranks that together hold the state; in the store when this returns.

        Collective for the savers alone. Their files have names of their own: the ranks may have
        begun to save the same step together.

        Args:
            step: completed steps.
            savers: who saves, one rank per replica group, this one among them.
            data: position of the data after `step`.
            timeout_s: for the store.

        Raises:
            StorageError: it is not committed.
            RuntimeError: another saver is gone.
        """
        if step in self._checkpoints.steps():
            return
        tensors, extra = self._full_state(data)
        plans = SavePlans(self._device, is_alone=len(savers) == 1)
        if not plans.is_alone:
            plans.group = dist.new_group(list(savers), use_local_synchronization=True)
        if self._context.checkpoint_server is None:
            dcp.save(
                tensors,
                checkpoints=self._checkpoints,
                step=step,
                placement=self._context.placement,
                attempt=self._context.attempt,
                extra=extra,
                process_group=plans.group,
                is_alone=plans.is_alone,
            )
            return
        saver = self._new_saver(self._context.checkpoint_server, plans)
        saver.rank, saver.world_size = list(savers).index(self._context.rank), len(savers)
        saver.first_file += self._context.world_size
        saver.save(tensors, step, extra, announce=str(self._context.metrics_path))
        saver.client.settle(on_wait=self._signs.waits, timeout_s=timeout_s)

    def _new_saver(self, checkpoint_server: str, plans: SavePlans) -> TieredSaver:
        return TieredSaver(
            CheckpointClient(checkpoint_server, owner=self._owner),
            plans,
            run_id=self._context.job.run_id,
            placement=self._context.placement,
            attempt=self._context.attempt,
            rank=self._context.rank,
            world_size=self._context.world_size,
            signs=self._signs,
            synchronize=partial(synchronize, self._device),
            pin=partial(pin, device=self._device),
            first_file=2 * self._generation * self._context.world_size,
        )

    def save(
        self, step: int, *, data: dict[str, Any], attachments: dict[str, str] | None = None
    ) -> bool:
        """Save on all ranks. With a checkpoint server this returns once the state is copied.

        Args:
            step: completed optimizer steps.
            data: position of the data after `step`. The loader itself may be further by a batch,
                which was handed out for a step that is to be done again.
            attachments: objects that the store gets before the checkpoint, by key.

        Returns:
            False when the step was saved before: the same state.

        Raises:
            StorageError: this save, or the one before it, failed; it was not committed.
        """
        if step == self._newest_saved:
            return False
        if not self._is_prepared:
            self.prepare()
        if self._is_committed(step):
            return False
        tensors, extra = self._full_state(data)
        if self._saver is not None:
            self._saver.save(
                tensors,
                step,
                extra,
                attachments=attachments,
                announce=str(self._context.metrics_path),
            )
        else:
            for key, text in (attachments or {}).items():
                self._checkpoints.store.put(key, text.encode())
            dcp.save(
                tensors,
                checkpoints=self._checkpoints,
                step=step,
                placement=self._context.placement,
                attempt=self._context.attempt,
                extra=extra,
            )
        self._newest_saved = step
        return True

    @property
    def is_behind(self) -> bool:
        """Whether what `save` returns from may not be in the store yet."""
        return self._saver is not None

    def settle(self, timeout_s: float) -> None:
        """Wait until everything that was saved is committed. Collective.

        Raises:
            StorageError: on every rank, when one of them could not publish.
        """
        checkpoint_server = self._context.checkpoint_server
        if checkpoint_server is None:
            return
        client = (
            self._saver.client
            if self._saver is not None
            else CheckpointClient(checkpoint_server, owner=self._owner)
        )
        deadline_s = time.monotonic() + timeout_s
        self._signs.agrees()
        # In turns: waiting for a slower checkpoint server, a rank must not outlast a collective's
        # limit.
        while True:
            told = gather_json(_turn_of(client, late=time.monotonic() > deadline_s), self._device)
            problems = [one["problem"] for one in told if one["problem"]]
            if problems:
                raise StorageError(problems[0])
            if not any(one["busy"] for one in told):
                return
            self._signs.waits()

    @property
    def _owner(self) -> tuple[int, int]:
        """Whose failures the checkpoint server tells us."""
        return self._context.placement, self._context.attempt

    def restore(self) -> int:
        """Restore the newest step that the nodes or the store have whole. Collective.

        Returns:
            Its step, 0 when there is none.

        Raises:
            Corrupt: every checkpoint is damaged, and the state was touched on the way: new
                processes start from nothing.
            StorageError: the store has one whole, and yet some rank cannot read it.
        """
        return self._restorer.restore()

    def _is_committed(self, step: int) -> bool:
        if self._saver is not None:
            return False  # the checkpoint server finds out, and no request holds training up
        return bool(from_first(lambda: step in self._checkpoints.steps(), self._device))

    def _load(self, read: Callable[[StateOf], Manifest | None]) -> Manifest | None:
        """Fill the training with what `read` fills tensors with; None when it gave up."""
        tensors, _ = self.live.tensors()
        random_states: dict[str, Tensor] = {}

        def wanted(manifest: Manifest) -> dict[str, Tensor]:
            own = (n for n in manifest.tensors if n.startswith(self._random_prefix))
            for name in own:
                shape = manifest.tensors[name].shape
                random_states[name] = torch.empty(shape, dtype=torch.uint8)
            return {**tensors, **random_states}

        manifest = read(wanted)
        if manifest is None:
            return None
        extra: dict[str, Any] = dict(manifest.extra)
        self.live.put(tensors, extra)
        self._data.load_state_dict(extra["data"])
        self._set_random_states(random_states)
        self._newest_saved = manifest.step
        return manifest

    def _full_state(self, data: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that is saved: tensors by name, and the rest as JSON."""
        tensors, settings = self.live.tensors()
        extra = {"data": data, "optimizer": settings, **self.live.parts()}
        # JSON has no tuples: say so here and not in the manifest's validation.
        return {**tensors, **self._random_states()}, json.loads(json.dumps(extra))

    @property
    def _random_prefix(self) -> str:
        return f"random/rank{self._context.rank:05d}/"

    def _random_states(self) -> dict[str, Tensor]:
        """Random states of this rank as uint8 tensors, [bytes]."""
        states = {"torch": torch.get_rng_state(), "python": python_states()}
        device_state = device_rng_state(self._device)
        if device_state is not None:
            states["device"] = device_state.cpu()
        return {self._random_prefix + name: state for name, state in states.items()}

    def _set_random_states(self, states: dict[str, Tensor]) -> None:
        # A rank that the saved world did not have keeps the state its seed gave it.
        for name, state in states.items():
            match name.removeprefix(self._random_prefix):
                case "torch":
                    torch.set_rng_state(state)
                case "device":
                    set_device_rng_state(self._device, state)
                case "python":
                    set_python_states(state)


def _refusal(saver: TieredSaver, tensors: Mapping[str, Tensor]) -> str | None:
    """Why this node's checkpoint server cannot take saves, else None."""
    try:
        return saver.prepare(tensors)
    except StorageError as exc:
        return str(exc)


def _turn_of(client: CheckpointClient, *, late: bool) -> dict[str, Any]:
    """State of this node's checkpoint server after a moment: publishing, done, or failed."""
    try:
        busy = client.is_busy()
    except StorageError as exc:
        return {"busy": False, "problem": f"{type(exc).__name__}: {exc}"}
    problem = "saves are not in the store yet, and there is no more time" if busy and late else None
    return {"busy": busy, "problem": problem}
