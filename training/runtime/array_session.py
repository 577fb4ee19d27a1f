"""The session of a program whose framework is not torch: its state is numpy arrays.

A rank takes part with heartbeats, step records, saves through the checkpoint server, restores,
pauses and requests; nothing here imports torch. The ranks exchange what they agree on through the
coordinator, not through the framework: an answer never waits for a device. A rank cannot join
another generation of process groups, so that every fault is answered by a new attempt.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NoReturn, Protocol

import numpy as np

from perdure.storage.address import open_store
from perdure.storage.arrays import Array, ArrayPlans, ArrayReader
from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.checkpoint_server.client import CheckpointClient
from perdure.storage.manifest import LOSS, Manifest
from perdure.storage.partnering import Partnering
from perdure.storage.ranks import from_first
from perdure.storage.retention import apply_retention
from perdure.storage.saving import DirectSaver, SaveHooks, Saver, TieredSaver
from perdure.storage.share import SaveId
from perdure.training.config.drill import DrillPoint
from perdure.training.diagnosis.exits import EXIT_RESTART_ME
from perdure.training.errors import InputError
from perdure.training.injection.inside import WorkerInjector
from perdure.training.liveness.heartbeat import HeartbeatWriter, Phase
from perdure.training.recovery.protocol import Ending, GenerationReport, Paused, Trains
from perdure.training.recovery.repair import RankReport, Vote
from perdure.training.runtime.agent_requests import AgentRequests
from perdure.training.runtime.context import WorkerContext
from perdure.training.runtime.coordinator_client import CoordinatorClient
from perdure.training.runtime.errors import GIVEN_UP
from perdure.training.runtime.rank_process import print_stacks_on_request, store_patience
from perdure.training.runtime.state.restore import Restorer, StateOf
from perdure.training.runtime.step_loop.save_clock import SaveClock
from perdure.training.runtime.step_loop.step_records import StepRecords

_log = logging.getLogger("perdure.runtime")

RANDOM = "random/"
RANDOM_BYTES = 16384  # of the random states of Python and numpy as JSON, which is shorter
SETTLE_TIMEOUT_S = 1800.0  # for the last save to reach the store


class ArrayProgram(Protocol):
    """What a framework's integration gives of its program."""

    def arrays(self) -> Mapping[str, Array]:
        """Return the state of model and optimizer by name, as views where that is possible."""

    def put(self, arrays: Mapping[str, Array]) -> None:
        """Take a state that was saved by `arrays`."""


@dataclass(slots=True)
class DataPlace:
    """Where a program is in its data.

    Attributes:
        samples_per_step: of all ranks.
        steps_per_epoch: steps of one pass.
        step: completed steps.
    """

    samples_per_step: int
    steps_per_epoch: int
    step: int = 0

    @property
    def position(self) -> int:
        """Samples that were trained on."""
        return self.step * self.samples_per_step

    @property
    def epoch(self) -> int:
        """Whole passes over the data."""
        return self.step // self.steps_per_epoch


@dataclass(frozen=True, slots=True)
class CoordinatorRanks:
    """The ranks of the attempt, which exchange documents through the coordinator; see `Ranks`."""

    client: CoordinatorClient
    heartbeat: HeartbeatWriter
    rank: int
    world_size: int

    def gather(self, document: Any) -> list[Any]:
        """See `Ranks.gather`."""
        self.heartbeat.enter_collective("gather")
        try:
            return self.client.gather(document)
        finally:
            self.heartbeat.leave_collective()


@dataclass(slots=True)
class _Progress:
    """How far this rank's loop is."""

    step: int = 0
    started_s: float = 0.0
    saved_step: int | None = None
    loss: float | None = None
    is_asked_to_end: bool = False


