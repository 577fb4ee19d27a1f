"""Process groups that live as long as their process, and are reconnected by each generation.

DDP, FSDP2, DeviceMesh and checkpoint planners keep these groups for ever. Recovery begins a new
generation with new connections inside, and nothing above is built again. Connections are
established at their first use, under a name that carries the generation. Written against torch
2.13.
"""

# torch's stubs give a collective two signatures, and a group written in Python is called with
# the first of them alone.
# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, HashStore

from perdure.training.device import ENDED_BY_THE_DEVICE
from perdure.training.runtime.process_group.generations import Generations, GroupMembership
from perdure.training.runtime.process_group.operations import FutureWork

BACKEND = "perdure"
TRANSFERS = frozenset({"send", "recv"})  # between two ranks, so that counts would differ


class ReconfigurableProcessGroup(dist.ProcessGroup):
    """One group. The methods are those that torch calls on a group written in Python."""

    def __init__(self, generations: Generations, membership: GroupMembership) -> None:
        super().__init__(membership.rank, membership.size)  # type: ignore[call-arg]  # one constructor of two
        self._generations = generations
        self._membership = membership
        self._own_rank = membership.rank
        self._own_size = membership.size
        self._group_name = membership.name
        self._description = ""
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._register_backend(torch.device(generations.device.type), kind, None)

    def _run(self, operation: str, alone: Callable[[], Any], *arguments: Any) -> dist.Work:
        generations = self._generations
        if generations.is_alone or self._own_size == 1:
            return FutureWork.done(alone())
        described = f"{operation} in {self.display_name}"
        if operation in TRANSFERS:
            generations.on_transfer(described)
        else:
            generations.on_collective(described)
        work: dist.Work = getattr(self._connected(), operation)(*arguments)
        return work

    def _connected(self) -> dist.ProcessGroup:
        group = self._generations.connection(self._membership).group
        assert group is not None  # noqa: S101 connection() returns a connected group
        return group

    @property
    def display_name(self) -> str:
        """For hang reports and logs."""
        # torch describes the group of all ranks as default_pg, and names it 0.
        if self._description == "default_pg":
            return "world"
        return self._description or self._membership.name

    def connect(self) -> None:
        """Establish the connection now; collective."""
        if not self._generations.is_alone and self._own_size > 1:
            self._connected()

    def _get_backend(self, device: torch.device) -> Any:
        """Return its backend for a device; torch_npu calls the methods below on it."""
        if self._generations.backend in ENDED_BY_THE_DEVICE:
            return self
        return super()._get_backend(device)

    # stop_device and restart_device of torch_npu call these methods of every group of a process
    # (torch_npu/npu/_recovery.py). `Generations` does it for the connections that are inside.
    def set_watchdog_status(self, status: int) -> None:
        """Do nothing: these groups have no watchdog."""

    def clear_workmeta_list(self) -> None:
        """Do nothing: these groups keep no such list."""

    # torch asks a group without a C++ backend for these by several names.
    def getBackendName(self) -> str:  # noqa: N802, D102
        return BACKEND

    def getRank(self) -> int:  # noqa: N802, D102
        return self._own_rank

    def getSize(self) -> int:  # noqa: N802, D102
        return self._own_size

    @property
    def group_name(self) -> str:
        """As functional collectives and DeviceMesh know it."""
        return self._group_name

    @property
    def group_desc(self) -> str:
        """As DeviceMesh sets it."""
        return self._description

    def setGroupName(self, name: str) -> None:  # noqa: N802, D102
        self._group_name = name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802, D102
        self._description = desc

    def getGroupName(self) -> str:  # noqa: N802, D102
        return self._group_name

    def getGroupDesc(self) -> str:  # noqa: N802, D102
        return self._description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # noqa: D102
        return self._run("allreduce", lambda: tensors, tensors, opts or dist.AllreduceOptions())

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:  # noqa: D102
        return self._run("allreduce_coalesced", lambda: tensors, tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # noqa: D102
        return self._run("reduce", lambda: tensors, tensors, opts or dist.ReduceOptions())

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:  # noqa: D102
        return self._run("broadcast", lambda: tensors, tensors, opts)

    def allgather(  # noqa: D102
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        options = opts or AllgatherOptions()
        return self._run(
            "allgather", lambda: _fill_lists(outputs, inputs), outputs, inputs, options
        )

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:  # noqa: D102
        options = opts or AllgatherOptions()
        return self._run(
            "all_gather_single", lambda: self._repeat(output, source), output, source, options
        )

    _allgather_base = all_gather_single  # type: ignore[assignment]

    def all_gather_single_coalesced(  # noqa: D102
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        def alone() -> list[Tensor]:
            return [self._repeat(o, i)[0] for o, i in zip(outputs, inputs, strict=True)]

        return self._run("all_gather_single_coalesced", alone, outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def reduce_scatter(  # noqa: D102
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> dist.Work:
        def alone() -> Sequence[Tensor]:
            for output, parts in zip(outputs, inputs, strict=True):
                output.copy_(parts[self._own_rank])
            return outputs

        return self._run("reduce_scatter", alone, outputs, inputs, opts)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:  # noqa: D102
        return self._run(
            "reduce_scatter_single", lambda: [self._part(output, whole)], output, whole, opts
        )

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def reduce_scatter_single_coalesced(  # noqa: D102
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        def alone() -> list[Tensor]:
            return [self._part(o, i) for o, i in zip(outputs, inputs, strict=True)]

        return self._run("reduce_scatter_single_coalesced", alone, outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def gather(self, outputs: Any, inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:  # noqa: D102
        return self._run(
            "gather", lambda: _fill_lists(outputs, inputs) if outputs else outputs,
            outputs, inputs, opts,
        )  # fmt: skip

    def scatter(self, outputs: Sequence[Tensor], inputs: Any, opts: Any = None) -> dist.Work:  # noqa: D102
        def alone() -> Sequence[Tensor]:
            for output, parts in zip(outputs, inputs or [], strict=False):
                output.copy_(parts[self._own_rank])
            return outputs

        return self._run("scatter", alone, outputs, inputs, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # noqa: D102
        def alone() -> Any:
            for output, source in zip(outputs, inputs, strict=True):
                output.copy_(source)
            return outputs

        return self._run("alltoall", alone, outputs, inputs, opts)

    def all_to_all_single(self, output: Tensor, source: Tensor, *arguments: Any) -> dist.Work:  # noqa: D102
        def alone() -> list[Tensor]:
            return [output.copy_(source) if output.shape == source.shape else output]

        return self._run("all_to_all_single", alone, output, source, *arguments)

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def barrier(self, opts: Any = None) -> dist.Work:  # noqa: D102
        return self._run("barrier", list, opts or dist.BarrierOptions())

    def send(self, tensors: Any, dst: int, tag: int = 0) -> dist.Work:  # noqa: D102
        return self._run("send", lambda: tensors, tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> dist.Work:  # noqa: D102
        return self._run("recv", lambda: tensors, tensors, src, tag)

    def _repeat(self, output: Tensor, source: Tensor) -> list[Tensor]:
        output.view(self._own_size, -1).copy_(source.reshape(1, -1).expand(self._own_size, -1))
        return [output]

    def _part(self, output: Tensor, whole: Tensor) -> Tensor:
        return output.copy_(whole.view(self._own_size, -1)[self._own_rank].view_as(output))


def _fill_lists(outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> Any:
    for gathered, source in zip(outputs, inputs, strict=True):
        for target in gathered:
            target.copy_(source)
    return outputs


NewGroup = Callable[[GroupMembership], ReconfigurableProcessGroup]
_new_group: NewGroup | None = None


def install(
    generations: Generations, *, world_size: int, new_group: NewGroup | None = None
) -> None:
    """Make a reconfigurable group the default one of this process; nothing is connected yet.

    Args:
        generations: the present and the announced generation.
        world_size: number of ranks.
        new_group: makes a group; default: `ReconfigurableProcessGroup`.
    """
    global _new_group  # noqa: PLW0603 torch keeps one default group a process, too
    _new_group = new_group or partial(ReconfigurableProcessGroup, generations)
    if BACKEND.upper() not in dist.Backend._plugins:  # noqa: SLF001 registering twice is an error
        dist.Backend.register_backend(
            BACKEND, _create, extended_api=True, devices=[generations.device.type]
        )
    dist.init_process_group(
        BACKEND, store=HashStore(), rank=generations.rank, world_size=world_size
    )


def _create(options: Any, _backend_options: Any) -> ReconfigurableProcessGroup:
    assert _new_group is not None  # noqa: S101 install() registers this function
    ranks = tuple(options.global_ranks_in_group)
    name = str(options.group_id or "world")
    return _new_group(GroupMembership(name, options.group_rank, options.group_size, ranks))


def default_group() -> ReconfigurableProcessGroup:
    """Return the group of all ranks."""
    group = dist.group.WORLD
    assert isinstance(group, ReconfigurableProcessGroup)  # noqa: S101 install() made it
    return group
