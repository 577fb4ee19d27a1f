"""Stand-ins for torch.cuda that let megatron-core 0.16.1 train on the CPU. Import it first.

Devices named cuda are the host, whose generator of random numbers is the device's as well.
"""

from __future__ import annotations

import logging
from functools import wraps
from typing import Any

import torch

FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "as_tensor")


class NoStream:
    """Work on the host is in order anyway."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


def _on_host(factory: Any) -> Any:
    @wraps(factory)
    def make(*args: Any, **named: Any) -> Any:
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = "cpu"
        return factory(*args, **named)

    return make


def _same(value: Any, *_: Any, **__: Any) -> Any:
    return value


def _as_of_cuda(tensor_type: Any) -> Any:
    """Asserts compare names of types: torch.cuda.FloatTensor."""

    def type_of(tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
        name = tensor_type(tensor, *args, **named)
        return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) else name

    return type_of


def _stand_in() -> None:
    fake: Any = torch  # its types know nothing of this
    for name in FACTORIES:
        setattr(torch, name, _on_host(getattr(torch, name)))
    fake.cuda.current_device = lambda: torch.device("cpu")
    fake.cuda.synchronize = lambda *_: None
    fake.cuda.current_stream = fake.cuda.default_stream = NoStream
    fake.cuda.Stream = NoStream
    fake.cuda.manual_seed = torch.default_generator.manual_seed
    fake.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    fake.Tensor.cuda = fake.nn.Module.cuda = _same
    fake.Tensor.type = _as_of_cuda(torch.Tensor.type)
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    logging.getLogger(random.__name__).setLevel(logging.ERROR)  # the host's generator moves


_stand_in()
