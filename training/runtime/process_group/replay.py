"""Collectives whose results are promised, so that nobody waits for a link that is gone.

Gloo may go on waiting in an operation whose connections are shut down (seen with torch 2.13, in
about one of thirty aborts): its threads are left to their time-out, and whoever waits for the
result learns from the promise that it is void.

Where a job wants it, the operations also outlive a broken link: what went into each is kept, and
nobody is told but the coordinator. All ranks then make new links and run again, in their order,
exactly the operations that some rank has not completed. Backward never notices. What is kept is
let go at the step boundary, except the last operation, which some rank may not have completed
yet. HCCL has its own retry. Times are seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from training.runtime.process_group.connections import Link, StoreClient, start
from training.runtime.process_group.generations import Generations
from training.runtime.process_group.reconfigurable import TRANSFERS, ReconfigurableProcessGroup

SETTLE_S = 1.0  # for operations to notice that their link is gone
POLL_S = 0.002

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


@dataclass(slots=True, eq=False)
class _Kept:
    """One operation, until its step is over.

    Attributes:
        operation: by its name.
        arguments: of it.
        inputs: a copy of what it reads.
        number: in its group, from 1.
        link: that it runs on; what ends on another one is void.
        is_done: its end is there, and its promise is kept, or about to be.
    """

    operation: str
    arguments: tuple[Any, ...]
    inputs: Any
    number: int = 0
    link: Link | None = None
    is_done: bool = False
    _error: Exception | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _promise: torch.futures.Future[Any] = field(default_factory=torch.futures.Future)

    def result(self) -> torch.futures.Future[Any]:
        """What is promised, for one who waits in C++.

        Future.set_exception is Python's own: DDP's reducer would take the exception for a list
        of tensors. A callback that raises fails the future that it makes, for everybody.
        """
        return self._promise.then(lambda _: self._outcome())

    def cut(self) -> None:
        """It is over with the link that it runs on, whatever that may still tell."""
        with self._lock:
            self.link = None

    def claim(self, link: Link) -> bool:
        """Whether what has ended on a link is the end of the operation; the first time counts.

        Whoever claims it owes `keep`.
        """
        with self._lock:
            if self.is_done or self.link is not link:
                return False
            self.is_done = True
            return True

    def keep(self, error: Exception | None = None) -> None:
        """Keep the promise, or break it."""
        self._error = error
        self._promise.set_result(None)

    def fail(self, error: Exception) -> None:
        """Break the promise, unless it has its end."""
        with self._lock:
            if self.is_done:
                return
            self.is_done = True
        self.keep(error)

    def _outcome(self) -> Any:
        if self._error is not None:
            raise self._error
        return _outputs(self.arguments)


class _PromisedWork(dist.Work):
    """What waits for a promise; torch's own wrapper of a future swallows its error in wait()."""

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002 torch's signature
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def is_completed(self) -> bool:
        return self._future.done()

    def result(self) -> Any:
        return self._future.value()


