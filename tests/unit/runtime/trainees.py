"""A small training with every kind of state, and the programs that ranks of a world run on it."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.errors import StorageError
from perdure.storage.local import LocalStore
from perdure.storage.saving import TieredSaver
from perdure.training.config.job import Job
from perdure.training.runtime.context import WorkerContext
from perdure.training.runtime.program import MicroBatch, Training
from perdure.training.runtime.state.checkpointer import Checkpointer

CPU = torch.device("cpu")


@dataclass
class Loader:
    """Counts samples, and has none."""

    samples: int = 0

    @property
    def position(self) -> int:
        return self.samples

    @property
    def epoch(self) -> int:
        return 0

    def next_step(self) -> list[MicroBatch]:
        return []

    def close(self) -> None:
        """There are no worker processes."""

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = state["samples"]


class Average:
    """An average of weights as programs keep it beside; of plain ones from the first step on."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        sharded = {n: p for n, p in enumerate(model.parameters()) if isinstance(p, DTensor)}
        self.weights = {n: torch.zeros_like(p.detach()) for n, p in sharded.items()}
        self.num_steps = (0, "steps")

    def update(self) -> None:
        for number, parameter in enumerate(self.model.parameters()):
            weight = self.weights.setdefault(number, torch.zeros_like(parameter.detach()))
            weight.lerp_(parameter.detach(), 0.1)
        self.num_steps = (self.num_steps[0] + 1, "steps")

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = dict(state["weights"])
        self.num_steps = state["num_steps"]


class Trained(Protocol):
    """What a checkpoint is of."""

    training: Training
    data: Loader

    def step(self) -> Any:
        """Complete one optimizer step."""


