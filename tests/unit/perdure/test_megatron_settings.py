"""Arguments of Megatron: the layout they give, and those that are refused by name."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from perdure.integrations.megatron_data import Evaluations, MovableLoader, StepData
from perdure.integrations.megatron_settings import (
    REFUSED,
    check_arguments,
    check_training,
    check_version,
    layout_of,
    num_results,
)
from perdure.training.errors import InputError
from perdure.training.recovery.replicas import ParallelLayout, RankOrder

USUAL = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "use_distributed_optimizer": False,
    "num_distributed_optimizer_instances": 1,
    "use_tp_pp_dp_mapping": False,
}
JOB: Any = SimpleNamespace(
    steps=10,
    restart=SimpleNamespace(data_skipping=False, numeric_retry=False, snapshot_every_steps=5),
)


@pytest.mark.parametrize("version", ["0.12.1", "0.12.3", "0.16.1", "0.16.4", "0.16.2rc1"])
def test_a_tested_release_is_taken(version):
    check_version(version)


@pytest.mark.parametrize(
    "version", ["0.12.0", "0.13.0", "0.15.3", "0.16.0", "0.17.0", "1.0", "unknown"]
)
def test_another_release_is_refused_in_one_line(version):
    with pytest.raises(InputError, match=rf"megatron-core: {version}: .* from 0\.16\.1"):
        check_version(version)


@pytest.mark.parametrize(("version", "count"), [("0.12.1", 7), ("0.12.3", 7), ("0.16.1", 8)])
def test_a_step_returns_what_the_loop_of_its_release_takes(version, count):
    assert num_results(version) == count


@pytest.mark.parametrize(
    ("world_size", "changes", "layout"),
    [
        (4, {}, ParallelLayout(dp=4)),
        (8, {"tensor_model_parallel_size": 2}, ParallelLayout(dp=4, tp=2)),
        (8, {"pipeline_model_parallel_size": 4}, ParallelLayout(dp=2, pp=4)),
        (8, {"use_distributed_optimizer": True}, ParallelLayout(dp=8, optimizer_shards=8)),
        (
            8,
            {
                "use_distributed_optimizer": True,
                "num_distributed_optimizer_instances": 2,
                "context_parallel_size": 2,
            },
            ParallelLayout(dp=4, cp=2, optimizer_shards=4),
        ),
        (
            8,
            {"expert_model_parallel_size": 2, "use_tp_pp_dp_mapping": True},
            ParallelLayout(dp=8, ep=2, order=RankOrder.DP_LAST),
        ),
    ],
)
def test_the_layout_is_read_from_the_arguments(world_size, changes, layout):
    assert layout_of(Namespace(**{**USUAL, **changes}), world_size) == layout


@pytest.mark.parametrize(
    "changes",
    [
        {"tensor_model_parallel_size": 3},
        {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 3},
        {"expert_model_parallel_size": 3},
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes):
    with pytest.raises(InputError):
        layout_of(Namespace(**{**USUAL, **changes}), 8)


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_breaks_recovery_is_refused_with_its_reason(name):
    flag = f"--{name.replace('_', '-')}: on: "
    with pytest.raises(InputError) as refused:
        check_arguments(JOB, Namespace(**{name: True}))
    assert str(refused.value) == flag + REFUSED[name]


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [("rerun_mode", "validate_results", "disabled"), ("cuda_graph_impl", "local", "none")],
)
def test_a_mode_is_refused_with_the_one_to_give(name, value, wanted):
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(InputError, match=f"{flag}: {value}: .*: give {flag} {wanted}"):
        check_arguments(JOB, Namespace(**{name: value}))


def test_arguments_that_are_off_are_taken():
    check_arguments(JOB, Namespace(**dict.fromkeys(REFUSED, False), rerun_mode="disabled"))


def test_another_number_of_steps_and_an_unknown_optimizer_are_refused():
    with pytest.raises(InputError, match="steps: 10 in the job, but --train-iters is 12"):
        check_training(JOB, Namespace(train_iters=12), ["FP32Optimizer"])
    with pytest.raises(InputError, match="--optimizer: LayerWiseOptimizer: "):
        check_training(JOB, Namespace(train_iters=10), ["LayerWiseOptimizer"])


def loader_from(consumed_samples: int) -> range:
    return range(consumed_samples // 4, 100)  # micro-batches of four samples


def data_of(iterators: Any, loaders: list[MovableLoader]) -> StepData:
    return StepData(
        iterators, loaders, position=0, num_micro_batches=lambda _: 2, samples_per_micro_batch=4
    )


def test_steps_are_drawn_by_position_and_a_loader_is_moved_either_way():
    loader = MovableLoader(loader_from(0), loader_from)
    data = data_of(iter(loader), [loader])
    assert (data.next_step(), data.position) == ([0, 1], 8)
    state = data.state_dict()
    data.load_state_dict({"consumed_train_samples": 80})
    assert data.next_step() == [20, 21]
    data.load_state_dict(state)
    assert data.next_step() == [2, 3]


def test_an_iterator_without_a_loader_is_read_up_to_the_place_and_never_back():
    data = data_of(iter(range(100)), [])
    data.load_state_dict({"consumed_train_samples": 32})
    assert data.next_step() == [8, 9]
    with pytest.raises(InputError, match="cannot go back"):
        data.load_state_dict({"consumed_train_samples": 8})


def test_a_rank_that_reads_nothing_counts_as_the_others_do():
    data = data_of(None, [])
    data.load_state_dict({"consumed_train_samples": 32})
    assert (data.next_step(), data.position) == ([None, None], 40)
    assert data.iterators_of(iter([None, None])) is None


def test_each_model_chunk_has_an_iterator_of_its_own():
    data = data_of([iter(range(10)), None, iter(range(50, 60))], [])
    batches = data.next_step()
    first, second, third = data.iterators_of(iter(batches))
    assert ([*first], second, [*third]) == ([0, 1], None, [50, 51])


def evaluations_of(args: Namespace, *, joins: bool) -> tuple[Evaluations, MovableLoader]:
    loader = MovableLoader(loader_from(args.consumed_valid_samples), loader_from)
    return Evaluations(args, [loader], joins=joins), loader


def test_a_process_that_joins_evaluates_where_the_others_do_and_what_they_do():
    others, _ = evaluations_of(
        Namespace(do_valid=True, do_test=False, consumed_valid_samples=24), joins=False
    )
    args = Namespace(do_valid=False, do_test=False, consumed_valid_samples=0)
    joined, loader = evaluations_of(args, joins=True)
    rows = iter(loader)
    assert next(rows) == 0
    joined.load_state_dict(others.state_dict())
    assert (args.do_valid, args.do_test, args.consumed_valid_samples) == (True, False, 24)
    assert next(rows) == 6


@pytest.mark.parametrize("flag", [True, False])
def test_a_run_that_starts_again_evaluates_as_its_arguments_say(flag):
    args = Namespace(do_valid=flag, do_test=flag, consumed_valid_samples=0)
    state = {"do_valid": not flag, "do_test": not flag, "consumed_valid_samples": 8}
    evaluations_of(args, joins=False)[0].load_state_dict(state)
    assert (args.do_valid, args.do_test, args.consumed_valid_samples) == (flag, flag, 8)


@pytest.mark.parametrize(("eval_iters", "expected"), [(2, 24), (5, 48), (None, 9), ([3, 4], 9)])
def test_an_evaluation_that_is_cut_short_has_all_ranks_at_the_same_place(eval_iters, expected):
    args = Namespace(consumed_valid_samples=8, eval_iters=eval_iters, global_batch_size=8)
    evaluations, _ = evaluations_of(args, joins=False)

    def evaluate() -> None:
        with evaluations.moved_on():
            args.consumed_valid_samples = 9  # somewhere in it
            raise RuntimeError("cut")

    with pytest.raises(RuntimeError, match="cut"):
        evaluate()
    assert args.consumed_valid_samples == expected
