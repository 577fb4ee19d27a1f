"""A configuration of torchtitan 0.3.0: two layers of its llama3 debug model, on a file of text.

    torchrun ... -m torchtitan.train --module torchtitan_tiny --config tiny

It needs no tokenizer and no data set, fits a CPU, and has what torch 2.13 lacks.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

BEGIN, END = 256, 257
PAUSE_S = float(os.environ.get("PAUSE_S", "0"))  # in every line of the file, to watch it


if not hasattr(distributed, "set_timeout"):  # torch 2.13 has it under another name
    distributed.set_timeout = distributed.distributed_c10d._set_pg_timeout  # noqa: SLF001


def lines_of(path: str) -> Dataset:
    """A sample for every line."""
    return Dataset.from_list([{"text": line} for line in Path(path).read_text().splitlines()])


def text_of(sample: dict[str, str]) -> str:
    """The text of a sample."""
    time.sleep(PAUSE_S)
    return sample["text"]


DATASETS["lines"] = DatasetConfig(path="", loader=lines_of, sample_processor=text_of)


class Bytes(BaseTokenizer):
    """Every byte is a token."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Of Bytes."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:  # noqa: ARG002 theirs
        super().__init__()
        self.eos_id = END

    def encode(self, text: str, *, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Tokens of a text."""
        return [*[BEGIN] * add_bos, *text.encode(), *[END] * add_eos]

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens."""
        return bytes(token for token in tokens if token < BEGIN).decode(errors="replace")

    def get_vocab_size(self) -> int:
        """Bytes, begin and end."""
        return END + 1


def parallelize(model: nn.Module, **options: object) -> nn.Module:
    """As torchtitan does it, with the sums that gloo has."""
    model = parallelize_llama(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(enable=True)
    return model


def tiny() -> Trainer.Config:
    """The debug model of two layers, and what a CPU cannot do changed."""
    config = llama3_debugmodel()
    config.model_spec.parallelize_fn = parallelize
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for layer in config.model_spec.model.layers:  # flex_attention is for accelerators
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.tokenizer = Bytes.Config()
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="lines")
    config.training.local_batch_size = 2
    config.training.seq_len = 64
    config.training.steps = 200
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"  # the default is for a newer torch
    config.debug.seed = 1234
    config.debug.deterministic = True
    return config
