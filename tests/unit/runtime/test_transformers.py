"""Models of Hugging Face's transformers: what is exported is what `from_pretrained` loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from typer.testing import CliRunner

from perdure.cli import app
from perdure.training.runtime.program import Training
from perdure.training.supervisor.job_registry import remember_job
from tests.unit.runtime.trainees import Loader, Place, cycle, shard, whole
from tests.unit.storage.nodes import Cluster

STEPS = 2
VOCABULARY = 32
SIZES = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
CONFIGS: dict[str, Any] = {
    "gpt2": transformers.GPT2Config(n_positions=16, n_embd=12, n_layer=2, n_head=2, **SIZES),
    "llama": transformers.LlamaConfig(
        hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False, **SIZES,
    ),
}  # fmt: skip


# Imported here, where they are imported once: the ranks are forks of this process.
CLASSES: dict[str, Any] = {
    "gpt2": transformers.GPT2LMHeadModel,
    "llama": transformers.LlamaForCausalLM,
}


def made(name: str) -> Any:
    torch.manual_seed(7)
    return CLASSES[name](CONFIGS[name])


def wrapped(model: nn.Module, kind: str) -> nn.Module:
    match kind:
        case "ddp":
            return DistributedDataParallel(model)
        case "fsdp":
            named = model.named_modules()
            return shard(model, *(m for n, m in named if n.rpartition(".")[2].isdecimal()))
        case "data_parallel":
            return DataParallel(model)
        case _:
            return model


class Pupil:
    """A causal language model, and what a checkpoint holds of it."""

    def __init__(self, name: str, kind: str) -> None:
        self.bare = made(name)
        self.model = wrapped(self.bare, kind)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.data = Loader()
        self.training = Training(self.model, [optimizer], [], None, self.data, 1.0)

    def step(self) -> None:
        generator = torch.Generator().manual_seed(self.data.samples)
        tokens = torch.randint(VOCABULARY, (2, 9), generator=generator)
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.training.optimizers[0].step()
        self.training.zero_grad()
        self.data.samples += 2


def learn(rank: int, place: Place, name: str, kind: str, kept: Path) -> bool:
    """Train a few steps, save the last, and keep the weights aside. Whether they have changed."""
    pupil = Pupil(name, kind)
    cycle(pupil, rank, place, STEPS, (STEPS,))
    # Tied ones once.
    named = pupil.bare.named_parameters()
    weights = {n: whole(p).detach().contiguous() for n, p in named}
    if rank == 0:
        save_file(weights, kept)
    before = dict(made(name).named_parameters())
    dist.barrier()
    return all(not torch.equal(before[n], tensor) for n, tensor in weights.items())


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("gpt2", "ddp", ()),
        pytest.param("gpt2", "fsdp", (), marks=pytest.mark.long),
        pytest.param("gpt2", "data_parallel", (), marks=pytest.mark.long),
        ("llama", "fsdp", ("--shard-size-bytes", "4000")),
    ],
)
def test_from_pretrained_gives_the_weights_that_were_trained(
    tmp_path: Path, perdure_home: Path, name: str, kind: str, options: tuple[str, ...]
) -> None:
    cluster = Cluster.at(tmp_path)
    remember_job(perdure_home, cluster.job)
    place = Place(tmp_path, 1, (None,), (None,))
    num_ranks = 1 if kind == "data_parallel" else 2
    kept, folder = tmp_path / "kept.safetensors", tmp_path / "exported"
    assert all(cluster.run(learn, place, name, kind, kept, num_ranks=num_ranks))
    CONFIGS[name].save_pretrained(folder)
    done = CliRunner().invoke(
        app, ["checkpoints", "export", cluster.job.run_id, "-o", str(folder), *options]
    )
    assert done.exit_code == 0, done.output
    model, results = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, local_files_only=True
    )
    assert {key: list(found) for key, found in results.items() if found} == {}
    trained, loaded = load_file(kept), dict(model.named_parameters())
    assert set(loaded) == set(trained)
    assert all(same_bits(loaded[n], tensor) for n, tensor in trained.items())
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert is_tied == CONFIGS[name].tie_word_embeddings
