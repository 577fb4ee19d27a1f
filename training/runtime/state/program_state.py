"""State that a program keeps beside model and optimizer: averages of weights, best values.

Each part has `state_dict` and `load_state_dict`. Its tensors are saved and sent with those of the
model; the rest is a document in JSON that also tells which keys are integers and which lists are
tuples, so that a part is given exactly what it gave.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from perdure.storage.staging import DTYPE_CODES, DTYPES
from perdure.training.errors import InputError
from perdure.training.runtime.program import Stateful

PROGRAM = "program/"  # how the names of its tensors begin
FIELD = "session.register(state=...)"


_PLAIN = (type(None), bool, int, float, str)  # not NumPy's float64, which is a float, too


@dataclass(slots=True)
class _Packer:
    """Takes the tensors out of a state."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def pack(self, value: Any, name: str) -> Any:
        """Return a value as JSON, tensors by the names that they get.

        Raises:
            InputError: the value, or a part of it, is neither.
        """
        match value:
            case Tensor():
                code, shape = self._code(value, name), list(value.shape)
                return {"tensor": self._add(value, name), "dtype": code, "shape": shape}
            case None | bool() | int() | float() | str() if type(value) in _PLAIN:
                return value
            case dict():
                items = value.items()
                return {
                    "dict": [[_key(key, name), self.pack(v, f"{name}.{key}")] for key, v in items]
                }
            case list() | tuple():
                parts = [self.pack(part, f"{name}.{index}") for index, part in enumerate(value)]
                return {"list" if isinstance(value, list) else "tuple": parts}
        raise InputError(
            FIELD,
            f"{name} is {type(value).__name__}; a state has tensors, numbers, text, None, lists, "
            "tuples and dicts of these",
        )

    def _add(self, tensor: Tensor, name: str) -> str:
        while name in self.tensors:  # {"a.b": ...} beside {"a": {"b": ...}}
            name = f"{name}_"
        self.tensors[name] = tensor
        return name

    @staticmethod
    def _code(tensor: Tensor, name: str) -> str:
        if tensor.dtype not in DTYPE_CODES:
            raise InputError(FIELD, f"{name}: {tensor.dtype} cannot be saved")
        return DTYPE_CODES[tensor.dtype]


def _key(key: Any, name: str) -> str | int:
    if isinstance(key, (str, int)) and not isinstance(key, bool):
        return key
    raise InputError(FIELD, f"{name} has the key {key!r}; keys are text or integers")


def _unpacked(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(node, dict):
        return node
    if "tensor" in node:
        return tensors[node["tensor"]]
    if "dict" in node:
        return {key: _unpacked(value, tensors) for key, value in node["dict"]}
    if "tuple" in node:
        return tuple(_unpacked(part, tensors) for part in node["tuple"])
    return [_unpacked(part, tensors) for part in node["list"]]


class ProgramState:
    """The registered parts of one program, by name."""

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        self._parts = parts

    def take(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Collect tensors by name, and a document of the rest for each part.

        Raises:
            InputError: a part has something that cannot be saved.
        """
        packer = _Packer()
        documents = {
            name: packer.pack(part.state_dict(), f"{PROGRAM}{name}")
            for name, part in self._parts.items()
        }
        return packer.tensors, documents

    def put(self, documents: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Give each part what `take` had of it; return the names of parts that had nothing."""
        for name, part in self._parts.items():
            if name in documents:
                part.load_state_dict(_unpacked(documents[name], tensors))
        return tuple(name for name in self._parts if name not in documents)


Layout = tuple[str, tuple[int, ...]]  # code of the data type, shape


def layouts_of(document: Any) -> Iterator[tuple[str, Layout]]:
    """Yield the name and the layout of each tensor in a document of `ProgramState.take`."""
    if isinstance(document, dict) and "tensor" in document:
        yield document["tensor"], (document["dtype"], tuple(document["shape"]))
    elif isinstance(document, (dict, list)):
        for part in document.values() if isinstance(document, dict) else document:
            yield from layouts_of(part)


def with_room(live: Mapping[str, Tensor], saved: Mapping[str, Layout]) -> dict[str, Tensor]:
    """Return a tensor to fill for each that was saved: the part's tensor, where it is like it.

    Args:
        live: the parts' tensors as they are, by name.
        saved: layouts by name.
    """

    def room(name: str, code: str, shape: tuple[int, ...]) -> Tensor:
        tensor = live.get(name)
        if tensor is not None and (tensor.dtype, tuple(tensor.shape)) == (DTYPES[code], shape):
            return tensor
        return torch.empty(shape, dtype=DTYPES[code])

    return {name: room(name, *layout) for name, layout in saved.items()}