class ReplayableProcessGroup(ReconfigurableProcessGroup):
    """A facade over gloo that promises results, and may keep what they are made of."""

    def __init__(
        self,
        generations: Generations,
        links: ReplayableConnections,
        name: str,
        rank: int,
        size: int,
    ) -> None:
        super().__init__(generations, name, rank, size)
        self.name_inside = name
        self._links = links
        self._kept: dict[int, _Kept] = {}
        self._count = 0
        self._link: Link | None = None
        self._generation = 0
        links.add(self)

    def _run(self, operation: str, alone: Callable[[], Any], *arguments: Any) -> dist.Work:
        generations = self._generations
        # Gloo's transfers between two ranks have no future to follow.
        if generations.is_alone or self._own_size == 1 or operation in TRANSFERS:
            return super()._run(operation, alone, *arguments)
        with self._links.gate:  # while links are made anew, nothing begins
            generations.on_collective(f"{operation} in {self.told_name}")
            self._current_link()
            kept = _Kept(operation, arguments, self._inputs_of(operation, arguments))
            self._count += 1
            self._kept[self._count] = kept
            kept.number = self._count
            work = _PromisedWork(kept.result())
            once_it_runs = self._links.on_begin(operation)
            self._begin(kept, arguments)
            once_it_runs()
        if generations.announced > generations.current:
            kept.fail(generations.interruption())
        return work

    def _inputs_of(self, operation: str, arguments: tuple[Any, ...]) -> Any:
        position = INPUT_OF.get(operation)
        if position is None or not self._links.keeps:
            return None
        return _clone(arguments[position])

    def _current_link(self) -> None:
        generations = self._generations
        if self._generation != generations.current:
            self._kept.clear()
            self._count, self._link = 0, None
            self._generation = generations.current
        generations.check()
        if self._link is None:
            generations.link(self._name, rank=self._own_rank, size=self._own_size)
            self._link = generations.links()[self._name]

    def _begin(self, kept: _Kept, arguments: tuple[Any, ...]) -> None:
        number, link = self._links.number, self._link
        assert link is not None  # noqa: S101 the callers made it
        kept.link = link
        link.began()
        try:
            work, finish = start(
                link.group, kept.operation, arguments, rank=self._own_rank, size=self._own_size
            )
            future = work.get_future()
            future.add_done_callback(lambda f: self._ended(kept, f, link, number, finish))
        except RuntimeError as exc:
            link.ended()
            self._failed(kept, exc, number)

    def _ended(
        self,
        kept: _Kept,
        future: torch.futures.Future[Any],
        link: Link,
        number: int,
        finish: Callable[[], None],
    ) -> None:
        link.ended()
        try:
            future.value()
        except RuntimeError as exc:
            self._failed(kept, exc, number)
            return
        if not kept.claim(link):
            return
        try:
            finish()
        except RuntimeError as exc:
            kept.keep(exc)
            return
        kept.keep()
        self._generations.on_collective_end()
        if not self._links.keeps:
            self._kept.pop(kept.number, None)

    def _failed(self, kept: _Kept, error: RuntimeError, number: int) -> None:
        if self._links.keeps and kept.operation in INPUT_OF:
            self._links.broke(str(error), number)
        else:
            kept.fail(RuntimeError(str(error)))

    @property
    def needs_from(self) -> int:
        """The first operation that this rank has not completed."""
        open_ones = (number for number, kept in self._kept.items() if not kept.is_done)
        return min(open_ones, default=self._count + 1)

    @property
    def is_linked(self) -> bool:
        """Whether it has a link in this generation."""
        return self._link is not None and self._generation == self._generations.current

    @property
    def member(self) -> tuple[int, int]:
        """Rank and size."""
        return self._own_rank, self._own_size

    def cut(self) -> None:
        """From now on no operation completes before it has run again.

        A thread of gloo that is late would hand out what is being written once more.
        """
        for kept in list(self._kept.values()):
            kept.cut()

    def run_again(self, link: Link, first: int) -> int:
        """Take a new link, and repeat the operations from `first` on; how many there were.

        Raises:
            RuntimeError: one of them is not kept any more.
        """
        self._link = link
        wanted = range(first, self._count + 1)
        missing = [
            n for n in wanted if n not in self._kept or self._kept[n].operation not in INPUT_OF
        ]
        if missing:
            raise RuntimeError(f"operation {missing[0]} of {self._name} is not kept any more")
        for number in wanted:
            kept = self._kept[number]
            self._begin(kept, _again(kept))
        return self._count + 1 - first

    def let_go(self) -> None:
        """The step is over: every rank has entered its last operation."""
        last = self._kept.get(self._count)
        self._kept = {self._count: last} if last is not None else {}

    def fail(self, error: Exception) -> None:
        """A new generation begins: whoever waits for a promise learns that it is void."""
        for kept in list(self._kept.values()):
            kept.fail(error)


