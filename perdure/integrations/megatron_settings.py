"""Which arguments of a Megatron program go together with a session, and the layout they give.

Only arguments are read here; megatron-core need not be installed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from perdure.training.config.job import Job
from perdure.training.errors import InputError
from perdure.training.recovery.replicas import ParallelLayout, RankOrder

# Releases of megatron-core whose private names the tests have replaced: from this one, below that.
# The older are MindSpeed-LLM's.
TESTED = (((0, 12, 1), (0, 13, 0)), ((0, 16, 1), (0, 17, 0)))
_NUMBERS = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")

# Argument, as args has it, to the reason why it is refused when it is on.
REFUSED: Mapping[str, str] = {
    "enable_gloo_process_groups": "its groups of gloo are not re-established after a fault: "
    "give --disable-gloo-process-groups",
    "enable_cuda_graph": "a captured graph keeps the collectives of a broken step",
    "external_cuda_graph": "a captured graph keeps the collectives of a broken step",
    "use_torch_fsdp2": "the optimizer's shards are known for --use-distributed-optimizer alone",
    "use_megatron_fsdp": "the optimizer's shards are known for --use-distributed-optimizer alone",
    "reuse_grad_buf_for_mxfp8_param_ag": "gradients and gathered weights share memory, so that a "
    "step cannot be begun again",
    "overlap_param_gather_with_optimizer_step": "a gather within the optimizer may be cut short "
    "when some ranks have applied the step",
    "use_precision_aware_optimizer": "its copies of weights are not reached",
    "optimizer_cpu_offload": "its copies of weights are not reached",
    "fp8": "amax histories move in a forward pass that may be done again",
    "fp4": "amax histories move in a forward pass that may be done again",
    "moe_router_enable_expert_bias": "the bias moves before all ranks have agreed on the step",
    "qk_clip": "it runs collectives behind the optimizer",
    "log_max_attention_logit": "it runs collectives behind the optimizer",
    "log_params_norm": "a process that joins later cannot take part in it",
    "log_straggler": "a process that joins later cannot take part in it",
    "check_weight_hash_across_dp_replicas_interval": "watch.consistency_every_steps compares the "
    "replicas",
    "inprocess_restart": "Perdure replaces ranks itself",
    "enable_high_availability": "Perdure replaces ranks itself: restart.from_platform takes this "
    "argument, and those that belong to it",
    "adlr_autoresume": "Perdure restarts the run",
    "async_save": "checkpoint of the job saves beside the training",
    "iterations_to_skip": "restart.data_skipping is for sessions of your own",
    "save_wgrads_interval": "gradients are reduced in another way in such steps",
    "save_dgrads_interval": "a step that is done again would write them twice",
    "vision_pretraining": "its update behind the optimizer is not part of a step",
    "perform_rl_step": "its rollouts are not part of a step",
    "decrease_batch_size_if_needed": "the number of ranks stays as it is",
    "lazy_mpu_init": "process groups are there when the program starts",
}


def check_version(version: str) -> None:
    """Check the release of megatron-core.

    Raises:
        InputError: it is outside of the tested range.
    """
    numbers = _numbers(version)
    if not any(first <= numbers < beyond for first, beyond in TESTED):
        ranges = (f"from {_text(first)} to below {_text(beyond)}" for first, beyond in TESTED)
        text = f"{version}: perdure.integrations.megatron is {' and '.join(ranges)}"
        raise InputError("megatron-core", text)


def num_results(version: str) -> int:
    """Return how many values `train_step` returns to the loop of a release."""
    return 8 if _numbers(version) >= TESTED[-1][0] else 7


def _numbers(version: str) -> tuple[int, ...]:
    match = _NUMBERS.match(version)
    return tuple(int(number or 0) for number in match.groups()) if match is not None else ()


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def check_arguments(job: Job, args: Any) -> None:
    """Check the arguments, before process groups are made by them.

    Raises:
        InputError: with the argument, its value and the reason.
    """
    for name, reason in REFUSED.items():
        if value := getattr(args, name, None):
            raise InputError(_flag(name), f"{_shown(value)}: {reason}")
    for name, wanted, reason in (
        ("rerun_mode", "disabled", "Perdure does a step again itself"),
        ("cuda_graph_impl", "none", "a captured graph keeps the collectives of a broken step"),
    ):
        if (value := getattr(args, name, wanted)) != wanted:
            raise InputError(_flag(name), f"{value}: {reason}: give {_flag(name)} {wanted}")
    if job.restart.data_skipping:
        raise InputError("restart.data_skipping", "true: Megatron cannot pass a batch over")
    every = job.restart.snapshot_every_steps
    if job.restart.numeric_retry and every != 1:
        text = f"{every}: Megatron goes back by one step alone, so that numeric_retry needs 1"
        raise InputError("restart.snapshot_every_steps", text)


def check_training(job: Job, args: Any, optimizers: Any) -> None:
    """Check what is about to be trained.

    Args:
        job: of the session.
        args: of the program.
        optimizers: the chained ones, by the names of their classes.

    Raises:
        InputError: as `check_arguments` does.
    """
    if args.train_iters != job.steps:
        text = f"{job.steps} in the job, but --train-iters is {args.train_iters}: make them equal"
        raise InputError("steps", text)
    kinds = ("DistributedOptimizer", "FP32Optimizer", "Float16OptimizerWithFloat16Params")
    if odd := [name for name in optimizers if name not in kinds]:
        raise InputError("--optimizer", f"{odd[0]}: the state of {', '.join(kinds)} is known")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _shown(value: Any) -> str:
    return "on" if value is True else str(value)


def layout_of(args: Any, world_size: int) -> ParallelLayout:
    """Read the layout of the ranks from the arguments.

    Raises:
        InputError: the sizes do not fit together.
    """
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    cp, ep = args.context_parallel_size, args.expert_model_parallel_size
    size = tp * pp * cp
    instances = args.num_distributed_optimizer_instances if args.use_distributed_optimizer else 0
    if world_size % size:
        raise InputError("tp x pp x cp", f"{tp} x {pp} x {cp} must divide {world_size} ranks")
    dp = world_size // size
    if instances and dp * cp % instances:
        raise InputError(
            "--num-distributed-optimizer-instances",
            f"{instances} must divide data x context parallelism, {dp} x {cp}",
        )
    try:
        return ParallelLayout(
            dp=dp,
            tp=tp,
            pp=pp,
            cp=cp,
            ep=ep,
            etp=args.expert_tensor_parallel_size or None,
            optimizer_shards=dp * cp // instances if instances else 1,
            order=RankOrder.DP_LAST if args.use_tp_pp_dp_mapping else RankOrder.PP_LAST,
        )
    except ValueError as error:
        raise InputError("--expert-model-parallel-size", str(error)) from error
