"""Conversions agree with torch's, bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from storage.export import convert, is_convertible

TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
SPECIAL = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 1e-41, 3.4e38, 65504.0]


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("source", TORCH)
@pytest.mark.parametrize("target", ["F32", "BF16"])
@given(values=st.lists(st.floats(width=32), max_size=30))
def test_every_value_becomes_what_torch_makes_of_it(
    source: str, target: str, values: list[float]
) -> None:
    tensor = torch.tensor(SPECIAL + values, dtype=torch.float64).to(TORCH[source])
    data = convert(raw(tensor), source, target)
    found = torch.frombuffer(bytearray(data), dtype=TORCH[target])
    expected = tensor.to(torch.float32).to(TORCH[target])
    assert torch.equal(found.isnan(), expected.isnan())
    kept = ~expected.isnan()
    assert raw(found[kept]) == raw(expected[kept])


def test_the_same_type_is_left_alone() -> None:
    data = bytes(range(16))
    for dtype in ("I64", "F8_E4M3", "BF16"):
        assert convert(data, dtype, dtype) is data


@pytest.mark.parametrize(("source", "target"), [("I64", "F32"), ("F32", "I64"), ("F32", "F16")])
def test_other_conversions_are_refused(source: str, target: str) -> None:
    with pytest.raises(ValueError, match=f"no conversion from {source} to {target}"):
        convert(b"", source, target)


def test_integers_and_8_bit_floats_take_no_part() -> None:
    assert [d for d in ("F64", "BF16", "I32", "BOOL", "F8_E5M2") if is_convertible(d)] == [
        "F64",
        "BF16",
    ]
