"""Making a model whose parameters another rank is about to send: nothing is drawn for them.

On one core, drawing ten million normal numbers takes longer than sending them. Written against
torch 2.13, whose `torch.nn.init` functions fill tensors in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# The last one is most of what torch.nn.init.trunc_normal_ does.
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
