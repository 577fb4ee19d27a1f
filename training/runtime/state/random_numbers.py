"""Random numbers: seeded by step, saved and restored, and not drawn where values are received.

What a step draws depends on seed, rank and step alone: a step that is executed again, in the same
process or in its replacement, draws the same numbers, and no random state has to survive a
process. Written against torch 2.13, whose `torch.nn.init` functions fill tensors in place.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from pydantic_core import from_json
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from perdure.training.device import device_rng_state, set_device_rng_state

PYTHON_STATE_BYTES = 32 * 2**10  # two Mersenne twisters of 624 words, as JSON


def seed_of(seed: int, *, rank: int, step: int) -> int:
    """Derive a 63-bit seed for the generators of a rank in a step, unlike any other."""
    text = f"{seed}/{rank}/{step}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_step(seed: int, *, rank: int, step: int) -> None:
    """Seed Python's, numpy's and torch's generators, those of devices included."""
    rank_seed = seed_of(seed, rank=rank, step=step)
    if _has_device():
        torch.manual_seed(rank_seed)
    else:
        # The other keeps a stack trace for every kind of device that is not in use (torch 2.13).
        torch.default_generator.manual_seed(rank_seed)
    np.random.seed(rank_seed % 2**32)  # noqa: NPY002 the generator that libraries use
    random.seed(rank_seed)


def seed_epoch(seed: int, *, epoch: int) -> int:
    """Seed for what is drawn at the start of an epoch, such as its order. Returns the seed.

    It is the same on all ranks, and in a process that begins in the middle of the epoch.
    """
    no_step = -1 - epoch
    seed_step(seed, rank=0, step=no_step)
    return seed_of(seed, rank=0, step=no_step)


@cache
def _has_device() -> bool:
    return torch.accelerator.is_available()


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Read the states of this process's generators by name, uint8 [bytes] each on the host."""
    states = {"torch": torch.get_rng_state(), "python": _python_state()}
    device_state = device_rng_state(device)
    if device_state is not None:
        states["device"] = device_state.cpu()
    return states


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set those of `random_states` that are given."""
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "device" in states:
        set_device_rng_state(device, states["device"])
    if "python" in states:
        _set_python_state(states["python"])


def _python_state() -> Tensor:
    """Read Python's and numpy's generators; always of one size, or every save would be planned."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    document = {
        "random": [version, list(internal), gauss],
        "numpy": [name, keys.tolist(), position, has_gauss, cached],  # type: ignore[union-attr]
    }
    data = json.dumps(document).encode().ljust(PYTHON_STATE_BYTES)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _set_python_state(state: Tensor) -> None:
    document = from_json(bytes(state.tolist()))
    version, internal, gauss = document["random"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = document["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, cached))  # noqa: NPY002


# erfinv_ is most of what torch.nn.init.trunc_normal_ does.
_FILLS = frozenset(
    {
        Tensor.normal_, Tensor.uniform_, Tensor.log_normal_, Tensor.exponential_, Tensor.cauchy_,
        Tensor.bernoulli_, Tensor.random_, Tensor.erfinv_,
        nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_,
    }
)  # fmt: skip


class UninitializedParameters(TorchFunctionMode):
    """While it is entered, parameters keep what their memory held; buffers are initialised."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`, unless it fills a parameter with random numbers."""
        named = kwargs or {}
        if func in _FILLS:
            filled = args[0] if args else named["tensor"]
            if isinstance(filled, nn.Parameter):
                return filled
        return func(*args, **named)


@contextmanager
def seeded_after() -> Iterator[None]:
    """Make the random numbers drawn afterwards independent of how many are drawn within.

    Torch's generators, of the host and of devices, are seeded at the end with a number that
    follows from the host's at the beginning.
    """
    previous = torch.Generator()
    previous.set_state(torch.get_rng_state())
    seed = int(torch.randint(2**63 - 1, (), generator=previous))
    yield
    torch.manual_seed(seed)
