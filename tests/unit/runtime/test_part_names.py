"""Checkpoints of a model of which ranks hold different parts, under names that are the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.local import LocalStore
from perdure.training.config.model import ParallelKind
from perdure.training.config.run_name import InitFromSpec
from perdure.training.errors import InputError
from perdure.training.recovery.replicas import ParallelLayout
from perdure.training.runtime.state.checkpointer import Checkpointer
from perdure.training.runtime.state.initial import InitialState
from perdure.training.runtime.state.live import LiveState
from perdure.training.runtime.state.part_names import PartNames
from tests.jobs import small_job
from tests.unit.runtime.trainees import CPU, Place, Trainee

STEP = 2
SAVED, FEWER, OTHER = ParallelLayout(dp=2, tp=2), ParallelLayout(tp=2), ParallelLayout(tp=4)


class Part(Trainee):
    """A part of a model, with a rate of its own and a schedule that does nothing."""

    def __init__(self, part: int, *, seed: int = 0) -> None:
        super().__init__(seed=seed + 10 * part)
        self.optimizer.param_groups[0]["eps"] = 1e-8 * (1 + part)

    def known(self) -> str:
        """Hash of weights, moments and settings."""
        state = {
            name: part for name, part in self.state().items() if name in ("model", "optimizer")
        }
        return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def checkpointer(rank: int, place: Place, part: Part, layout: ParallelLayout) -> Checkpointer:
    context = replace(place.context(rank, dist.get_world_size()), own_layout=layout)
    store = CheckpointStore(LocalStore(place.folder / "store"), "run")
    return Checkpointer(context, store, part.training, CPU)


def train(rank: int, place: Place) -> str:
    """Train and save; what this rank has saved."""
    part = Part(rank % 2)
    for _ in range(STEP):
        part.step()
    checkpointer(rank, place, part, SAVED).save(STEP, data=part.data.state_dict())
    return part.known()


def restore(rank: int, place: Place, layout: ParallelLayout) -> str:
    """What a rank has after a restore, or why there is none."""
    part = Part(9, seed=rank)
    try:
        assert checkpointer(rank, place, part, layout).restore() == STEP
    except InputError as error:
        return str(error)
    return part.known()


def begin(rank: int, place: Place, layout: ParallelLayout) -> dict[str, Any]:
    """What a rank of another run takes over."""
    part = Part(rank % 2, seed=77)
    context = replace(place.context(rank, dist.get_world_size()), own_layout=layout)
    own = CheckpointStore(LocalStore(place.folder / "store"), "heir")
    spec = InitFromSpec(run="run", step=STEP)
    names = PartNames.of(context)
    InitialState(spec, own, LiveState(part.training), CPU, names=names).load()
    return {"own": part.known(), "others": names.is_anothers(f"model/part{1 - rank % 2:05d}/x")}


def test_every_rank_gets_its_own_part_back_on_any_number_of_copies(cluster):
    place = Place(cluster.folder, 1, (None,), (None,))
    saved = cluster.run(train, place, num_ranks=4)
    assert saved[:2] == saved[2:]
    assert saved[0] != saved[1]
    names = cluster.checkpoints.manifest(STEP).tensors
    assert {"model/part00000/0.weight", "model/part00001/0.weight"} <= names.keys()
    assert not any(name.startswith("model/0") for name in names)

    again = replace(place, attempt=2)
    cluster.checkpoints.fence(1, 2)
    assert cluster.run(restore, again, FEWER, num_ranks=2) == saved[:2]
    taken = cluster.run(begin, again, FEWER, num_ranks=2)
    assert taken == [{"own": known, "others": True} for known in saved[:2]]
    refused = cluster.run(restore, again, OTHER, num_ranks=4)
    assert len(set(refused)) == 1
    assert (
        "parallelism: the checkpoint of step 2 is of a model in 2 parts, and the layout has 4"
        in (refused[0])
    )


@pytest.mark.parametrize(
    ("parallelism", "holds_parts"),
    [
        ({}, False),
        ({"kind": ParallelKind.FSDP2}, False),
        ({"kind": ParallelKind.HSDP, "replicas": 2}, False),
        ({"context": 2}, False),
        ({"optimizer_weight_shard_size": 2}, True),
        ({"tensor": 2}, True),
        ({"pipeline": 2}, True),
        ({"expert": 2}, True),
        ({"kind": ParallelKind.FSDP2, "tensor": 2}, True),
    ],
    ids=str,
)
def test_plain_tensors_are_parts_where_ranks_have_different_ones(
    tmp_path, parallelism: Mapping[str, Any], holds_parts
):
    job = small_job(
        tmp_path,
        worker={"recipe": "own:main"},
        batch={"global_batch_size": 8},
        parallelism=parallelism,
    )
    (tmp_path / "job.json").write_text(job.model_dump_json())
    names = PartNames.of(Place(tmp_path, 1, (None,), (None,)).context(1, 4))
    assert (names.part is not None) is holds_parts
    assert names.tensors({"model/a": torch.zeros(1)}).keys() == (
        {f"model/part{names.part:05d}/a"} if holds_parts else {"model/a"}
    )


@pytest.mark.usefixtures("group")
def test_a_dtensor_is_named_after_its_pipeline_stage_alone():
    sharded = distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (1,)), [Shard(0)])
    live = {
        "model/a": sharded,
        "optim/state.a.exp_avg": sharded,
        "optim/state.a.step": torch.ones(1),
    }
    assert set(PartNames(1, 2).tensors(live)) == {
        "model/a",
        "optim/state.a.exp_avg",
        "optim/state.part00001/a.step",
    }
    assert set(PartNames(1, 2, stage=1).tensors(live)) == {
        "model/stage00001/a",
        "optim/state.stage00001/a.exp_avg",
        "optim/state.part00001/a.step",
    }


def test_a_checkpoint_without_parts_is_refused_by_a_layout_that_has_them():
    names = ["model/a", "random/rank00000/torch"]
    PartNames().check(names, step=7)
    with pytest.raises(InputError, match="step 7 is of a model in no parts, and the layout has 2"):
        PartNames(0, 2).check(names, step=7)
    with pytest.raises(InputError, match="is of a model in 1 parts, and the layout has none"):
        PartNames().check(["model/part00000/a"], step=7)
