"""Wrapping and seeding, as far as one process shows them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perdure.training.config.model import ModelSpec, ParallelKind, ParallelSpec, Precision
from perdure.training.runtime.step_loop.wrappers import settle_buckets
from perdure.training.trainer.model import Decoder
from perdure.training.trainer.pretrain import DTYPES, data_parallel, seed_all, wrap

CPU = torch.device("cpu")
TINY = ModelSpec(num_layers=1, hidden_size=16, num_heads=2, seq_len=8)


def wrapped(model: Decoder, kind: ParallelKind) -> torch.nn.Module:
    spec = ParallelSpec(kind=kind)
    return wrap(model, spec, precision=Precision.FP32, device=CPU, world_size=1)


def test_ddp_wraps_the_same_parameters(group):
    model = Decoder(TINY, 32)
    ddp = wrapped(model, ParallelKind.DDP)
    assert isinstance(ddp, DistributedDataParallel)
    assert [id(p) for p in ddp.parameters()] == [id(p) for p in model.parameters()]


@pytest.mark.parametrize(("megabytes", "buckets"), [(None, [1, 2]), (1, [1, 1, 1])])
def test_the_size_of_buckets_is_that_of_the_job(group, megabytes, buckets):
    model = nn.Sequential(
        *(nn.Linear(512, 512, bias=False) for _ in range(3))
    )  # 1 MB each; torch's own first bucket is 1 MB
    ddp = data_parallel(model, ParallelSpec(bucket_cap_mb=megabytes), device=CPU)
    settle_buckets(ddp)
    summed = []

    def count(_state, bucket):
        summed.append(bucket.buffer().numel())
        done = torch.futures.Future[torch.Tensor]()
        done.set_result(bucket.buffer())
        return done

    ddp.register_comm_hook(None, count)
    ddp(torch.ones(1, 512)).sum().backward()
    assert summed == [layers * 512 * 512 for layers in buckets]


def test_data_parallel_on_the_cpu_is_the_model_itself():
    model = Decoder(TINY, 32)
    assert wrapped(model, ParallelKind.DATA_PARALLEL) is model


def test_every_precision_has_its_type():
    assert DTYPES.keys() == set(Precision)


@pytest.fixture
def random_states():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    yield
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])  # noqa: NPY002
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_a_seed_settles_every_generator(random_states, seed):
    def draw():
        seed_all(seed)
        weights = Decoder(TINY, 32).embedding.weight.tolist()
        return weights, random.random(), np.random.rand()  # noqa: NPY002, S311

    assert draw() == draw()
