"""The reference decoder against what its sizes and its paper promise."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 the customary name

from perdure.training.config.model import ModelSpec
from perdure.training.trainer.model import Decoder, flops_per_token, rotary_tables, rotate

VOCAB = 61
SPECS = {
    "plain": ModelSpec(num_layers=2, hidden_size=32, num_heads=4, seq_len=16),
    "grouped": ModelSpec(num_layers=1, hidden_size=32, num_heads=4, num_kv_heads=2, seq_len=16),
    "multi-query": ModelSpec(
        num_layers=3, hidden_size=24, num_heads=4, num_kv_heads=1, ffn_size=40, seq_len=8
    ),
}


@pytest.fixture(params=SPECS)
def spec(request) -> ModelSpec:
    return SPECS[request.param]


@pytest.fixture
def model(spec) -> Decoder:
    torch.manual_seed(3)
    return Decoder(spec, VOCAB)


def tokens(spec: ModelSpec, *, batch: int = 2) -> torch.Tensor:
    return torch.randint(
        0, VOCAB, (batch, spec.seq_len), generator=torch.Generator().manual_seed(5)
    )


def test_the_parameters_are_as_many_as_the_spec_counts(model, spec):
    assert sum(p.numel() for p in model.parameters()) == spec.num_parameters(VOCAB)


def test_logits_score_every_token_of_the_vocabulary(model, spec):
    assert model.logits(tokens(spec)).shape == (2, spec.seq_len, VOCAB)


@pytest.mark.parametrize("position", [1, 5, 7])
def test_a_later_token_does_not_change_earlier_logits(model, spec, position):
    inputs = tokens(spec)
    changed = inputs.clone()
    changed[:, position] = (changed[:, position] + 1) % VOCAB
    before, after = model.logits(inputs), model.logits(changed)
    torch.testing.assert_close(after[:, :position], before[:, :position])
    assert not torch.allclose(after[:, position:], before[:, position:])


def test_samples_of_a_batch_do_not_see_each_other(model, spec):
    inputs = tokens(spec)
    alone = model.logits(inputs[:1])
    torch.testing.assert_close(model.logits(inputs)[:1], alone)


def test_a_shorter_sample_gives_the_logits_of_its_beginning(model, spec):
    inputs = tokens(spec)
    torch.testing.assert_close(model.logits(inputs[:, :5]), model.logits(inputs)[:, :5])


def test_the_order_of_earlier_tokens_matters(model, spec):
    inputs = torch.arange(spec.seq_len)[None]
    swapped = inputs.clone()
    swapped[0, 0], swapped[0, 1] = inputs[0, 1], inputs[0, 0]
    assert not torch.allclose(model.logits(inputs)[0, -1], model.logits(swapped)[0, -1], atol=1e-6)


def test_the_embedding_is_the_output_matrix(model, spec):
    names = [name for name, p in model.named_parameters() if VOCAB in p.shape]
    assert names == ["embedding.weight"]
    inputs = tokens(spec)
    before = model.logits(inputs)
    with torch.no_grad():
        model.embedding.weight[VOCAB - 1] += 1.0
    unused = inputs != VOCAB - 1
    assert not torch.allclose(
        model.logits(inputs)[unused][:, VOCAB - 1], before[unused][:, VOCAB - 1]
    )


def test_the_loss_is_the_mean_cross_entropy_of_the_logits(model, spec):
    inputs, targets = tokens(spec), tokens(spec).roll(1, dims=1)
    loss = model(inputs, targets)
    log_p = F.log_softmax(model.logits(inputs).double(), dim=-1)
    expected = -log_p.gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(loss.double(), expected)
    assert (loss.shape, loss.dtype) == ((), torch.float32)


def test_an_untrained_model_knows_nothing(model, spec):
    loss = model(tokens(spec), tokens(spec).roll(1, dims=1))
    assert loss.item() == pytest.approx(math.log(VOCAB), abs=0.2)


def test_grouped_queries_are_multi_head_attention_with_shared_keys_and_values():
    grouped_spec = SPECS["grouped"]
    full_spec = grouped_spec.model_copy(update={"num_kv_heads": None})
    torch.manual_seed(0)
    grouped, full = Decoder(grouped_spec, VOCAB), Decoder(full_spec, VOCAB)
    repeats = grouped_spec.num_heads // grouped_spec.kv_heads
    state = grouped.state_dict()
    for name, weight in state.items():
        if name.endswith(("key.weight", "value.weight")):
            heads = weight.view(grouped_spec.kv_heads, -1, grouped_spec.hidden_size)
            state[name] = heads.repeat_interleave(repeats, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    inputs = tokens(grouped_spec)
    torch.testing.assert_close(full.logits(inputs), grouped.logits(inputs))


def test_rotation_preserves_norms_and_leaves_the_first_position(spec):
    cos, sin = rotary_tables(spec)
    x = torch.randn(2, 3, *cos.shape)
    rotated = rotate(x, cos, sin)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(rotated[..., 0, :], x[..., 0, :])


def test_rotated_products_depend_on_the_distance_alone(spec):
    cos, sin = rotary_tables(spec)
    query, key = torch.randn(2, cos.shape[1]).expand(spec.seq_len, 2, -1).unbind(1)
    scores = rotate(query, cos, sin) @ rotate(key, cos, sin).T
    for distance in range(spec.seq_len):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), atol=1e-4, rtol=1e-4)


def test_rotary_tables_are_no_part_of_the_state(model):
    assert not {"cos_SN", "sin_SN"} & model.state_dict().keys()


def test_the_same_seed_gives_the_same_weights(model, spec):
    torch.manual_seed(3)
    again = Decoder(spec, VOCAB).state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in model.state_dict().items())


def test_residual_outputs_start_smaller_the_deeper_the_model():
    torch.manual_seed(0)
    deep = Decoder(ModelSpec(num_layers=8, hidden_size=64, num_heads=4, seq_len=8), VOCAB)
    block = deep.blocks[0]
    assert isinstance(block, torch.nn.Module)
    stds = {name: p.std().item() for name, p in block.named_parameters() if p.ndim == 2}
    assert stds["ffn.down.weight"] == pytest.approx(0.02 / 4, rel=0.1)
    assert stds["attention.output.weight"] == pytest.approx(0.02 / 4, rel=0.1)
    assert stds["attention.query.weight"] == pytest.approx(0.02, rel=0.1)


def test_the_loss_falls_when_one_batch_is_learned_by_heart(model, spec):
    inputs = tokens(spec, batch=2)
    targets = inputs.roll(-1, dims=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(29):
        loss = model(inputs, targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


def test_flops_count_six_per_parameter_and_the_attention_scores(spec):
    attention = 12 * spec.num_layers * spec.hidden_size * spec.seq_len
    assert flops_per_token(spec, VOCAB) == 6 * spec.num_parameters(VOCAB) + attention
