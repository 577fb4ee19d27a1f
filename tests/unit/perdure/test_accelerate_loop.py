"""A loop over accelerate without Perdure, its data, and what is refused under it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedType,
    FullyShardedDataParallelPlugin,
)
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from perdure.integrations.accelerate import evaluation, training_steps
from perdure.integrations.accelerate_data import PreparedData
from perdure.integrations.accelerate_settings import check_loader, check_loop, samples_per_batch
from perdure.integrations.sharding import shard_on_cpu
from perdure.training.errors import InputError
from perdure.training.runtime.errors import NotApplied
from perdure.training.runtime.session import Session
from tests.jobs import small_job


@pytest.fixture(autouse=True)
def state():
    """Accelerate's state belongs to the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Numbers(Dataset[torch.Tensor]):
    """Its indices, of which it notes those that are read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return torch.tensor([float(index)])


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self):
        yield from (torch.tensor([float(index)]) for index in range(12))


def accelerator_of(**config: Any) -> Any:
    return Accelerator(
        cpu=True, gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration(**config)
    )


def parts(*, length: int = 16, **config: Any) -> tuple[Any, dict[str, Any], Numbers]:
    """A prepared training: accelerator, what the loop is given, and the dataset."""
    torch.manual_seed(5)
    accelerator, data = accelerator_of(**config), Numbers(length)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    loader = DataLoader(data, batch_size=2, shuffle=True)
    prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    names = ("model", "optimizer", "loader", "scheduler")
    return accelerator, dict(zip(names, prepared, strict=True)), data


def own_loop(accelerator: Any, given: dict[str, Any]) -> None:
    """What people write."""
    model, optimizer, scheduler = given["model"], given["optimizer"], given["scheduler"]
    for _ in range(2):
        for batch in given["loader"]:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch / 9).square().mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


def state_of(given: dict[str, Any]) -> tuple[list[float], float]:
    weights = [one.item() for one in given["model"].parameters()]
    return weights, given["scheduler"].get_last_lr()[0]


def test_without_perdure_the_steps_are_those_of_a_loop_over_accelerate():
    assert Session.current is None
    accelerator, given, _ = parts(use_seedable_sampler=True)
    own_loop(accelerator, given)
    expected = state_of(given)
    accelerator, given, _ = parts(use_seedable_sampler=True)
    numbers: list[int] = []
    updates: list[float] = []
    steps = training_steps(
        accelerator,
        **given,
        max_grad_norm=0.5,
        until=8,
        on_applied=lambda: updates.append(state_of(given)[0][0]),
    )
    for step in steps:
        with evaluation(), step:
            for batch in step.micro_batches():
                step.backward(given["model"](batch / 9).square().mean())
            step.apply()
            numbers.append(step.number)
    assert numbers == list(range(1, 9))
    assert (len(updates), updates[-1]) == (8, expected[0][0])
    assert state_of(given) == expected


def test_the_last_step_of_an_epoch_is_the_mean_of_what_is_left():
    accelerator, given, _ = parts(length=6)
    gradients = []
    for step in training_steps(accelerator, **given, until=2):
        with step:
            for _ in step.micro_batches():
                step.backward(given["model"](torch.ones(1)).sum())
            gradients.append(given["model"].weight.grad.item())
            step.apply()
    assert gradients == [1.0, 1.0]  # of two batches, and of one


def test_a_step_that_is_not_applied_is_named():
    accelerator, given, _ = parts()
    steps = training_steps(accelerator, **given, until=2)
    with pytest.raises(NotApplied, match="step 1: the body ended"), next(steps):
        pass


def refused(text: str) -> Any:
    return pytest.raises(InputError, match=text)


def test_without_perdure_the_number_of_steps_is_asked_for():
    accelerator, given, _ = parts()
    with refused(r"training_steps\(until=...\): not started by perdure run: say how far"):
        next(training_steps(accelerator, **given))


def data_of(length: int = 16, **config: Any) -> tuple[PreparedData, Numbers]:
    accelerator, given, numbers = parts(length=length, **config)
    size = samples_per_batch(accelerator, given["loader"])
    return PreparedData(given["loader"], size, batches_per_step=3, seed=7), numbers


def values(batches: Any) -> list[list[float]]:
    return [batch.flatten().tolist() for batch in batches]


@pytest.mark.parametrize("is_seedable", [True, False])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_another_process_goes_on_in_the_order_and_reads_no_sample_again(is_seedable, num_steps):
    data, _ = data_of(use_seedable_sampler=is_seedable)
    for _ in range(num_steps):
        data.next_step()
    state = data.state_dict()
    following = [values(data.next_step()) for _ in range(5)]
    torch.manual_seed(99)
    other, numbers = data_of(use_seedable_sampler=is_seedable)
    other.load_state_dict(state)
    assert other.position == state["position"]
    first = values(other.next_step())
    assert first == following[0]
    ahead = 2  # samples of the batch that accelerate reads beforehand
    assert len(numbers.read) <= len(first) * 2 + ahead
    assert [values(other.next_step()) for _ in range(4)] == following[1:]


def test_epoch_follows_on_epoch_in_another_order():
    data, _ = data_of()
    steps = [values(data.next_step()) for _ in range(6)]
    assert [len(step) for step in steps] == [3, 3, 2, 3, 3, 2]
    one, two = (
        [value for step in steps[at : at + 3] for batch in step for value in batch] for at in (0, 3)
    )
    assert one != two
    assert sorted(one) == sorted(two) == list(range(16))
    assert (data.epoch, data.position) == (1, 32)


def test_data_goes_back_within_a_process():
    data, _ = data_of()
    data.next_step()
    state = data.state_dict()
    expected = [values(data.next_step()) for _ in range(4)]
    data.load_state_dict(state)
    assert [values(data.next_step()) for _ in range(4)] == expected
    data.close()


def test_the_order_of_a_checkpoint_holds_whatever_this_process_has_drawn():
    data, _ = data_of(use_seedable_sampler=True, data_seed=1)
    state, expected = data.state_dict(), values(data.next_step())
    other, _ = data_of(use_seedable_sampler=True, data_seed=2)
    other.load_state_dict(state)
    assert values(other.next_step()) == expected


def test_a_place_within_a_batch_is_refused():
    data, _ = data_of()
    state = data.state_dict() | {"samples": 3}
    with refused("batch_size: 2 samples of all ranks in a batch do not divide the 3"):
        data.load_state_dict(state)


def test_a_loader_without_a_batch_is_refused():
    accelerator = accelerator_of()
    loader = accelerator.prepare(DataLoader(Numbers(1), batch_size=2, drop_last=True))
    with refused("epoch 2 has no batch"):
        PreparedData(loader, 2, 1).next_step()


def test_a_stream_is_read_up_to_its_place():
    accelerator = accelerator_of(dispatch_batches=False)
    stream = accelerator.prepare(DataLoader(Stream(), batch_size=2))
    size = samples_per_batch(accelerator, stream)
    data = PreparedData(stream, size, batches_per_step=2, seed=1)
    data.load_state_dict({"epoch": 0, "samples": 4, "position": 4, "order": None})
    assert values(data.next_step()) == [[4.0, 5.0], [6.0, 7.0]]


def test_batches_of_no_size_are_refused():
    class Varying(BatchSampler):
        def __init__(self) -> None:
            pass

        def __iter__(self):
            return iter([[0], [1, 2]])

    accelerator = accelerator_of()
    loader = DataLoader(Numbers(3), batch_sampler=Varying())
    with refused("batches of one size, from a DataLoader with a batch_size"):
        samples_per_batch(accelerator, loader)


def test_a_loader_by_which_one_rank_reads_for_all_or_that_was_not_prepared_is_refused():
    accelerator = accelerator_of(dispatch_batches=True)
    with refused("DataLoaderDispatcher: each rank reads its own batches"):
        check_loader(accelerator.prepare(DataLoader(Numbers(4), batch_size=2)))
    with refused("DataLoader: each rank reads its own batches"):
        check_loader(DataLoader(Numbers(4), batch_size=2))


def test_ranks_with_other_numbers_of_batches_are_refused():
    accelerator = accelerator_of()
    sampler = BatchSampler(RandomSampler(range(4)), 2, drop_last=False)
    sampler.even_batches = False  # type: ignore[attr-defined]
    loader = accelerator.prepare(DataLoader(Numbers(4), batch_sampler=sampler))
    with refused("even_batches: false"):
        check_loader(loader)


def session(**changes: Any) -> Any:
    """A session, as far as checks look at it."""
    return SimpleNamespace(job=small_job(**changes), world_size=1)


def test_a_loop_as_it_is_passes():
    check_loop(session(steps=3), accelerator_of(), until=3)
    check_loop(session(steps=3), accelerator_of(), until=None)


def test_a_target_that_is_not_the_jobs_is_refused_with_both_values():
    with refused("steps: 3 in the job, but training_steps has until=4: leave that out"):
        check_loop(session(steps=3), accelerator_of(), until=4)


def test_an_accelerator_that_sees_other_ranks_is_refused():
    two = session()
    two.world_size = 2
    with refused("Accelerator: accelerate sees 1 ranks, and the run has 2"):
        check_loop(two, accelerator_of(), until=None)


@pytest.mark.parametrize("kind", ["fsdp2", "hsdp"])
def test_a_wrapping_that_is_not_the_jobs_is_refused(kind):
    parallelism = {"kind": kind} | ({"replicas": 2} if kind == "hsdp" else {})
    with refused(f"parallelism.kind: {kind}"):
        check_loop(session(parallelism=parallelism), accelerator_of(), until=None)


@pytest.mark.parametrize(
    ("version", "text"),
    [(2, "parallelism.kind: ddp, but accelerate wraps in fsdp2"), (1, "fsdp_version: 1")],
)
def test_a_model_that_is_sharded_in_another_way_is_refused(version, text):
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    with refused(text):
        check_loop(session(), accelerator, until=None)


def test_one_rank_on_the_cpu_is_not_sharded():
    accelerator = Accelerator(cpu=True)
    shard_on_cpu(accelerator, FullyShardedDataParallelPlugin(fsdp_version=2))
    assert not accelerator.is_fsdp2
