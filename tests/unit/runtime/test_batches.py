"""Batches of every form that loaders make."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from perdure.training.errors import InputError
from perdure.training.runtime.step_loop.batches import checked, on_device

META = torch.device("meta")  # a device that is not the host


class Pair(NamedTuple):
    inputs: Tensor
    targets: Tensor


@dataclass
class Sample:
    tokens: Tensor
    name: str


class Encoding(UserDict[str, Tensor]):
    """As tokenizers return it."""

    def to(self, device: torch.device) -> Encoding:
        return Encoding({name: one.to(device) for name, one in self.items()})


def ones() -> Tensor:
    return torch.ones(2)


@pytest.mark.parametrize(
    ("batch", "read"),
    [
        (ones(), lambda moved: moved),
        ((ones(), ones()), lambda moved: moved[1]),
        ([ones()], lambda moved: moved[0]),
        ({"tokens": ones(), "length": 2}, lambda moved: moved["tokens"]),
        (OrderedDict(a=ones()), lambda moved: moved["a"]),
        ({"nested": {"deep": (ones(), None)}}, lambda moved: moved["nested"]["deep"][0]),
        (Pair(ones(), ones()), lambda moved: moved.targets),
        (Sample(ones(), "first"), lambda moved: moved.tokens),
        (Encoding({"input_ids": ones()}), lambda moved: moved["input_ids"]),
        ({"encoding": Encoding({"input_ids": ones()})}, lambda m: m["encoding"]["input_ids"]),
    ],
)
def test_tensors_go_to_the_device_in_the_structure_they_came_in(batch, read):
    moved = on_device(batch, META)
    assert type(moved) is type(batch)
    assert read(moved).device == META
    assert read(batch).device.type == "cpu", "the step may be executed again with it"


@pytest.mark.parametrize("given", [[ones()], [(ones(), ones())], [{"a": ones()}], ((ones(), 1),)])
def test_a_list_of_micro_batches_is_what_a_step_takes(given):
    assert checked(given) is given


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ((ones(), ones()), "a tuple of tensors"),
        ({"tokens": ones()}, "a dict"),
        (ones(), "a Tensor"),
        (None, "nothing"),
        ([], "an empty list"),
        ((), "an empty tuple"),
    ],
)
def test_one_batch_is_not_taken_for_several(given, what):
    with pytest.raises(
        InputError, match=rf"next_step\(\) returned {what}: .*\[\(inputs, targets\)\]"
    ):
        checked(given)


def test_what_is_no_tensor_stays_as_it_is():
    other: list[Any] = [None, 3, "text", object()]
    batch = {"a": other, "sample": Sample(ones(), "first")}
    moved = on_device(batch, META)
    assert moved["a"] == other
    assert moved["sample"].name == "first"
