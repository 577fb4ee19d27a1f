"""Arguments, then process groups, then random states."""

from __future__ import annotations

import random

import numpy as np
import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

from .arguments import parse_args, validate_args
from .global_vars import get_args, set_global_variables


def initialize_megatron() -> None:
    args = parse_args()
    validate_args(args)
    set_global_variables(args)
    init_num_microbatches_calculator(
        args.rank,
        args.rampup_batch_size,
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
        False,
    )
    _initialize_distributed(None, None, None)
    seed = args.seed + 100 * mpu.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 as Megatron does
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _initialize_distributed(get_embedding_ranks, get_position_embedding_ranks, store) -> None:
    args = get_args()
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=store)
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        get_embedding_ranks=get_embedding_ranks,
        get_position_embedding_ranks=get_position_embedding_ranks,
        create_gloo_process_groups=args.enable_gloo_process_groups,
    )
