"""State beside model and optimizer comes back exactly as the program gave it."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from perdure.training.errors import InputError
from perdure.training.runtime.state.program_state import ProgramState, layouts_of, with_room


class Part:
    """Gives what it has, and takes what it is given."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def through_json(state: Any, part: Part) -> None:
    """Take the state of one program, send it, and put it into another."""
    tensors, documents = ProgramState({"part": Part(state)}).take()
    documents = json.loads(json.dumps(documents))
    own = ProgramState({"part": part})
    room = with_room(own.take()[0], dict(layouts_of(documents)))
    for name, tensor in room.items():
        tensor.copy_(tensors[name])
    assert own.put(documents, room) == ()


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"best": math.inf, "worst": -math.inf, "count": 3, "name": "loss", "none": None},
        {0: {"step": 1, "betas": (0.9, 0.95)}, "groups": [{"lr": 1e-3}, []]},
        {"dict": {"list": ["tensor"]}, "tuple": ({"float": 1.5},)},
        (True, False, 1, 1.0),
        2**80,
    ],
)
def test_values_keep_their_types_and_keys(state):
    part = Part()
    through_json(state, part)
    assert part.state == state
    assert repr(part.state) == repr(state)


def test_tensors_keep_their_bits_types_and_shapes():
    state = {
        "a": {"b": torch.tensor([[math.nan, -0.0]])},
        "a.b": torch.arange(3),
        "half": torch.tensor(1.5, dtype=torch.bfloat16),
        "mask": [torch.tensor([True, False]), torch.zeros(0, 4)],
    }
    part = Part()
    through_json(state, part)

    def leaves(value: Any) -> list[Tensor]:
        if isinstance(value, Tensor):
            return [value]
        values = value.values() if isinstance(value, dict) else value
        return [leaf for one in values for leaf in leaves(one)]

    for kept, given in zip(leaves(part.state), leaves(state), strict=True):
        assert (kept.dtype, kept.shape) == (given.dtype, given.shape)
        assert kept.view(-1).view(torch.uint8).tolist() == given.view(-1).view(torch.uint8).tolist()


def test_a_tensor_of_the_same_form_is_filled_in_place():
    weights = torch.zeros(2)
    part = Part({"weights": weights, "other": torch.zeros(3)})
    through_json({"weights": torch.ones(2), "other": torch.ones(4)}, part)
    assert part.state["weights"] is weights
    assert weights.tolist() == [1.0, 1.0]
    assert part.state["other"].tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("state", "line"),
    [
        ({"at": object()}, "program/part.at is object"),
        ({"best": np.float64(1.0)}, "program/part.best is float64"),
        ([{1, 2}], "program/part.0 is set"),
        ({(1, 2): 3}, "program/part has the key (1, 2)"),
        ({"z": torch.zeros(1, dtype=torch.complex64)}, "program/part.z: torch.complex64"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_its_place(state, line):
    with pytest.raises(InputError, match=r"session\.register") as caught:
        ProgramState({"part": Part(state)}).take()
    assert line in str(caught.value)


def test_a_part_that_was_not_saved_is_named_and_left_as_it_is():
    old, new = Part(1), Part(2)
    _, documents = ProgramState({"old": old}).take()
    both = ProgramState({"old": Part(), "new": new})
    assert both.put(documents, {}) == ("new",)
    assert new.state == 2
