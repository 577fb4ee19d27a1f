"""Training on an emulated NPU has the losses and the parameters of the CPU, bit by bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.values import not_none

STEPS = 8
functional = nn.functional


class Block(nn.Module):
    """Embedding, attention, a gated layer: what a language model consists of."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.norm = nn.LayerNorm(32)
        self.scale = nn.RMSNorm(32)
        self.attention = nn.Linear(32, 96, bias=False)
        self.gate = nn.Linear(32, 128)
        self.down = nn.Linear(64, 32)
        self.head = nn.Linear(32, 50, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        q, k, v = (
            part.unflatten(-1, (4, 8)).transpose(1, 2)
            for part in self.attention(self.norm(x)).chunk(3, dim=-1)
        )
        # By its definition: the CPU has a fused kernel, with another order of sums.
        with sdpa_kernel(SDPBackend.MATH):
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2)
        up, gate = self.gate(self.scale(x)).chunk(2, dim=-1)
        return self.head(x + self.down(functional.silu(gate) * functional.gelu(up)))


def train(model, device, *, optimizer, dtype=None):
    torch.manual_seed(1)
    tokens = [torch.randint(0, 50, (4, 17)) for _ in range(STEPS)]
    losses = []
    for step in tokens:
        here = step.to(device)
        with torch.autocast(device.split(":")[0], dtype=dtype, enabled=dtype is not None):
            out = model(here[:, :-1])
            loss = functional.cross_entropy(out.float().flatten(0, 1), here[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adamw(model, **how):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **how)


@pytest.fixture
def models():
    torch.manual_seed(0)
    model = Block()
    return model, copy.deepcopy(model).to("npu:0")


@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_in_fp32_losses_and_parameters_are_those_of_the_cpu(models, how):
    host, device = models
    expected = train(host, "cpu", optimizer=adamw(host, **how))
    assert train(device, "npu:0", optimizer=adamw(device, **how)) == expected
    assert expected[-1] < expected[0]
    for one, other in zip(host.parameters(), device.parameters(), strict=True):
        assert torch.equal(one, other.cpu())


def test_in_bf16_it_trains(models):
    _, device = models
    losses = train(device, "npu:0", optimizer=adamw(device), dtype=torch.bfloat16)
    assert losses[-1] < losses[0]


def test_autocast_computes_a_linear_layer_in_bf16():
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    expected = functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
    with torch.autocast("npu", dtype=torch.bfloat16):
        out = layer.to("npu:0")(x.to("npu:0"))
    assert out.dtype is torch.bfloat16
    assert torch.equal(out.cpu(), expected)


def test_a_step_whose_gradients_are_infinite_is_left_out_and_the_scale_halved():
    weight = nn.Parameter(torch.ones(4, device="npu:0"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("npu", init_scale=4.0, growth_interval=100)
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 2.0
    assert weight.tolist() == [-1.0] * 4


def test_one_process_with_two_devices_has_the_gradients_of_the_halves_of_its_batch():
    torch.manual_seed(0)
    on_cpu = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    on_npus = nn.DataParallel(copy.deepcopy(on_cpu).to("npu:0"), device_ids=[0, 1])
    for _ in range(2):  # the second time the communicator is there
        batch = torch.randn(6, 8)
        outputs = on_npus(batch.to("npu:0"))
        expected = torch.cat([on_cpu(half) for half in batch.chunk(2)])
        assert torch.equal(outputs.cpu(), expected)
        for output in (outputs, expected):
            output.square().mean().backward()
        for on_npu, alone in zip(on_npus.parameters(), on_cpu.parameters(), strict=True):
            assert torch.equal(not_none(on_npu.grad).cpu(), not_none(alone.grad))
