"""Arguments, by the names that Megatron-LM has, as far as this loop has a use for them."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace

_SIZES = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16,
    "micro_batch_size": 2, "global_batch_size": 8, "train_iters": 0, "seed": 1234,
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1,
    "expert_model_parallel_size": 1, "num_distributed_optimizer_instances": 1,
    "eval_iters": 0, "eval_interval": 1000, "log_interval": 1, "num_workers": 0,
    "timing_log_level": 0, "save_interval": 1000,
}  # fmt: skip
_SWITCHES = (
    "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "bf16", "fp16",
    "use_tp_pp_dp_mapping", "te_rng_tracker", "inference_rng_tracker", "log_num_zeros_in_grad",
    "finetune", "exit_signal_handler",
)  # fmt: skip


def parse_args() -> Namespace:
    parser = ArgumentParser(allow_abbrev=False)
    for name, usual in _SIZES.items():
        parser.add_argument(_flag(name), type=int, default=usual)
    for name in _SWITCHES:
        parser.add_argument(_flag(name), action="store_true")
    parser.add_argument(
        "--disable-gloo-process-groups", action="store_false", dest="enable_gloo_process_groups"
    )
    parser.add_argument("--num-layers-per-virtual-pipeline-stage", type=int)
    parser.add_argument("--num-experts", type=int)
    parser.add_argument("--rampup-batch-size", nargs=3, type=int)
    parser.add_argument("--rerun-mode", default="validate_results")
    parser.add_argument("--cuda-graph-impl", default="none")
    parser.add_argument("--dataloader-type", default="single")
    parser.add_argument("--timing-log-option", default="minmax")
    parser.add_argument("--save")
    parser.add_argument("--exit-duration-in-mins", type=float)
    parser.add_argument("--exit-interval", type=int)
    parser.add_argument("--lr-decay-iters", type=int)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--ddp-bucket-size", type=int)
    return parser.parse_args()


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def validate_args(args: Namespace) -> None:
    args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model_size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    args.data_parallel_size = args.world_size // (model_size * args.context_parallel_size)
    args.virtual_pipeline_model_parallel_size = None
    if per_stage := args.num_layers_per_virtual_pipeline_stage:
        layers = args.num_layers // args.pipeline_model_parallel_size
        args.virtual_pipeline_model_parallel_size = layers // per_stage
    args.expert_tensor_parallel_size = None
    args.decoder_seq_length = None
    args.iteration = args.consumed_train_samples = args.consumed_valid_samples = 0
    args.curr_iteration = 0
    args.check_for_nan_in_loss_and_grad = True