class ArraySession:
    """This process's part in the run.

    Attributes:
        current: this process's session, None before `join_arrays()`.
        ended_at: last step of a loop that came to its end, 0 before.
    """

    current: ClassVar[ArraySession | None] = None

    def __init__(self, context: WorkerContext) -> None:
        self.context, self.job = context, context.job
        if context.coordinator is None:
            raise InputError("PERDURE_COORDINATOR", "is not in the environment")
        self.ended_at = 0
        self._heartbeat = HeartbeatWriter(context.heartbeat_path)
        self._requests = AgentRequests()
        self._requests.install()
        self._stacks = print_stacks_on_request(context)
        self._store = open_store(self.job.storage, retry=store_patience(context, self._heartbeat))
        self._progress = _Progress()
        self._announced = 0  # generation; the first is the one that this rank takes part in
        self.client = CoordinatorClient(
            context.coordinator,
            rank=context.rank,
            on_generation=self._on_generation,
            on_wait=self._heartbeat.beat,
        )
        self._generation = self.client.newer_than(0)
        self.ranks = CoordinatorRanks(
            self.client, self._heartbeat, context.rank, context.world_size
        )
        self._records = StepRecords(context)
        first_container = context.schedule_cnt if context.rank == 0 else None
        self._checkpoints = CheckpointStore(
            self._store, self.job.run_id, first_container=first_container
        )
        self._faults = WorkerInjector(
            self.job.drill.faults,
            rank=context.rank,
            store=self._store,
            run_id=self.job.run_id,
            damage_state=lambda: None,  # the job has no such fault
            break_connections=lambda: None,
        )
        self._program: ArrayProgram | None = None
        self._data = DataPlace(1, 1)
        self._clock: SaveClock | None = None
        self._saver: Saver | None = None
        self._restored: SaveId | None = None  # that the nodes had in memory

    def _on_generation(self, number: int) -> None:
        """Answer a generation that this rank cannot join; in the listening thread.

        The training thread may wait in the framework for a rank that is gone.
        """
        if number == GIVEN_UP:
            os.write(2, f"[rank{self.context.rank}]: the attempt is given up\n".encode())
            os._exit(EXIT_RESTART_ME)
        is_first, self._announced = self._announced == 0, number
        if not is_first:
            # In the middle of a step a live view may be half updated: nothing to save from.
            report = RankReport(rank=self.context.rank, step=self._progress.step, is_dirty=True)
            self.client.send(GenerationReport(generation=number, report=report))

    def open(self, program: ArrayProgram, data: DataPlace) -> int:
        """Restore the newest checkpoint into the program. Collective. Returns its step, or 0."""
        self._program, self._data = program, data
        self._heartbeat.beat(phase=Phase.RESTORE)
        self._faults.reached(DrillPoint.RESTORE, 0)
        reader = ArrayReader(self.ranks, self._heartbeat.beat)
        restorer = Restorer(
            self.context, self._checkpoints, self.ranks, reader, self._load, self._heartbeat.beat
        )
        progress = self._progress
        progress.step = data.step = restorer.restore()
        self._restored = restorer.from_memory
        self.client.send(Trains(generation=self._generation, step=progress.step))
        spec = self.job.checkpoint.resolved(sum(a.size for a in program.arrays().values()))
        self._clock = SaveClock(spec, data, progress.step)
        self._requests.in_loop = True
        self._heartbeat.beat(phase=Phase.DATA, step=progress.step)
        progress.started_s = time.perf_counter()
        return progress.step

    @property
    def is_at_target(self) -> bool:
        """Whether nothing is left to train."""
        return self._progress.step >= self.job.steps

    @property
    def is_over(self) -> bool:
        """Whether the program is to leave its loop."""
        return self.is_at_target or self._progress.is_asked_to_end

    def begin_step(self) -> None:
        """Note that a batch is there, and a step begins."""
        self._heartbeat.beat(phase=Phase.STEP)
        self._faults.reached(DrillPoint.START, self._progress.step + 1)
        self._faults.reached(DrillPoint.BACKWARD, self._progress.step + 1)

    def end_step(self, *, loss: float, lr: float = 0.0) -> bool:
        """Note a completed step, and do what is due before the next. Collective.

        Args:
            loss: of this rank; the mean of all ranks is recorded.
            lr: learning rate of the step.

        Returns:
            Whether the program is to leave its loop, and call `end`: everything is saved.
        """
        progress, requests = self._progress, self._requests
        progress.step += 1
        self._data.step = progress.step
        assert self._clock is not None  # noqa: S101 made by open()
        is_due = self.context.rank == 0 and self._clock.is_due(progress.step)
        wishes = [loss, requests.stop, is_due or requests.save, self.client.pause_wanted]
        answers = self.ranks.gather(wishes)
        stop, save, pause = (any(answer[i] for answer in answers) for i in (1, 2, 3))
        vote = Vote(
            step=progress.step,
            loss=sum(answer[0] for answer in answers) / len(answers),
            grad_norm=math.nan,  # frameworks do not show it to callbacks
            lr=lr,
            stop=stop,
            save=save,
            pause=pause,
        )
        progress.loss = vote.loss
        self._faults.reached(DrillPoint.VOTED, progress.step)
        step_s = time.perf_counter() - progress.started_s
        self._records.add(progress.step, vote, self._data, step_s=step_s, has_norm=False)
        self._heartbeat.beat(step=progress.step)
        is_last = stop or self.is_at_target
        if save or is_last:
            self._save(is_last=is_last)
        progress.is_asked_to_end = stop and not self.is_at_target
        if pause and not is_last:
            self._pause()
        if not is_last:
            self._heartbeat.beat(phase=Phase.DATA)
        progress.started_s = time.perf_counter()
        return is_last

    def end(self) -> None:
        """End the loop: what was saved is in the store. Collective.

        Raises:
            SystemExit: code 75, when the agent asked for the end before the target.
        """
        if self._progress.is_asked_to_end:
            self._stop()
        if self._saver is None:
            self._heartbeat.beat(phase=Phase.SAVE)
            self._new_saver(is_direct=False).settle(SETTLE_TIMEOUT_S)  # what was restored
        self._requests.in_loop = False
        self._records.close()
        self.ended_at = self._progress.step
        self._heartbeat.beat(phase=Phase.EVALUATE)  # for the work behind the last step

    def leave(self) -> None:
        """End the process's part together with the other ranks. Collective."""
        self.ranks.gather(None)
        self.client.send(Ending(step=self._progress.step))
        self.client.close()
        self._heartbeat.beat(phase=Phase.DONE)

    def _stop(self) -> NoReturn:
        self._records.close()
        self._requests.in_loop = False
        self.leave()
        self._heartbeat.beat(phase=Phase.STOPPED)
        raise SystemExit(EXIT_RESTART_ME)

    def _pause(self) -> None:
        self._heartbeat.beat(phase=Phase.PAUSED)
        step = self._progress.step
        self.client.pause(self._generation, step=step, until=lambda: self._requests.stop)
        self.client.send(Paused(step=step, is_paused=False))

    def _save(self, *, is_last: bool) -> None:
        progress, started_s = self._progress, time.monotonic()
        self._heartbeat.beat(phase=Phase.SAVE)
        self._faults.reached(DrillPoint.SAVE, progress.step)
        saver = self._prepared()
        is_new = progress.saved_step != progress.step
        # A checkpoint server finds out by itself whether the step is committed.
        if is_new and not saver.is_behind:
            is_new = not from_first(lambda: progress.step in self._checkpoints.steps(), self.ranks)
        if is_new:
            arrays, extra = self._state()
            saver.save(arrays, progress.step, extra, attachments=self._records.unsaved())
            self._records.saved()
            progress.saved_step = progress.step
        self._requests.save = False
        assert self._clock is not None  # noqa: S101 made by open()
        self._clock.saved(progress.step, started_s=started_s)
        if is_last:
            saver.settle(SETTLE_TIMEOUT_S)
        if not saver.is_behind:
            self._records.committed(progress.step)
            if is_new and self.context.rank == 0:
                retention = self.job.checkpoint.retention()
                apply_retention(self._checkpoints, retention, protect={progress.step})

    def _prepared(self) -> Saver:
        """Return the saver, with memory for the state where the node has room for it."""
        if self._saver is None:
            saver = self._new_saver(is_direct=False)
            refusal = saver.prepare(lambda: self._state()[0])
            if refusal is not None:
                _log.warning(f"saves go to the store while training waits: {refusal}")
                saver.close()
                saver = self._new_saver(is_direct=True)
            saver.meet_partners(self._restored)
            self._saver = saver
        return self._saver

    def _new_saver(self, *, is_direct: bool) -> Saver:
        context, beat = self.context, self._heartbeat.beat
        common: dict[str, Any] = {
            "plans": ArrayPlans(self.ranks, context.layout.replica_groups(), RANDOM),
            "run_id": self.job.run_id,
            "placement": context.placement,
            "attempt": context.attempt,
            "rank": context.rank,
            "world_size": context.world_size,
            "hooks": SaveHooks(
                on_wait=beat,
                on_agree=partial(beat, phase=Phase.AGREE),
                on_copy=partial(beat, phase=Phase.SAVE),
            ),
        }
        if context.checkpoint_server is None or is_direct:
            return DirectSaver(checkpoints=self._checkpoints, **common)
        spec, owner = self.job.checkpoint, (context.placement, context.attempt)
        partnering = None
        if spec.partner_copies:
            partnering = Partnering(context.node, spec.partner_copies, spec.failure_domains, None)
        return TieredSaver(
            client=CheckpointClient(context.checkpoint_server, owner=owner),
            announce=str(context.metrics_path),
            partnering=partnering,
            **common,
        )

    def _state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        assert self._program is not None  # noqa: S101 given to open()
        arrays = {self._prefix + name: a for name, a in self._program.arrays().items()}
        arrays[self._random] = _random_states()
        extra: dict[str, Any] = {
            "data": {
                "step": self._data.step,
                "samples_per_step": self._data.samples_per_step,
                "steps_per_epoch": self._data.steps_per_epoch,
            }
        }
        if self._progress.loss is not None:
            extra[LOSS] = self._progress.loss
        return arrays, extra

    @property
    def _random(self) -> str:
        return f"{RANDOM}rank{self.context.rank:05d}"

    @property
    def _prefix(self) -> str:
        """Beginning of the names of a part of the model, where ranks hold different parts."""
        if not self.context.holds_parts:
            return "state/"
        groups = self.context.layout.replica_groups()
        part = next(n for n, group in enumerate(groups) if self.context.rank in group)
        return f"state/part{part:05d}/"

    def _load(self, read: Any) -> Manifest | None:
        """Fill the program with what `read` fills arrays with; None when it gave up."""
        assert self._program is not None  # noqa: S101 given to open()
        live = {self._prefix + name: a for name, a in self._program.arrays().items()}
        room: dict[str, Array] = {}

        def state_of(manifest: Manifest) -> dict[str, Array]:
            lacking = sorted(live.keys() - manifest.tensors.keys())
            if lacking:
                raise InputError(
                    "worker.script",
                    f"the checkpoint of step {manifest.step} has no {lacking[0]}: the model or "
                    "the optimizer is another than the one that was saved",
                )
            room.clear()
            room.update({name: np.empty_like(array) for name, array in live.items()})
            if self._random in manifest.tensors:
                room[self._random] = np.zeros(RANDOM_BYTES, np.uint8)
            return room

        wanted: StateOf = state_of
        manifest: Manifest | None = read(wanted)
        if manifest is None:
            return None
        states = room.pop(self._random, None)
        self._program.put({name.removeprefix(self._prefix): a for name, a in room.items()})
        if states is not None:
            _set_random_states(states)
        self._check_data(manifest)
        return manifest

    def _check_data(self, manifest: Manifest) -> None:
        saved = manifest.extra.get("data")
        size = saved.get("samples_per_step") if isinstance(saved, dict) else None
        if size is not None and size != self._data.samples_per_step:
            raise InputError(
                "worker.script",
                f"a step has {self._data.samples_per_step} samples, and had {size} when step "
                f"{manifest.step} was saved: its place in the data is not known",
            )


def _random_states() -> Array:
    """Encode the states of Python's and numpy's random numbers, always in as many bytes."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 the program's
    document = {
        "python": [version, list(internal), gauss],
        "numpy": [name, [int(key) for key in keys], position, has_gauss, cached],
    }
    text = json.dumps(document).encode().ljust(RANDOM_BYTES)
    return np.frombuffer(text, np.uint8)


def _set_random_states(states: Array) -> None:
    document = json.loads(states.tobytes())
    version, internal, gauss = document["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *numbers = document["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *numbers))  # noqa: NPY002 the program's


def join_arrays() -> ArraySession:
    """Take this process's place in its run, without torch.

    Raises:
        InputError: the program was not started by a node agent.
    """
    if ArraySession.current is None:
        ArraySession.current = ArraySession(WorkerContext.from_environment())
    return ArraySession.current
