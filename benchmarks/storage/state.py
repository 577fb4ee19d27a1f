"""A training's state to save: bf16 weights of a decoder, and AdamW's moments in fp32.

Every word of four bytes differs from its neighbours', so that bytes that came to the wrong place
are noticed. Sizes are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

NUM_LAYERS = 12
VOCABULARY = 32_000
WIDTH_STEP = 16
BYTES_PER_PARAMETER = 2 + 4 + 4


def make_state(size_bytes: int) -> dict[str, Tensor]:
    """About this many bytes in a few hundred tensors."""
    state: dict[str, Tensor] = {}
    for name, shape in _shapes(_width(size_bytes)):
        state[f"model/{name}"] = torch.empty(shape, dtype=torch.bfloat16)
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"optim/{name}/{moment}"] = torch.empty(shape)
        state[f"optim/{name}/step"] = torch.empty(())
    fill(state)
    return state


def fill(state: Mapping[str, Tensor]) -> None:
    """Give every tensor its own bytes."""
    for number, tensor in enumerate(state.values()):
        words = _words(tensor)
        torch.arange(number, number + words.numel(), dtype=torch.int32, out=words)


def clear(state: Mapping[str, Tensor]) -> None:
    """Zero every tensor, so that only a restore can bring the bytes back."""
    for tensor in state.values():
        tensor.zero_()


def check(state: Mapping[str, Tensor]) -> None:
    """Raise unless every tensor has the bytes that `fill` gave it.

    Raises:
        RuntimeError: naming the first that has not.
    """
    for number, (name, tensor) in enumerate(state.items()):
        words = _words(tensor)
        wanted = torch.arange(number, number + words.numel(), dtype=torch.int32)
        if not torch.equal(words, wanted):
            raise RuntimeError(f"{name} came back with other bytes")


def size_of(state: Mapping[str, Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


def _words(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.int32)


def _shapes(width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "embed.weight", (VOCABULARY, width)
    inner = width * 8 // 3 // WIDTH_STEP * WIDTH_STEP
    for layer in range(NUM_LAYERS):
        for name in ("wq", "wk", "wv", "wo"):
            yield f"layers.{layer}.attention.{name}.weight", (width, width)
        yield f"layers.{layer}.feed_forward.w1.weight", (inner, width)
        yield f"layers.{layer}.feed_forward.w2.weight", (width, inner)
        yield f"layers.{layer}.feed_forward.w3.weight", (inner, width)
        yield f"layers.{layer}.attention_norm.weight", (width,)
        yield f"layers.{layer}.ffn_norm.weight", (width,)
    yield "norm.weight", (width,)


def _width(size_bytes: int) -> int:
    """Solves 12 layers of 12 w^2 parameters and the embedding for the wanted size."""
    parameters = size_bytes / BYTES_PER_PARAMETER
    squares = 12 * NUM_LAYERS
    root = math.sqrt(VOCABULARY**2 + 4 * squares * parameters)
    return max(1, round((root - VOCABULARY) / (2 * squares) / WIDTH_STEP)) * WIDTH_STEP
