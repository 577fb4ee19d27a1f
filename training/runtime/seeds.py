"""Random numbers addressed by step: what a step draws depends on seed, rank and step alone.

A step that is done again, on the same process or on the one that took its place, draws what it
drew the first time, and no random state needs to survive its process.
"""

from __future__ import annotations

import hashlib
import random
from functools import cache

import numpy as np
import torch


def seed_of(seed: int, *, rank: int, step: int) -> int:
    """A seed for the generators of one rank in one step, 63 bits, unlike that of any other."""
    text = f"{seed}/{rank}/{step}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_step(seed: int, *, rank: int, step: int) -> None:
    """Seed Python's, numpy's and torch's generators, those of devices included."""
    own = seed_of(seed, rank=rank, step=step)
    if _has_device():
        torch.manual_seed(own)
    else:
        # The other keeps a stack trace for every kind of device that is not in use (torch 2.13).
        torch.default_generator.manual_seed(own)
    np.random.seed(own % 2**32)  # noqa: NPY002 the generator that libraries use
    random.seed(own)


@cache
def _has_device() -> bool:
    return torch.accelerator.is_available()