class ReplayableConnections:
    """All facades of this process, and the making of new links under them.

    Args:
        generations: of the groups.
        open_store: connects to the rendezvous store.
        tell: told once of each link that broke: what the error says.
        budget_s: for new links and the operations that are run again.
        keeps: whether operations are kept, to be run again.

    Attributes:
        number: how often the links of this generation were made anew.
        gate: held while that goes on.
        on_begin: called with the name of an operation that is about to begin; what it returns is
            called as soon as that runs.
    """

    def __init__(
        self,
        generations: Generations,
        *,
        open_store: Callable[[], StoreClient],
        tell: Callable[[str, int], None],
        budget_s: float,
        keeps: bool,
    ) -> None:
        self.keeps = keeps
        self._generations = generations
        self._open_store = open_store
        self._tell = tell
        self._budget_s = budget_s
        self._groups: list[ReplayableProcessGroup] = []
        self._lock = threading.Lock()
        self._told: tuple[int, int] | None = None
        self._client: StoreClient | None = None
        self.number = 0
        self.gate = threading.RLock()
        self.on_begin: Callable[[str], Callable[[], None]] = lambda _operation: lambda: None

    def add(self, group: ReplayableProcessGroup) -> None:
        """A facade was made."""
        self._groups.append(group)

    def broke(self, text: str, number: int) -> None:
        """An operation failed on a link; from any thread."""
        generations = self._generations
        where = (generations.current, number)
        with self._lock:
            is_old = number != self.number or generations.announced > generations.current
            if is_old or self._told == where:
                return
            self._told = where
        self._tell(text, number)

    def let_go(self) -> None:
        """The step is over."""
        for group in self._groups:
            group.let_go()

    def fail(self) -> None:
        """A new generation is announced."""
        with self._lock:
            self.number = 0
        error = self._generations.interruption()
        for group in self._groups:
            group.fail(error)
        client = self._client
        if client is not None:
            client.abort()  # whoever makes links anew would wait for ranks that do not come

    def make_anew(self, generation: int, number: int) -> int:
        """Make new links and run again what some rank has not completed. Collective.

        Args:
            generation: whose links they are.
            number: how often they have been made anew.

        Returns:
            How many operations were run again here.

        Raises:
            Interrupted: another generation is announced.
            RuntimeError: the budget is spent, or a new generation was announced meanwhile.
        """
        deadline_s = time.monotonic() + self._budget_s
        generations = self._generations
        generations.check_is(generation)
        links = list(generations.links().values())
        for link in links:
            link.abort()
        _settle(links, min(deadline_s, time.monotonic() + SETTLE_S))
        with self.gate:
            with self._lock:  # or fail() would have counted from 0 before this, and not after
                generations.check_is(generation)
                self.number = number
            linked = sorted((g for g in self._groups if g.is_linked), key=lambda g: g.name_inside)
            for group in linked:
                group.cut()
            self._client = client = self._open_store()
            try:
                generations.check_is(generation)  # or nobody would have aborted this client
                return sum(self._mend(group, client, number, deadline_s) for group in linked)
            finally:
                self._client = None
                client.abort()

    def _mend(
        self, group: ReplayableProcessGroup, client: StoreClient, number: int, deadline_s: float
    ) -> int:
        rank, size = group.member
        prefix = f"g{self._generations.current}/{group.name_inside}/l{number}"
        store = PrefixStore(prefix, client.store)
        store.set(f"need/{rank}", str(group.needs_from))
        keys = [f"need/{one}" for one in range(size)]
        store.wait(keys, timedelta(seconds=max(0.001, deadline_s - time.monotonic())))
        first = min(int(text) for text in store.multi_get(keys))
        link = self._linked(group, client, prefix, deadline_s)
        return group.run_again(link, first)

    def _linked(
        self, group: ReplayableProcessGroup, client: StoreClient, prefix: str, deadline_s: float
    ) -> Link:
        """A new link; the network may be down for a while yet."""
        rank, size = group.member
        while True:
            self._generations.check()
            # Ranks fail unequally often: whoever comes joins the round that is open.
            entries = PrefixStore(prefix, client.store).add("entered", 1)
            number = (entries - 1) // size
            link = Link(self._generations.backend, self._generations.device)
            self._generations.replace(group.name_inside, link)
            store = PrefixStore(f"{prefix}/{number}", client.store)
            try:
                # Its operations have this limit, too; a generation that comes instead ends both.
                link.connect(store, rank=rank, size=size, timeout_s=self._generations.op_timeout_s)
            except RuntimeError:
                if time.monotonic() > deadline_s:
                    raise
            else:
                return link


def _settle(links: Sequence[Link], until_s: float) -> None:
    """Wait for operations that were cut short: until their end they write where they always did.

    One that waits for ever, as gloo's sometimes do, writes nothing more.
    """
    while time.monotonic() < until_s and not all(link.is_idle for link in links):
        time.sleep(POLL_S)


def _again(kept: _Kept) -> tuple[Any, ...]:
    """The arguments for a repetition; results that were handed out are not written again."""
    position = INPUT_OF[kept.operation]
    if position is None:
        return kept.arguments
    arguments = list(kept.arguments)
    if kept.is_done:
        arguments[0] = _clone(arguments[0])
        arguments[position] = _clone(kept.inputs)
        if position == 0:
            arguments[0] = arguments[position]
    elif position == 0:
        _copy(arguments[0], kept.inputs)
    else:
        arguments[position] = kept.inputs
    return tuple(arguments)


def _clone(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [_clone(one) for one in value] if isinstance(value, list | tuple) else value


def _copy(target: Any, source: Any) -> None:
    if isinstance(target, Tensor):
        with torch.no_grad():
            target.copy_(source)
        return
    for one, other in zip(target, source, strict=True):
        _copy(one, other)


def _outputs(arguments: tuple[Any, ...]) -> Any:
    """What a collective's future holds: a list."""
    written = arguments[0] if arguments else []
    if isinstance(written, Tensor):
        return [written]
    return list(written) if isinstance(written, list | tuple) else []
