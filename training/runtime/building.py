"""Making a model whose parameters another rank is about to send: nothing is drawn for them.

On one core, drawing ten million normal numbers takes longer than sending them. Written against
torch 2.13, whose `torch.nn.init` functions fill tensors in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# erfinv_ is most of what torch.nn.init.trunc_normal_ does.
_FILLS = frozenset(
    {
        Tensor.normal_, Tensor.uniform_, Tensor.log_normal_, Tensor.exponential_, Tensor.cauchy_,
        Tensor.bernoulli_, Tensor.random_, Tensor.erfinv_,
        nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_,
    }
)  # fmt: skip


class Undrawn(TorchFunctionMode):
    """While it is entered, parameters keep whatever their memory held; buffers are drawn."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do what was called, unless it fills a parameter with random numbers."""
        named = kwargs or {}
        if func in _FILLS:
            filled = args[0] if args else named["tensor"]
            if isinstance(filled, nn.Parameter):
                return filled
        return func(*args, **named)


@contextmanager
def seeded_after() -> Iterator[None]:
    """What is drawn afterwards does not depend on how much was drawn within.

    Torch's generators, of the host and of devices, are seeded at the end with a number that
    follows from the host's at the beginning.
    """
    before = torch.Generator()
    before.set_state(torch.get_rng_state())
    seed = int(torch.randint(2**63 - 1, (), generator=before))
    yield
    torch.manual_seed(seed)
