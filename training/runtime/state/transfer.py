"""A rank's state for the rank that lost its own: tensors over the process group, the rest as JSON.

Both sides must be connected. Tensors are sent many at a time: waiting for each costs a state of
many small tensors several times what its bytes do. Sizes are bytes.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from perdure.storage.staging import raw

MAX_TRANSFERS = 32


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Layout of a tensor without its values, from which another rank can make it.

    Attributes:
        dtype: by torch's name.
        shape: sizes of this rank's part.
        device: type of device.
    """

    dtype: str
    shape: Sequence[int]
    device: str

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLayout:
        """Describe a tensor."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(dtype, list(local_part(tensor).shape), tensor.device.type)

    def empty_beside(self, parameter: Tensor) -> Tensor:
        """Make a tensor without values, on the parameter's device if that is of this type.

        Raises:
            ValueError: torch has no such type.
        """
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"a replica's tensor is of type {self.dtype!r}, unknown here")  # noqa: TRY004
        device = parameter.device if parameter.device.type == self.device else self.device
        return torch.empty(self.shape, dtype=dtype, device=device)


@dataclass(slots=True)
class _Transfers:
    """Transfers that have begun, oldest first, and what to call once each has ended."""

    _waiting: deque[tuple[dist.Work, Callable[[], object]]] = field(default_factory=deque)

    def add(self, work: dist.Work | None, then: Callable[[], object]) -> None:
        assert work is not None  # noqa: S101 None is for those outside of the group
        self._waiting.append((work, then))
        if len(self._waiting) == MAX_TRANSFERS:
            self._finish_oldest()

    def finish_all(self) -> None:
        while self._waiting:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        work, then = self._waiting.popleft()
        work.wait()
        then()


def send_state(
    tensors: Mapping[str, Tensor], extra: dict[str, Any], *, to: int, device: torch.device
) -> None:
    """Send a state.

    Raises:
        RuntimeError: the connection broke.
    """
    layouts = {name: astuple(TensorLayout.of(tensor)) for name, tensor in tensors.items()}
    _send_json({"layouts": layouts, "extra": extra}, to=to, device=device)
    transfers = _Transfers()
    for tensor in tensors.values():
        # An optimizer may keep step counts on the host, which NCCL and HCCL do not send.
        flat = local_part(tensor).contiguous().reshape(-1).to(device)
        transfers.add(dist.isend(flat, to), flat.numel)  # which keeps it until then
    transfers.finish_all()


def receive_header(
    *, source: int, device: torch.device
) -> tuple[dict[str, TensorLayout], dict[str, Any]]:
    """Receive the layouts of the next tensors by name, in order, and the rest of the state.

    Raises:
        RuntimeError: the connection broke.
    """
    document = _receive_json(source=source, device=device)
    return {name: TensorLayout(*fields) for name, fields in document["layouts"].items()}, document[
        "extra"
    ]


def receive_tensors(
    tensors: Mapping[str, Tensor], names: Iterable[str], *, source: int, device: torch.device
) -> None:
    """Fill the tensors of these names, in this order.

    Raises:
        RuntimeError: the connection broke.
        ValueError: the other side has other tensors.
    """
    names = list(names)
    if missing := [name for name in names if name not in tensors]:
        raise ValueError(f"the replica has {missing[0]}, which this rank has not")
    transfers = _Transfers()
    with torch.no_grad():
        for name in names:
            local = local_part(tensors[name])
            is_fit = local.is_contiguous() and local.device.type == device.type
            fresh = partial(torch.empty, local.numel(), dtype=local.dtype, device=device)
            flat = local.reshape(-1) if is_fit else fresh()
            transfers.add(dist.irecv(flat, source), partial(_fill, local, flat))
        transfers.finish_all()


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor in this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _fill(target: Tensor, flat: Tensor) -> None:
    if flat.data_ptr() != target.data_ptr():
        target.copy_(flat.view_as(target))


def _send_json(document: Any, *, to: int, device: torch.device) -> None:
    data = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
    dist.send(torch.tensor([data.numel()], device=device), to)
    dist.send(data.to(device), to)


def _receive_json(*, source: int, device: torch.device) -> Any:
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(size, source)
    data = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    dist.recv(data, source)
    return json.loads(raw(data.cpu()).tobytes())
