"""A program of Megatron with a GPT of two layers, which the job's `integration` takes over.

With BY_LINE=1 the one line of a script does it instead.
With SHOT=RANK:STEP:MICRO_BATCH a rank kills itself in a forward pass, once in a run.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "megatron_form"))

import megatron_cpu  # type: ignore[import-not-found]  # noqa: F401 the stand-ins come before megatron
import torch
from megatron.core import mpu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import get_args, pretrain

VOCAB = 64
NUM_ROWS = 4096


class Rows(torch.utils.data.Dataset):
    """Sequences that count up in threes."""

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        length = get_args().seq_length
        start = torch.randint(VOCAB, (1,), generator=torch.Generator().manual_seed(number))
        row = (start + 3 * torch.arange(length + 1)) % VOCAB
        return {"tokens": row[:-1].contiguous(), "labels": row[1:].contiguous()}


def datasets() -> tuple[Rows, Rows]:
    return Rows(), Rows()


def model_provider(vp_stage: int = 0) -> GPTModel:
    args = get_args()
    stages = args.virtual_pipeline_model_parallel_size
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    config = TransformerConfig(
        num_layers=args.num_layers, hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=stages, num_moe_experts=args.num_experts,
        expert_model_parallel_size=args.expert_model_parallel_size,
        moe_token_dispatcher_type="alltoall",
        use_cpu_initialization=True, pipeline_dtype=dtype, params_dtype=dtype,
        bf16=args.bf16, fp16=args.fp16, hidden_dropout=args.dropout,
        attention_dropout=args.dropout, gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False,
        bias_activation_fusion=False, apply_rope_fusion=False,
    )  # fmt: skip
    virtual = {"vp_stage": vp_stage} if stages else {}
    return GPTModel(
        config, get_gpt_layer_local_spec(num_experts=args.num_experts),
        vocab_size=VOCAB, max_sequence_length=args.seq_length,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=not stages, **virtual),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=not stages, **virtual),
        share_embeddings_and_output_weights=True, **virtual,
    )  # fmt: skip


_counts = {"step": -1, "micro_batch": 0}


def shoot() -> None:
    """Die here, once, when it is this rank's turn."""
    args = get_args()
    _counts["micro_batch"] = (
        _counts["micro_batch"] + 1 if _counts["step"] == args.curr_iteration else 1
    )
    _counts["step"] = args.curr_iteration
    for number, shot in enumerate(os.environ.get("SHOT", "").split()):
        rank, step, micro_batch = map(int, shot.split(":"))
        mark = Path(os.environ["SHOTS"]) / str(number)
        here = (args.rank, args.curr_iteration + 1, _counts["micro_batch"])
        if here == (rank, step, micro_batch) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    losses = losses.float()
    total = torch.stack([losses.sum(), torch.tensor(float(losses.numel()))]).detach()
    return losses.mean(), {"lm loss": total}


def forward_step(data_iterator, model):
    """The first rank of a tensor-parallel group reads, and sends to the others."""
    args = get_args()
    shoot()
    if args.curr_iteration:
        time.sleep(float(os.environ.get("PACE_S", "0")))
    shape = (args.micro_batch_size, args.seq_length)
    both = torch.empty(2, *shape, dtype=torch.long)
    if data_iterator is not None:
        batch = next(data_iterator)
        both = torch.stack([batch["tokens"], batch["labels"]])
    if args.tensor_model_parallel_size > 1:
        group = mpu.get_tensor_model_parallel_group()
        source = mpu.get_tensor_model_parallel_src_rank()
        torch.distributed.broadcast(both, source, group=group)
    tokens, labels = both
    positions = torch.arange(args.seq_length).expand(shape)
    mask = torch.triu(torch.ones(1, 1, args.seq_length, args.seq_length, dtype=torch.bool), 1)
    return model(tokens, positions, mask, labels=labels), partial(loss_of)


if __name__ == "__main__":
    if os.environ.get("BY_LINE"):
        from perdure.integrations.megatron import take_over

        take_over()
    pretrain(datasets, model_provider, forward_step)
