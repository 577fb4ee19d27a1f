"""The generations of the process groups in this process, and the connections of the current one.

Recovery begins a new generation; everything that waits in the one before fails.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch._C._distributed_c10d import PrefixStore

from training.runtime.errors import Interrupted
from training.runtime.process_group.connections import Connection, StoreClient, shut_down

GIVEN_UP = sys.maxsize  # as a generation: there will be none


class Generations:
    """Which generation of the groups this process is in, and which one is announced.

    Args:
        rank: global rank.
        backend: collective library inside the facades.
        device: type of device of the tensors.
        op_timeout_s: limit of one collective.
        open_store: connects to the rendezvous store.
        on_collective: called with its name when one begins.
        on_collective_end: called at its end; from any thread, and only where the host sees it
            (gloo).
        on_transfer: called with its name when a transfer between two ranks begins.

    Attributes:
        on_announced: called when a newer generation is announced.
        current: generation that this process takes part in, 0 before the first.
        announced: newest one that the coordinator has announced.
        is_alone: collectives return at once, as if every rank had brought the same: while a
            process that joins later builds what the others have built together.
    """

    def __init__(
        self,
        rank: int,
        *,
        backend: str,
        device: str,
        op_timeout_s: float,
        open_store: Callable[[], StoreClient],
        on_collective: Callable[[str], None] = lambda _name: None,
        on_collective_end: Callable[[], None] = lambda: None,
        on_transfer: Callable[[str], None] = lambda _name: None,
    ) -> None:
        self.rank = rank
        self.backend = backend
        self.device = device
        self.op_timeout_s = op_timeout_s
        self.on_collective = on_collective
        self.on_collective_end = on_collective_end
        self.on_transfer = on_transfer
        self.on_announced: Callable[[], None] = lambda: None
        self.current = 0
        self.announced = 0
        self.is_alone = False
        self._open_store = open_store
        self._client: StoreClient | None = None
        self._connections: dict[str, Connection] = {}
        self._retired: list[Connection] = []
        self._lock = threading.Lock()

    def announce(self, generation: int) -> None:
        """Make everything that waits in the current generation fail; from any thread."""
        with self._lock:
            if generation <= self.announced:
                return
            self.announced = generation
            connections, client = list(self._connections.values()), self._client
        problems = []
        for connection in connections:
            try:
                connection.abort()
            except RuntimeError as exc:  # of a backend's own abort; the others are aborted, too
                problems.append(exc)
        if client is not None:
            client.abort()
        self.on_announced()
        if problems:
            raise problems[0]

    def enter(self, generation: int) -> None:
        """Leave the connections of the generation before.

        Raises:
            Interrupted: a newer one is announced.
        """
        client = self._open_store()
        with self._lock:
            # The destructor of a connection waits for its operations, and some of them never end.
            before = (*self._retired, *self._connections.values())
            self._retired = [one for one in before if not one.is_idle]
            self._connections = {}
            self._client = client
            self.current = generation
        self.check()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let collectives return at once, without the other ranks."""
        before, self.is_alone = self.is_alone, True
        try:
            yield
        finally:
            self.is_alone = before

    def check(self) -> None:
        """Raise when a newer generation is announced.

        Raises:
            Interrupted: with its number.
        """
        if self.announced > self.current:
            raise self.interruption()

    def check_is(self, generation: int) -> None:
        """Raise when this is not the generation that this process is in.

        Raises:
            Interrupted: with the one that is announced.
        """
        if generation != self.current or self.announced > generation:
            raise self.interruption()

    def interruption(self) -> Interrupted:
        """The error of everything that waits in the current generation."""
        if self.announced == GIVEN_UP:
            return Interrupted("the attempt is given up")
        return Interrupted(f"generation {self.announced} is announced")

    def connection(self, name: str, *, rank: int, size: int) -> Connection:
        """The connection of a group, made when there is none yet; collective in that case.

        Raises:
            Interrupted: a newer generation is announced.
            RuntimeError: a rank did not come.
        """
        self.check()
        with self._lock:
            connection, client = self._connections.get(name), self._client
            if connection is None:
                connection = self._connections[name] = Connection(self.backend, self.device)
        if connection.group is not None:
            return connection
        assert client is not None  # noqa: S101 enter() comes first
        store = PrefixStore(f"g{self.current}/{name}", client.store)
        connection.connect(store, rank=rank, size=size, timeout_s=self.op_timeout_s)
        if self.announced > self.current:
            connection.abort()
        self.check()
        return connection

    def replace(self, name: str, connection: Connection) -> None:
        """Give a group another connection, which is aborted with the others."""
        with self._lock:
            self._retired.append(self._connections[name])
            self._connections[name] = connection

    def connections(self) -> dict[str, Connection]:
        """The connections of this generation, by the name of their group."""
        with self._lock:
            return dict(self._connections)

    def break_connections(self) -> None:
        """Shut down the sockets of this generation, as a fault of the network does."""
        for connection in self.connections().values():
            shut_down(connection.sockets)
