"""The states of Python's and numpy's random generators as one tensor of a fixed size."""

from __future__ import annotations

import json
import random

import numpy as np
import torch
from torch import Tensor

SIZE_BYTES = 32 * 2**10  # two Mersenne twisters of 624 words, as JSON


def python_states() -> Tensor:
    """The states as they are, uint8 [SIZE_BYTES].

    Always of one size, or every save would have to be planned anew.
    """
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    document = {
        "random": [version, list(internal), gauss],
        "numpy": [name, keys.tolist(), position, has_gauss, cached],  # type: ignore[union-attr]
    }
    data = json.dumps(document).encode().ljust(SIZE_BYTES)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def set_python_states(states: Tensor) -> None:
    """Set what `python_states` returned."""
    document = json.loads(bytes(states.tolist()))
    version, internal, gauss = document["random"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = document["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, cached))  # noqa: NPY002
