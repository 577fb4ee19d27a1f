"""The full state of a training on another number of ranks and another kind of parallelism.

Restored state is compared bit by bit, always. Steps after it give the same bits where the maths is
the same: where one rank has the whole batch, and the others add zeros to its gradients. Where the
batch is split, as in a real run, sums over it are rounded in another order on another number of
ranks; how far losses may then be apart is the tests' bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from perdure.training.runtime.program import Training
from tests.unit.runtime.trainees import Loader, Place, cycle, shard, whole
from tests.unit.storage.nodes import Cluster

SAVED, LAST = 3, 5
BATCH_SIZE = 16  # samples, of all ranks together
# Of a loss, relative: one forward pass rounded in another order, and one update more.
SAME_STATE, NEXT_STATE = 1e-6, 1e-5


class Student:
    """AdamW, a schedule, a scaler and a position; dimensions that 2, 4 and 8 ranks cut unevenly."""

    def __init__(self, kind: str, *, is_split: bool, seed: int) -> None:
        torch.manual_seed(seed)
        layers = [nn.Linear(5, 11), nn.LayerNorm(11), nn.GELU(), nn.Linear(11, 3)]
        self.model: nn.Module = nn.Sequential(*layers)
        self.seen = torch.zeros((), dtype=torch.int64)
        self.model.register_buffer("seen", self.seen)
        if kind == "fsdp":
            shard(self.model, layers[0], layers[3])
        else:
            self.model = DistributedDataParallel(self.model)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=0.05, betas=(0.8, 0.95), weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.7)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4)
        self.data = Loader()
        self.training = Training(
            self.model, [self.optimizer], [self.scheduler], self.scaler, self.data, 1.0
        )
        self.losses: list[float] = []
        self._is_split = is_split

    def step(self) -> None:
        """One step; keeps the loss of the whole batch."""
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        generator = torch.Generator().manual_seed(self.data.samples)
        inputs, wanted = (torch.randn(BATCH_SIZE, n, generator=generator) for n in (5, 3))
        if self._is_split:
            own = slice(rank * BATCH_SIZE // num_ranks, (rank + 1) * BATCH_SIZE // num_ranks)
            inputs, wanted = inputs[own], wanted[own]
        share = (self.model(inputs) - wanted).square().sum() / BATCH_SIZE
        if not self._is_split and rank > 0:
            share = share * 0.0
        # Both kinds take the mean of the ranks' gradients; powers of two cost no bits.
        self.scaler.scale(share * num_ranks).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.data.samples += BATCH_SIZE
        self.seen += 1
        loss = share.detach().clone()
        dist.all_reduce(loss)
        self.losses.append(float(loss.item()))

    def tensors(self) -> dict[str, Any]:
        """Every tensor of model and optimizer, whole, by name."""
        model = {n.removeprefix("module."): t for n, t in self.model.state_dict().items()}
        found = {f"model/{name}": whole(tensor).tolist() for name, tensor in model.items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            for name, value in state.items():
                found[f"optimizer/{number}/{name}"] = whole(value).tolist()
        return found

    def settings(self) -> dict[str, Any]:
        """All other state."""
        return {
            "optimizer": self.optimizer.state_dict()["param_groups"],
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "data": self.data.state_dict(),
        }


@dataclass(frozen=True)
class Seen:
    """What one rank saw."""

    restored: int
    tensors: dict[int, dict[str, Any]]
    settings: dict[int, dict[str, Any]]
    losses: dict[int, float]
    has_shards: bool


def study(rank: int, place: Place, kind: str, is_split: bool) -> Seen:  # noqa: FBT001 a process's
    """Restore, go on to the last step, and save on the way."""
    student = Student(kind, is_split=is_split, seed=place.attempt)
    tensors, settings = {}, {}

    def note(step: int) -> None:
        if step:
            tensors[step], settings[step] = student.tensors(), student.settings()

    restored = cycle(student, rank, place, LAST, (SAVED,), note=note)
    sharded = [isinstance(one, DTensor) for one in student.model.parameters()]
    assert all(sharded) or not any(sharded)
    losses = dict(enumerate(student.losses, start=restored + 1))
    return Seen(restored, tensors, settings, losses, all(sharded))


def attempt(
    cluster: Cluster, number: int, kind: str, num_ranks: int, *, keeps: bool, is_split: bool
) -> list[Seen]:
    """One attempt of a run to its end; what its ranks saw."""
    cluster.checkpoints.fence(1, number)
    names = tuple(node.name if keeps else None for node in cluster.nodes)
    place = Place(cluster.folder, number, names, (None,) * len(names))
    results = cluster.run(study, place, kind, is_split, num_ranks=num_ranks)
    assert {one.has_shards for one in results} == {kind == "fsdp"}
    for other in results[1:]:
        assert (other.losses, other.tensors) == (results[0].losses, results[0].tensors)
    return results


@pytest.mark.parametrize(
    ("saver", "readers", "is_split", "keeps"),
    [
        pytest.param(
            *("ddp", [("fsdp", 2), ("fsdp", 8)], False, True),
            id="DDP on 4 to FSDP2 on 2 and 8, from the nodes' memory",
        ),
        pytest.param(
            *("fsdp", [("ddp", 2)], False, False),
            id="FSDP2 on 4 to DDP on 2, from the store",
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("ddp", [("fsdp", 2)], True, False),
            id="DDP on 4 to FSDP2 on 2, the batch split",
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_full_state_goes_to_another_world_and_trains_on_as_if_never_stopped(
    cluster, saver, readers, is_split, keeps
):
    for _ in range(2):
        cluster.node(disk=False)
    never_stopped = attempt(cluster, 1, saver, 4, keeps=keeps, is_split=is_split)[0]
    assert never_stopped.restored == 0
    assert cluster.checkpoints.verify(SAVED) == []
    names = never_stopped.tensors[SAVED]
    assert {name for name in names if name.startswith("optimizer/")} == {
        f"optimizer/{parameter}/{part}"
        for parameter in range(6)
        for part in ("step", "exp_avg", "exp_avg_sq")
    }
    for number, (kind, num_ranks) in enumerate(readers, start=2):
        for results in attempt(cluster, number, kind, num_ranks, keeps=keeps, is_split=is_split):
            assert results.restored == SAVED
            assert results.settings == {
                step: never_stopped.settings[step] for step in results.settings
            }
            assert results.tensors[SAVED] == never_stopped.tensors[SAVED]
            if is_split:
                first, second = (results.losses[step] for step in (SAVED + 1, SAVED + 2))
                assert first == pytest.approx(never_stopped.losses[SAVED + 1], rel=SAME_STATE)
                assert second == pytest.approx(never_stopped.losses[SAVED + 2], rel=NEXT_STATE)
            else:
                for step in (SAVED + 1, SAVED + 2):
                    assert results.losses[step] == never_stopped.losses[step]
                    assert results.tensors[step] == never_stopped.tensors[step]
