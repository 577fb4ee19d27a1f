"""The device memory of the built-in trainer as a sum, against what torch really keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from perdure.training.config.job_file import load_job
from perdure.training.config.model import ModelSpec
from perdure.training.preflight.device_memory import check_device_memory, sum_memory
from perdure.training.trainer.model import Decoder
from perdure.training.wire.node import CheckOutcome
from tests.jobs import small_job
from tests.unit.telemetry.driver_tools import SAMPLES, install, only_tools_of
from tests.values import not_none

SHIPPED = Path(__file__).parents[3] / "deploy/kubernetes/overlays/ascend/job.yaml"
VOCABULARY = 257
FOUR_SAMPLES = {"global_batch_size": 64, "micro_batch_size": 4}
LARGE = {"num_layers": 32, "hidden_size": 4096, "num_heads": 32, "seq_len": 4096}


def kept_bytes(spec: ModelSpec, dtype: torch.dtype, samples: int) -> int:
    """The bytes that the decoder keeps for its backward pass, beside its parameters."""
    model = Decoder(spec, VOCABULARY).to(dtype)
    own = {
        tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())
    }
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.zeros((samples, spec.seq_len), dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, ids)
    storages = (tensor.untyped_storage() for tensor in kept.values())
    return sum(part.nbytes() for part in storages if part.data_ptr() not in own)


@pytest.mark.parametrize(
    "model",
    [
        {"num_layers": 4, "hidden_size": 128, "num_heads": 4, "seq_len": 256},
        {"num_layers": 6, "hidden_size": 256, "num_heads": 4, "seq_len": 128},
        {"num_layers": 3, "hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "seq_len": 256},
        {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "ffn_size": 512, "seq_len": 256},
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_are_what_torch_keeps(model, precision):
    job = small_job(model=model, precision=precision)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    kept = kept_bytes(job.model, dtype, job.batch.micro_batch_size)
    assert not_none(sum_memory(job)).activations == pytest.approx(kept, rel=0.15)


def test_the_shipped_job_fits_its_devices_with_the_sum_shown():
    check = not_none(check_device_memory(load_job(SHIPPED)))
    assert check.outcome is CheckOutcome.OK
    assert check.seen.startswith("hsdp over 128 ranks: weights 3.0 + gradients 3.0 + optimizer 6.0")
    assert check.seen.endswith("GiB per rank")


def test_the_chips_of_a_cluster_are_assumed_and_said_to_be():
    job = load_job(SHIPPED, ["preflight={}", "parallelism={kind: ddp}"])
    check = not_none(check_device_memory(job))
    assert check.outcome is CheckOutcome.FAILED
    assert "weights 24.0 + gradients 24.0 + optimizer 48.1" in check.seen
    assert "assumed for huawei.com/Ascend910" in check.allowed
    other = load_job(SHIPPED, ["preflight={}", "engine.resources={cpu: '4'}"])
    assert not_none(check_device_memory(other)).outcome is CheckOutcome.SKIPPED


def outcome_of(device_memory_gib: float = 64, **sections: Any) -> tuple[CheckOutcome, str]:
    job = small_job(
        preflight={"device_memory_gib": device_memory_gib},
        engine={"nodes": 2, "slots_per_node": 8},
        **{
            "model": LARGE,
            "precision": "bf16",
            "batch": {"global_batch_size": 64, "micro_batch_size": 1},
            **sections,
        },
    )
    check = not_none(check_device_memory(job))
    return check.outcome, check.seen


def test_a_state_that_is_larger_than_the_device_fails_with_what_to_do():
    outcome, text = outcome_of()
    assert outcome is CheckOutcome.FAILED
    assert "weights 24.0 + gradients 24.0 + optimizer 48.1" in text
    assert "parallelism.kind hsdp" in text


@pytest.mark.parametrize(
    ("sections", "outcome"),
    [
        ({"parallelism": {"kind": "fsdp2"}}, CheckOutcome.OK),
        ({"parallelism": {"kind": "hsdp", "replicas": 2}}, CheckOutcome.OK),
        ({"parallelism": {"kind": "hsdp", "replicas": 16}}, CheckOutcome.FAILED),
        ({"parallelism": {"kind": "fsdp2"}, "batch": FOUR_SAMPLES}, CheckOutcome.WARNING),
        ({"model": {"num_layers": 4}}, CheckOutcome.OK),
    ],
    ids=["fsdp2", "shards of a node", "one shard", "too many samples", "a small model"],
)  # fmt: skip
def test_layout_and_batch_decide_whether_it_fits(sections, outcome):
    assert outcome_of(**sections)[0] is outcome


def test_memory_that_is_not_known_is_said_with_the_sum(tmp_path, monkeypatch):
    only_tools_of(tmp_path / "tools", monkeypatch)
    check = not_none(check_device_memory(small_job()))
    assert check.outcome is CheckOutcome.SKIPPED
    assert "set preflight.device_memory_gib" in check.seen


def test_the_chips_of_this_machine_are_taken_by_their_table(tmp_path, monkeypatch):
    tools = only_tools_of(tmp_path / "tools", monkeypatch)
    install(tools, "npu-smi", f"cat {(SAMPLES / 'npu-smi-info.txt').resolve()}")
    check = not_none(check_device_memory(small_job()))
    assert (check.outcome, check.allowed.partition(" GiB")[2] != "") == (CheckOutcome.OK, True)


def test_nothing_is_known_about_a_program_of_another():
    assert check_device_memory(small_job(worker={"command": ["true"]})) is None
    assert check_device_memory(small_job(worker={"recipe": "mine:main"})) is None