def shard(model: nn.Module, *layers: nn.Module) -> nn.Module:
    """FSDP2 over all ranks, of these layers and of what is left."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for one in (*layers, model):
        fully_shard(one, mesh=mesh)
    return model


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be distributed."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Trainee:
    """Everything that a checkpoint holds, and a step that depends on all of it."""

    def __init__(self, rank: int = 0, *, sharded: bool = False, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 7), nn.Dropout(0.2), nn.Linear(7, 3))
        self.seen = torch.zeros((), dtype=torch.int64)
        self.model.register_buffer("seen", self.seen)
        if sharded:
            shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05, betas=(0.8, 0.95))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.7)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4)
        self.data = Loader()
        self.average = Average(self.model)
        self.training = Training(
            self.model,
            [self.optimizer],
            [self.scheduler],
            self.scaler,
            self.data,
            1.0,
            state={"average": self.average},
        )
        self._sharded = sharded
        torch.manual_seed(100 + rank)
        random.seed(200 + rank)
        np.random.seed(300 + rank)  # noqa: NPY002 the state that a checkpoint holds

    def step(self) -> float:
        """One step on random data; replicas agree because they average their gradients."""
        noise = random.random() + float(np.random.rand())  # noqa: NPY002, S311
        inputs = torch.randn(4, 6) + noise + self.data.samples
        loss = self.model(inputs).square().mean()
        self.scaler.scale(loss).backward()
        if not self._sharded and dist.is_initialized():
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.data.samples += 4
        self.seen += 1
        self.average.update()
        return float(loss.item())

    def state(self) -> dict[str, Any]:
        """All of it, as plain values."""
        optimizer = self.optimizer.state_dict()
        return {
            "model": {name: _plain(value) for name, value in self.model.state_dict().items()},
            "optimizer": _plain(optimizer),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "data": self.data.samples,
            "average": _plain(self.average.state_dict()),
            "torch": torch.get_rng_state().tolist(),
            "python": random.getstate(),
            "numpy": _plain(np.random.get_state(legacy=True)),  # noqa: NPY002
        }

    def weights(self) -> str:
        """Hash of model and optimizer, the same on every rank of a replicated training."""
        state = {name: part for name, part in self.state().items() if name in WEIGHTS}
        return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


WEIGHTS = ("model", "optimizer", "scheduler", "scaler", "data", "average")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, Tensor):
        return whole(value).tolist()
    return value.tolist() if isinstance(value, np.ndarray) else value


@dataclass(frozen=True, slots=True)
class Place:
    """Where the ranks of an attempt are: checkpoint servers and disks of their nodes, in order."""

    folder: Path
    attempt: int
    checkpoint_servers: tuple[str | None, ...]
    disks: tuple[Path | None, ...]
    sharded: bool = False

    def context(self, rank: int, world_size: int) -> WorkerContext:
        """Of one rank; nodes have equally many."""
        node = rank * len(self.checkpoint_servers) // world_size
        return WorkerContext(
            job=Job.model_validate_json((self.folder / "job.json").read_text()),
            rank=rank,
            local_rank=0,
            world_size=world_size,
            placement=1,
            attempt=self.attempt,
            schedule_cnt=1,
            proc_start_cnt=1,
            node=f"node-{node}",
            data_folder=self.folder,
            data_manifest_key="",
            metrics_path=self.folder / f"metrics-{self.attempt}.jsonl",
            heartbeat_path=self.folder / "heartbeat",
            checkpoint_server=self.checkpoint_servers[node],
            disk_tier=self.disks[node],
        )

    def checkpointer(self, trainee: Trained, rank: int, world_size: int) -> Checkpointer:
        """Of one rank."""
        checkpoints = CheckpointStore(LocalStore(self.folder / "store"), "run")
        context = self.context(rank, world_size)
        return Checkpointer(context, checkpoints, trainee.training, CPU)


def cycle(
    trained: Trained,
    rank: int,
    place: Place,
    until: int,
    saves: tuple[int, ...] = (),
    *,
    note: Callable[[int], None] = lambda _step: None,
) -> int:
    """Restore, train to a step and save at some; the step that was restored.

    Args:
        trained: what the rank trains.
        rank: this one.
        place: of the attempt.
        until: last step.
        saves: steps to save.
        note: called with the step that was restored, and with each one after it.
    """
    checkpointer = place.checkpointer(trained, rank, dist.get_world_size())
    restored = checkpointer.restore()
    note(restored)
    for step in range(restored + 1, until + 1):
        trained.step()
        if step == restored + 1:
            checkpointer.prepare()
        note(step)
        if step in saves:
            attachments = {f"runs/run/metrics/{place.attempt}-{step}": "x"}
            data = trained.data.state_dict()
            checkpointer.save(step, data=data, attachments=attachments, loss=loss_at(step))
    checkpointer.settle(240)
    dist.barrier()
    return restored


def loss_at(step: int) -> float:
    """That of a step whose checkpoint is to be told apart."""
    return 1.0 / step


def train(rank: int, place: Place, until: int, saves: tuple[int, ...]) -> dict[Any, Any]:
    """One attempt; what was restored, random numbers then, and weights by step."""
    trainee = Trainee(rank, sharded=place.sharded, seed=place.attempt)
    for parameter in trainee.model.parameters():
        if not place.sharded:
            dist.broadcast(parameter.data, 0)
    seen: dict[Any, Any] = {}

    def note(step: int) -> None:
        seen.setdefault("random", float(torch.get_rng_state().double().sum()))
        seen[step] = trainee.weights()

    seen["restored"] = cycle(trainee, rank, place, until, saves, note=note)
    return seen


def train_and_fail(rank: int, place: Place, until: int, saves: tuple[int, ...]) -> str:
    """Likewise, and the error that the end brings."""
    with pytest.raises(StorageError) as caught:
        train(rank, place, until, saves)
    return f"{caught.type.__name__}: {caught.value}"


def train_and_save_again(rank: int, place: Place, step: int, between: str) -> tuple[Any, Any]:
    """Save a step, go on, and save other weights as the same step, as after going back."""
    trainee = Trainee(rank, sharded=place.sharded, seed=place.attempt)
    checkpointer = place.checkpointer(trainee, rank, dist.get_world_size())
    checkpointer.restore()
    saved = []
    for generation in (0, 2):
        trainee.step()
        if generation:
            checkpointer.forget(generation)
        saved.append(trainee.weights())
        checkpointer.save(step, data=trainee.data.state_dict())
        if between == "settle":
            checkpointer.settle(240)
    checkpointer.settle(240)
    dist.barrier()
    return saved[0], saved[1]


def train_without_room(rank: int, place: Place, refusals: int) -> list[bool]:
    """Save three steps while rank 1 has no memory at first; which saves were behind."""
    refuse = TieredSaver._refusal

    def refusal(saver: TieredSaver, size_bytes: int) -> str | None:
        nonlocal refusals
        refusals -= 1
        return "full" if rank == 1 and refusals >= 0 else refuse(saver, size_bytes)

    TieredSaver._refusal = refusal  # type: ignore[assignment,method-assign]
    trainee = Trainee(rank, sharded=place.sharded, seed=place.attempt)
    checkpointer = place.checkpointer(trainee, rank, dist.get_world_size())
    checkpointer.restore()
    behind = []
    for step in (1, 2, 3):
        trainee.step()
        checkpointer.save(step, data=trainee.data.state_dict())
        behind.append(checkpointer.is_behind)
    checkpointer.settle(240)
    dist.barrier()
    return behind
