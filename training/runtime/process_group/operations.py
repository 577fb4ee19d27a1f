"""Operations of process groups whose ends can be followed.

Gloo may go on waiting in an operation whose connections are shut down (torch 2.13): in about one
of thirty aborts of a collective, and in up to one of five of a transfer between two ranks. So the
result of an operation is a future of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

# Which argument of an operation is read; the first is written, and may be the same.
INPUT_OF: Mapping[str, int | None] = {
    "allreduce": 0,
    "allreduce_coalesced": 0,
    "broadcast": 0,
    "reduce": 0,
    "allgather": 1,
    "all_gather_single": 1,
    "all_gather_single_coalesced": 1,
    "reduce_scatter": 1,
    "reduce_scatter_single": 1,
    "reduce_scatter_single_coalesced": 1,
    "gather": 1,
    "barrier": None,
}


class Running:
    """The operations that run on a connection.

    A thread of gloo that ends an operation knows this and not the connection: with the last
    reference to a group it would join itself ("Resource deadlock avoided", then terminate()).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def began(self) -> None:
        """Count an operation that begins."""
        with self._lock:
            self._count += 1

    def ended(self) -> None:
        """Count an operation that has ended."""
        with self._lock:
            self._count -= 1

    @property
    def is_none(self) -> bool:
        """Whether there is none."""
        return self._count == 0


class FutureWork(dist.Work):
    """A work that waits for a future; torch's own wrapper swallows the error in wait()."""

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        super().__init__()
        self._future = future

    @classmethod
    def done(cls, result: Any) -> Self:
        """Return the work of a collective that needs no other rank."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(result)
        return cls(future)

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002, D102 torch's signature
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:  # noqa: D102
        return self._future

    def is_completed(self) -> bool:  # noqa: D102
        return self._future.done()

    def result(self) -> Any:  # noqa: D102
        return self._future.value()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Operation:
    """One operation, until its step is over.

    Attributes:
        name: method of the group.
        arguments: passed to the method.
        inputs: a copy of what it reads, where operations are replayed.
        number: in its group, from 1.
        runs_on: those of its connection; an end on another connection does not count.
        is_done: it has ended, and its future has a value, or is about to get one.
    """

    name: str
    arguments: tuple[Any, ...]
    inputs: Any
    number: int = 0
    runs_on: Running | None = None
    is_done: bool = False
    _error: Exception | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _end: torch.futures.Future[Any] = field(default_factory=torch.futures.Future)

    def future(self) -> torch.futures.Future[Any]:
        """Return its result, for code that waits in C++.

        Future.set_exception is Python's own: DDP's reducer would take the exception for a list
        of tensors. A callback that raises fails the future that `then` returns, in C++ too.
        """
        return self._end.then(lambda _: self._result())

    def detach(self) -> None:
        """Ignore what its connection still reports."""
        with self._lock:
            self.runs_on = None

    def claim(self, running: Running) -> bool:
        """Whether an end on this connection is the end of the operation; true only once.

        Who claims it calls `complete`.
        """
        with self._lock:
            if self.is_done or self.runs_on is not running:
                return False
            self.is_done = True
            return True

    def complete(self, error: Exception | None = None) -> None:
        """Give the future its value, or this error."""
        self._error = error
        self._end.set_result(None)

    def fail(self, error: Exception) -> None:
        """Fail, unless it has ended."""
        with self._lock:
            if self.is_done:
                return
            self.is_done = True
        self.complete(error)

    def arguments_again(self) -> tuple[Any, ...]:
        """Return the arguments for a replay, which does not write over results in use."""
        position = INPUT_OF[self.name]
        if position is None:
            return self.arguments
        arguments = list(self.arguments)
        if self.is_done:
            arguments[0] = clone(arguments[0])
            arguments[position] = clone(self.inputs)
            if position == 0:
                arguments[0] = arguments[position]
        elif position == 0:
            copy(arguments[0], self.inputs)
        else:
            arguments[position] = self.inputs
        return tuple(arguments)

    def _result(self) -> Any:
        if self._error is not None:
            raise self._error
        written = self.arguments[0] if self.arguments else []
        if isinstance(written, Tensor):
            return [written]
        return list(written) if isinstance(written, list | tuple) else []


class TransferWork(FutureWork):
    """A transfer between two ranks. Gloo's has no future: a thread waits for its end.

    Args:
        operation: the transfer.
        work: of gloo.
        running: the operations of its connection.
    """

    def __init__(self, operation: Operation, work: dist.Work, running: Running) -> None:
        dist.Work.__init__(self)
        self._operation = operation
        self._work = work
        self._running = running

    @cached_property
    def _future(self) -> torch.futures.Future[Any]:  # type: ignore[override]
        """Made at the first question: a transfer that nobody waits for keeps nothing alive."""
        future = self._operation.future()
        self._running.began()
        threading.Thread(target=self._wait_for_gloo, daemon=True).start()
        return future

    def _wait_for_gloo(self) -> None:
        try:
            self._work.wait()
            if self._operation.claim(self._running):
                self._operation.complete()
        except RuntimeError as exc:
            self._operation.fail(RuntimeError(str(exc)))
        finally:
            self._running.ended()


Started = tuple[dist.Work, Callable[[], None]]


def start(group: Any, operation: str, arguments: Sequence[Any], *, rank: int, size: int) -> Started:
    """Begin a collective whose end can be followed.

    Gloo's reduce_scatter (torch 2.13) returns a work without a future: it is an all-reduce of a
    copy, from which wait() takes this rank's part. So it is here, and the copy can be followed.

    Args:
        group: runs the operation.
        operation: method of the group.
        arguments: passed to the method.
        rank: this process's number within the group.
        size: number of ranks in it.

    Returns:
        The work, and what to call once it has succeeded.
    """
    if not operation.startswith("reduce_scatter"):
        return getattr(group, operation)(*arguments), lambda: None
    outputs, inputs, reduce_options = arguments
    if operation == "reduce_scatter_single":
        outputs, inputs = [outputs], [inputs]
    wholes = [_flattened(tensors) for tensors in inputs]
    options = dist.AllreduceCoalescedOptions()
    if reduce_options is not None:
        options.reduceOp = reduce_options.reduceOp

    def take_part() -> None:
        for output, whole in zip(outputs, wholes, strict=True):
            output.copy_(whole.view(size, -1)[rank].view_as(output))

    return group.allreduce_coalesced(wholes, options), take_part


def _flattened(source: Tensor | Sequence[Tensor]) -> Tensor:
    """Copy into a flat tensor, from a part per rank or from the whole."""
    parts = [source] if isinstance(source, Tensor) else source
    return torch.cat([part.detach().reshape(-1) for part in parts])


def clone(value: Any) -> Any:
    """Copy a tensor, or lists of tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [clone(item) for item in value] if isinstance(value, list | tuple) else value


def copy(target: Any, source: Any) -> None:
    """Copy into a tensor, or into lists of tensors."""
    if isinstance(target, Tensor):
        with torch.no_grad():
            target.copy_(source)
        return
    for target_item, source_item in zip(target, source, strict=True):
        copy(target_item, source_item)
