"""The reference decoder: RoPE, RMSNorm, SwiGLU, tied embeddings; written to be read.

Shape suffixes: B batch, S sequence, D hidden size, H query heads, K key/value heads,
N size of one head, F width inside SwiGLU, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 the customary name
from torch import Tensor, nn

from perdure.training.config.model import ModelSpec


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions (Su et al., arXiv 2104.09864)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = spec.num_heads, spec.kv_heads
        self.head_size = spec.hidden_size // spec.num_heads
        kv_size = self.num_kv_heads * self.head_size
        self.query = nn.Linear(spec.hidden_size, spec.hidden_size, bias=False)
        self.key = nn.Linear(spec.hidden_size, kv_size, bias=False)
        self.value = nn.Linear(spec.hidden_size, kv_size, bias=False)
        self.output = nn.Linear(spec.hidden_size, spec.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor, cos_SN: Tensor, sin_SN: Tensor) -> Tensor:
        """Attend. Returns [B, S, D]."""
        q_BHSN = rotate(self._heads(self.query(x_BSD), self.num_heads), cos_SN, sin_SN)
        k_BKSN = rotate(self._heads(self.key(x_BSD), self.num_kv_heads), cos_SN, sin_SN)
        v_BKSN = self._heads(self.value(x_BSD), self.num_kv_heads)
        y_BHSN = F.scaled_dot_product_attention(
            q_BHSN, k_BKSN, v_BKSN, is_causal=True, enable_gqa=self.num_heads != self.num_kv_heads
        )
        return self.output(y_BHSN.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor, count: int) -> Tensor:
        return x.view(*x.shape[:-1], count, self.head_size).transpose(1, 2)


class SwiGLU(nn.Module):
    """Gated feed-forward block (Shazeer, arXiv 2002.05202)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.hidden_size, spec.ffn, bias=False)
        self.up = nn.Linear(spec.hidden_size, spec.ffn, bias=False)
        self.down = nn.Linear(spec.ffn, spec.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        return self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(spec.hidden_size, eps=spec.norm_eps)
        self.attention = Attention(spec)
        self.ffn_norm = nn.RMSNorm(spec.hidden_size, eps=spec.norm_eps)
        self.ffn = SwiGLU(spec)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, x_BSD: Tensor, cos_SN: Tensor, sin_SN: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        attended_BSD = self.attention(self.attention_norm(x_BSD), cos_SN, sin_SN)
        x_BSD = x_BSD + self.dropout(attended_BSD)
        out_BSD: Tensor = x_BSD + self.dropout(self.ffn(self.ffn_norm(x_BSD)))
        return out_BSD


class Decoder(nn.Module):
    """Decoder-only language model; the embedding is also the output matrix."""

    cos_SN: Tensor  # noqa: N815 shape suffix
    sin_SN: Tensor  # noqa: N815 shape suffix

    def __init__(self, spec: ModelSpec, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, spec.hidden_size)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.num_layers))
        self.norm = nn.RMSNorm(spec.hidden_size, eps=spec.norm_eps)
        cos_SN, sin_SN = rotary_tables(spec)
        # Computed from the sizes, so not part of a checkpoint.
        self.register_buffer("cos_SN", cos_SN, persistent=False)
        self.register_buffer("sin_SN", sin_SN, persistent=False)
        self._init_weights(spec)

    def forward(self, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Compute the mean next-token loss, a scalar in fp32."""
        return F.cross_entropy(self.logits(inputs_BS).float().flatten(0, 1), targets_BS.flatten())

    def logits(self, inputs_BS: Tensor) -> Tensor:
        """Compute next-token scores, [B, S, V]."""
        seq_len = inputs_BS.shape[1]
        cos_SN, sin_SN = self.cos_SN[:seq_len], self.sin_SN[:seq_len]
        x_BSD = self.embedding(inputs_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD, cos_SN, sin_SN)
        return F.linear(self.norm(x_BSD), self.embedding.weight)

    def _init_weights(self, spec: ModelSpec) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            std = 0.02
            if name.endswith(("output.weight", "down.weight")):
                # Two residual branches per block; keeps the stream's variance flat (GPT-2).
                std /= math.sqrt(2 * spec.num_layers)
            nn.init.normal_(parameter, std=std)


def rotary_tables(spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines of every position and pair, each [S, N]."""
    head_size = spec.hidden_size // spec.num_heads
    exponents = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    angles = torch.outer(
        torch.arange(spec.seq_len, dtype=torch.float64), spec.rope_theta**-exponents
    )
    doubled = torch.cat((angles, angles), dim=-1)
    return doubled.cos().float(), doubled.sin().float()


def rotate(x: Tensor, cos_SN: Tensor, sin_SN: Tensor) -> Tensor:
    """Turn pairs (i, i + N/2) of the last dimension by their position's angle."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos_SN.to(x.dtype) + turned * sin_SN.to(x.dtype)


def flops_per_token(spec: ModelSpec, vocab_size: int) -> float:
    """Count the FLOPs of forward and backward per token: 6 N + 12 L D S.

    Six per parameter, and the attention scores on top (Chowdhery et al., arXiv 2204.02311,
    appendix B). Tied embeddings count once, as the output matrix.
    """
    attention = 12 * spec.num_layers * spec.hidden_size * spec.seq_len
    return 6.0 * spec.num_parameters(vocab_size) + attention
