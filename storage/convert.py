"""Raw tensor data from one floating-point type to another, with numpy alone.

Types are the codes of the safetensors format. numpy has no bfloat16: it is the upper half of a
float32, rounded to the nearest, ties to even, as torch does it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def convert(data: bytes, source: str, target: str) -> bytes:
    """The little-endian elements in `data` as another type; untouched if it is the same.

    Raises:
        ValueError: one of the types is not one that is known here.
    """
    if source == target:
        return data
    if source not in _READ or target not in _WRITE:
        raise ValueError(f"no conversion from {source} to {target}")
    with np.errstate(over="ignore"):  # too large becomes infinite
        return _WRITE[target](_READ[source](data))


def is_convertible(dtype: str) -> bool:
    """Whether a tensor of this type takes part in a conversion."""
    return dtype in _READ


def _from_bf16(data: bytes) -> Floats:
    upper = np.frombuffer(data, "<u2").astype(np.uint32)
    return (upper << np.uint32(16)).view(np.float32)


def _to_bf16(values: Floats) -> bytes:
    bits = values.view(np.uint32)
    upper = bits >> np.uint32(16)
    rounded = (bits + (np.uint32(0x7FFF) + (upper & np.uint32(1)))) >> np.uint32(16)
    quiet = upper | np.uint32(0x40)  # rounding could make an infinity of a NaN
    return np.where(np.isnan(values), quiet, rounded).astype("<u2").tobytes()


_READ: Mapping[str, Callable[[bytes], Floats]] = {
    "BF16": _from_bf16,
    "F16": lambda data: np.frombuffer(data, "<f2").astype(np.float32),
    "F32": lambda data: np.frombuffer(data, "<f4").astype(np.float32),
    "F64": lambda data: np.frombuffer(data, "<f8").astype(np.float32),
}
_WRITE: Mapping[str, Callable[[Floats], bytes]] = {
    "BF16": _to_bf16,
    "F32": lambda values: values.astype("<f4").tobytes(),
}
