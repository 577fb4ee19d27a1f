"""Whether a program's layout fits its ranks and its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from perdure.training.errors import InputError
from perdure.training.recovery.replicas import ParallelLayout
from perdure.training.runtime.context import WorkerContext
from perdure.training.runtime.layout_checks import check_layout, fitting_layout
from tests.jobs import small_job
from tests.unit.runtime.trainees import Place

TENSOR = ParallelLayout(dp=2, tp=2)


@pytest.fixture
def context(tmp_path) -> Callable[..., WorkerContext]:
    """Of rank 1 of four."""

    def make(layout: ParallelLayout | None = None, **parallelism: Any) -> WorkerContext:
        job = small_job(
            tmp_path,
            worker={"recipe": "own:main"},
            batch={"global_batch_size": 8},
            parallelism=parallelism,
        )
        (tmp_path / "job.json").write_text(job.model_dump_json())
        return replace(Place(tmp_path, 1, (None,), (None,)).context(1, 4), own_layout=layout)

    return make


def test_a_program_may_give_its_layout_or_leave_it_to_the_job(context):
    assert fitting_layout(None, context(tensor=2)) is None
    assert fitting_layout(TENSOR, context()) == TENSOR
    assert fitting_layout(TENSOR, context(tensor=2)) == TENSOR
    assert context(TENSOR).layout == context(tensor=2).layout == TENSOR


@pytest.mark.parametrize(
    ("layout", "parallelism", "words"),
    [
        (ParallelLayout(dp=2), {}, "dp x tp x pp x cp = 2, but there are 4 ranks"),
        (TENSOR, {"pipeline": 2}, "is not the job's"),
    ],
    ids=["ranks", "job"],
)
def test_a_layout_that_does_not_fit_is_refused(context, layout, parallelism, words):
    with pytest.raises(InputError, match=words):
        fitting_layout(layout, context(**parallelism))


@pytest.mark.usefixtures("group")
def test_a_model_whose_parts_only_the_program_knows_needs_its_clip(context):
    plain = nn.Linear(2, 2)
    check_layout(plain, context(), clips_itself=False)
    check_layout(plain, context(TENSOR), clips_itself=True)
    with pytest.raises(InputError, match="weight is no DTensor, so that the norm"):
        check_layout(plain, context(TENSOR), clips_itself=False)


@pytest.mark.usefixtures("group")
def test_of_dtensors_torch_knows_the_norm_but_for_those_of_other_stages(context):
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Module()
    for name, placement in (("cut", Shard(0)), ("whole", Replicate())):
        part = distribute_tensor(torch.ones(2), mesh, [placement])
        model.register_parameter(name, nn.Parameter(part))
    check_layout(model, context(TENSOR), clips_itself=False)
    with pytest.raises(InputError, match="split over ranks and pp=2, ep=1"):
        check_layout(model, context(ParallelLayout(dp=2, pp=2)), clips_itself=False)
