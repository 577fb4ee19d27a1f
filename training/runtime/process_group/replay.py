"""Process groups over gloo whose operations can be replayed after their connections broke.

When a generation ends, each operation fails at once, and gloo's threads are left to their time-out.

Where a job wants it, operations also outlive a broken connection. The inputs of each are copied,
and only the coordinator learns of the break. All ranks then reconnect and replay, in their order,
exactly the operations that some rank has not completed; backward never notices. The copies are
dropped at the step boundary, except that of the last operation, which some rank may not have
completed yet. HCCL has its own retry. Times are seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from perdure.training.runtime.process_group.generations import (
    Generations,
    GroupConnection,
    GroupMembership,
    StoreClient,
)
from perdure.training.runtime.process_group.operations import (
    INPUT_OF,
    FutureWork,
    Operation,
    Running,
    TransferWork,
    clone,
    start,
)
from perdure.training.runtime.process_group.reconfigurable import (
    TRANSFERS,
    ReconfigurableProcessGroup,
)

IDLE_TIMEOUT_S = 1.0  # for operations to notice that their connection is aborted
POLL_S = 0.002


class ReplayableProcessGroup(ReconfigurableProcessGroup):
    """A group over gloo whose operations fail with their generation, and may be replayed."""

    def __init__(
        self,
        generations: Generations,
        connections: ReplayableConnections,
        membership: GroupMembership,
    ) -> None:
        super().__init__(generations, membership)
        self.key = membership.name
        self._connections = connections
        self._operations: dict[int, Operation] = {}
        self._transfers: WeakSet[Operation] = WeakSet()
        self._count = 0
        self._connection: GroupConnection | None = None
        self._generation = 0
        connections.add(self)

    def _run(self, operation: str, alone: Callable[[], Any], *arguments: Any) -> dist.Work:
        generations = self._generations
        if generations.is_alone or self._own_size == 1:
            return super()._run(operation, alone, *arguments)
        if operation in TRANSFERS:
            return self._transfer(operation, arguments)
        with self._connections.gate:  # while ranks reconnect, nothing begins
            generations.on_collective(f"{operation} in {self.display_name}")
            self._enter_generation()
            begun = Operation(operation, arguments, self._inputs_of(operation, arguments))
            self._count += 1
            self._operations[self._count] = begun
            begun.number = self._count
            work = FutureWork(begun.future())
            once_it_runs = self._connections.on_begin(operation)
            self._begin(begun, arguments)
            once_it_runs()
        if generations.announced > generations.current:
            begun.fail(generations.interruption())
        return work

    def _transfer(self, operation: str, arguments: tuple[Any, ...]) -> dist.Work:
        """Begin a transfer, which is not counted: the ranks of a group begin unequally many."""
        generations = self._generations
        generations.on_transfer(f"{operation} in {self.display_name}")
        connection = generations.connection(self._membership)
        begun = Operation(operation, arguments, None, runs_on=connection.running)
        self._transfers.add(begun)
        work = getattr(connection.group, operation)(*arguments)
        if generations.announced > generations.current:
            begun.fail(generations.interruption())
        return TransferWork(begun, work, connection.running)

    def _inputs_of(self, operation: str, arguments: tuple[Any, ...]) -> Any:
        position = INPUT_OF.get(operation)
        if position is None or not self._connections.replays:
            return None
        return clone(arguments[position])

    def _enter_generation(self) -> None:
        generations = self._generations
        if self._generation != generations.current:
            self._operations.clear()
            self._count, self._connection = 0, None
            self._generation = generations.current
        generations.check()
        if self._connection is None:
            self._connection = generations.connection(self._membership)

    def _begin(self, operation: Operation, arguments: tuple[Any, ...]) -> None:
        number, connection = self._connections.number, self._connection
        assert connection is not None  # noqa: S101 set by the callers
        running = operation.runs_on = connection.running
        running.began()
        try:
            work, finish = start(
                connection.group, operation.name, arguments,
                rank=self._own_rank, size=self._own_size,
            )  # fmt: skip
            future = work.get_future()
            future.add_done_callback(lambda f: self._ended(operation, f, running, number, finish))
        except RuntimeError as exc:
            running.ended()
            self._failed(operation, exc, number)

    def _ended(
        self,
        operation: Operation,
        future: torch.futures.Future[Any],
        running: Running,
        number: int,
        finish: Callable[[], None],
    ) -> None:
        try:
            future.value()
            if operation.claim(running):
                self._complete(operation, finish)
        except RuntimeError as exc:
            self._failed(operation, exc, number)
        finally:
            running.ended()

    def _complete(self, operation: Operation, finish: Callable[[], None]) -> None:
        try:
            finish()
        except RuntimeError as exc:
            operation.complete(exc)
            return
        operation.complete()
        self._generations.on_collective_end()
        if not self._connections.replays:
            self._operations.pop(operation.number, None)

    def _failed(self, operation: Operation, error: RuntimeError, number: int) -> None:
        if self._connections.replays and operation.name in INPUT_OF:
            self._connections.broke(str(error), number)
        else:
            operation.fail(RuntimeError(str(error)))

    @property
    def first_incomplete(self) -> int:
        """Number of the first operation that this rank has not completed."""
        incomplete = (
            number for number, operation in self._operations.items() if not operation.is_done
        )
        return min(incomplete, default=self._count + 1)

    @property
    def is_connected(self) -> bool:
        """Whether it has a connection in this generation."""
        return self._connection is not None and self._generation == self._generations.current

    @property
    def membership(self) -> GroupMembership:
        """Place of this process in the group."""
        return self._membership

    def detach(self) -> None:
        """Let no operation complete from now on before it was replayed.

        A late thread of gloo would hand out a result that the replay is writing.
        """
        for operation in list(self._operations.values()):
            operation.detach()

    def replay(self, connection: GroupConnection, first: int) -> int:
        """Repeat the operations from number `first` on over another connection.

        Returns:
            How many were repeated.

        Raises:
            RuntimeError: one of them cannot be replayed any more.
        """
        self._connection = connection
        numbers = range(first, self._count + 1)
        for number in numbers:
            if number not in self._operations or self._operations[number].name not in INPUT_OF:
                raise RuntimeError(f"operation {number} of {self.key} is not kept any more")
        for number in numbers:
            operation = self._operations[number]
            self._begin(operation, operation.arguments_again())
        return len(numbers)

    def end_step(self) -> None:
        """Drop all operations but the last: every rank has entered the last."""
        last = self._operations.get(self._count)
        self._operations = {self._count: last} if last is not None else {}

    def fail(self, error: Exception) -> None:
        """Fail every operation that has not ended: a new generation begins."""
        for operation in [*self._operations.values(), *self._transfers]:
            operation.fail(error)


class ReplayableConnections:
    """The groups of this process, and how their connections are replaced within a generation.

    Args:
        generations: the present and the announced generation.
        open_store: connects to the rendezvous store.
        report: called once for each break, with the text of the error and `number`.
        budget_s: for reconnecting and the operations that are replayed.
        replays: whether inputs are copied, so that operations can be replayed.

    Attributes:
        number: how often the connections of this generation were replaced.
        gate: held while ranks reconnect.
        on_begin: called with the name of an operation that is about to begin; what it returns is
            called as soon as that runs.
    """

    def __init__(
        self,
        generations: Generations,
        *,
        open_store: Callable[[], StoreClient],
        report: Callable[[str, int], None],
        budget_s: float,
        replays: bool,
    ) -> None:
        self.replays = replays
        self._generations = generations
        self._open_store = open_store
        self._report = report
        self._budget_s = budget_s
        self._groups: list[ReplayableProcessGroup] = []
        self._lock = threading.Lock()
        self._reported: tuple[int, int] | None = None
        self._client: StoreClient | None = None
        self.number = 0
        self.gate = threading.RLock()
        self.on_begin: Callable[[str], Callable[[], None]] = lambda _operation: lambda: None

    def add(self, group: ReplayableProcessGroup) -> None:
        """Register a new group."""
        self._groups.append(group)

    def broke(self, text: str, number: int) -> None:
        """Report that an operation failed, unless its break is known; from any thread."""
        generations = self._generations
        broken = (generations.current, number)
        with self._lock:
            is_old = number != self.number or generations.announced > generations.current
            if is_old or self._reported == broken:
                return
            self._reported = broken
        self._report(text, number)

    def end_step(self) -> None:
        """Drop what was kept for replays of this step."""
        for group in self._groups:
            group.end_step()

    def fail(self) -> None:
        """Fail all operations: a new generation is announced."""
        with self._lock:
            self.number = 0
        error = self._generations.interruption()
        for group in self._groups:
            group.fail(error)
        client = self._client
        if client is not None:
            client.abort()  # or reconnecting would wait for ranks that do not come

    def reconnect(self, generation: int, number: int) -> int:
        """Replace all connections and replay what some rank has not completed. Collective.

        Args:
            generation: the connections' generation.
            number: how often they have been replaced with this time.

        Returns:
            How many operations were replayed here.

        Raises:
            Interrupted: another generation is announced.
            RuntimeError: the budget is spent, or a new generation was announced meanwhile.
        """
        deadline_s = time.monotonic() + self._budget_s
        generations = self._generations
        generations.check_is(generation)
        connections = list(generations.connections().values())
        for connection in connections:
            connection.abort()
        _wait_idle(connections, min(deadline_s, time.monotonic() + IDLE_TIMEOUT_S))
        with self.gate:
            with self._lock:  # or fail() would have counted from 0 before this, and not after
                generations.check_is(generation)
                self.number = number
            groups = sorted((g for g in self._groups if g.is_connected), key=lambda g: g.key)
            for group in groups:
                group.detach()
            self._client = client = self._open_store()
            try:
                generations.check_is(generation)  # or nothing would have aborted this client
                return sum(self._replay(group, client, number, deadline_s) for group in groups)
            finally:
                self._client = None
                client.abort()

    def _replay(
        self, group: ReplayableProcessGroup, client: StoreClient, number: int, deadline_s: float
    ) -> int:
        rank, size = group.membership.rank, group.membership.size
        prefix = f"g{self._generations.current}/{group.key}/l{number}"
        store = PrefixStore(prefix, client.store)
        store.set(f"need/{rank}", str(group.first_incomplete))
        keys = [f"need/{peer}" for peer in range(size)]
        store.wait(keys, timedelta(seconds=max(0.001, deadline_s - time.monotonic())))
        first = min(int(text) for text in store.multi_get(keys))
        return group.replay(self._new_connection(group, client, prefix, deadline_s), first)

    def _new_connection(
        self, group: ReplayableProcessGroup, client: StoreClient, prefix: str, deadline_s: float
    ) -> GroupConnection:
        """Connect; again and again, since the network may be down for a while yet."""
        membership, generations = group.membership, self._generations
        while True:
            generations.check()
            # Ranks fail unequally often: each joins the round that is open.
            entries = PrefixStore(prefix, client.store).add("entered", 1)
            store = PrefixStore(f"{prefix}/{(entries - 1) // membership.size}", client.store)
            connection = GroupConnection(generations.backend, generations.device)
            generations.replace(group.key, connection)
            try:
                # Its operations have this limit, too; a generation that comes instead ends both.
                connection.connect(store, membership, timeout_s=generations.op_timeout_s)
            except RuntimeError:
                if time.monotonic() > deadline_s:
                    raise
            else:
                return connection


def _wait_idle(connections: Sequence[GroupConnection], until_s: float) -> None:
    """Wait for operations that were cut short: until their end they write into their tensors.

    One that waits for ever, as gloo's sometimes do, writes nothing more.
    """
    while time.monotonic() < until_s and not all(connection.is_idle for connection in connections):
        time.sleep(POLL_S)
