"""The generations of the process groups in this process, and the connections of the current one.

Recovery begins a new generation; everything that waits in the previous one fails.

Gloo and the store's client have no abort. Their sockets are shut down instead, found as those
that were opened with the group: every operation on them fails at once, in whatever thread it
waits. Listening sockets are left alone, since gloo ends the process when its accept() fails. NCCL
has an abort of its own; HCCL's operations end when the device's tasks are aborted. Written against
torch 2.13 and torch_npu 2.13; times are seconds.
"""

from __future__ import annotations

import datetime as dt
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from perdure.training.device import ENDED_BY_THE_DEVICE, abort_group, backend_of, open_group
from perdure.training.runtime.errors import GIVEN_UP, Interrupted
from perdure.training.runtime.process_group.operations import Running

GLOO = "gloo"
STORE_TIMEOUT_S = 36_000.0
_ABORTED = "the connection was aborted while it was established"

Sockets = Mapping[int, str]  # descriptor: what /proc says it is


def open_sockets() -> Sockets:
    """List the sockets of this process."""
    sockets: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 the names alone, and fast
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115 as above
            if target.startswith("socket:"):
                sockets[int(name)] = target
    return sockets


def new_sockets(previous: Sockets) -> Sockets:
    """List the sockets that were opened since `previous`."""
    return {fd: target for fd, target in open_sockets().items() if previous.get(fd) != target}


def shut_down(sockets: Sockets) -> int:
    """Break the TCP connections among these sockets for good; returns how many there were."""
    count = 0
    for descriptor, target in sockets.items():
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") != target:  # noqa: PTH115
                continue  # closed, and another file has its number
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


@dataclass(frozen=True, slots=True)
class GroupMembership:
    """The place of this process in a group.

    Attributes:
        name: the group's name.
        rank: in it.
        size: number of its ranks.
        ranks: their global ranks; empty: all of them.
    """

    name: str
    rank: int
    size: int
    ranks: tuple[int, ...] = ()


class GroupConnection:
    """One connected group, or the attempt to connect it.

    Args:
        backend: name of the collective library.
        device: where the tensors are.

    Attributes:
        running: the operations on it.
    """

    def __init__(self, backend: str, device: torch.device) -> None:
        self._backend = backend
        self._device = device
        self._lock = threading.Lock()
        self._previous_sockets: Sockets = {}
        self._sockets: Sockets = {}
        self._is_aborted = False
        self._is_connecting = False
        self._collectives: Any = None
        self.running = Running()
        self._outcomes: SimpleQueue[dist.ProcessGroup | Exception] = SimpleQueue()
        self.group: dist.ProcessGroup | None = None

    def connect(
        self, store: Store, membership: GroupMembership, *, timeout_s: float
    ) -> dist.ProcessGroup:
        """Connect to the other ranks; collective.

        Raises:
            RuntimeError: it was aborted meanwhile, or a rank did not come.
        """
        with self._lock:
            if self._is_aborted:
                raise RuntimeError(_ABORTED)
            self._previous_sockets, self._is_connecting = open_sockets(), True
        make = partial(_make, self._backend, self._device, store, membership, timeout_s)
        if self._is_left_behind:
            # Gloo's constructor waits for the connection of a peer that may have died since it
            # published its address: there is no socket yet that could be shut down. So does
            # HcclCommInitRootInfo, for HCCL_CONNECT_TIMEOUT, which is two minutes at least. An
            # abort leaves the thread behind, which ends with the timeout.
            threading.Thread(target=self._connect, args=(make,), daemon=True).start()
        else:
            self._connect(make)
        outcome = self._outcomes.get()
        if isinstance(outcome, Exception):
            raise outcome
        with self._lock:
            self.group = outcome
        if self._is_aborted:
            self.abort()
            raise RuntimeError(_ABORTED)
        return outcome

    def _connect(self, make: Callable[[], tuple[dist.ProcessGroup, Any]]) -> None:
        outcome: dist.ProcessGroup | Exception
        try:
            outcome, self._collectives = make()
        except Exception as exc:  # noqa: BLE001 raised again in connect()
            outcome = exc
        with self._lock:
            self._is_connecting = False
            if not self._is_aborted:
                self._sockets = new_sockets(self._previous_sockets)
        self._outcomes.put(outcome)

    @property
    def _is_left_behind(self) -> bool:
        """Whether an abort leaves a thread that connects to itself."""
        return self._backend == GLOO or self._backend in ENDED_BY_THE_DEVICE

    def abort(self) -> None:
        """Make everything that waits in it fail; from any thread.

        Operations of HCCL end with the device's tasks, which the caller has to abort, too.
        """
        with self._lock:
            self._is_aborted = True
            if self._is_connecting:
                self._sockets = new_sockets(self._previous_sockets)
            sockets = self._sockets
        if self._backend == GLOO:
            shut_down(sockets)
        elif self._collectives is not None:
            abort_group(self._collectives)
        if self._is_left_behind:
            self._outcomes.put(RuntimeError(_ABORTED))

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs on it: gloo's destructor waits for its operations."""
        return self.running.is_none and not self._is_connecting

    @property
    def sockets(self) -> Sockets:
        """Its sockets, where the backend has any that can be seen."""
        return self._sockets


class StoreClient:
    """A client of the rendezvous store that can be aborted."""

    def __init__(self, host: str, port: int) -> None:
        previous_sockets = open_sockets()
        self.store: Store = TCPStore(
            host,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=dt.timedelta(seconds=STORE_TIMEOUT_S),
        )
        self._sockets = new_sockets(previous_sockets)

    def abort(self) -> None:
        """Make every call on it fail; from any thread."""
        shut_down(self._sockets)


def _make(
    backend: str, device: torch.device, store: Store, membership: GroupMembership, timeout_s: float
) -> tuple[dist.ProcessGroup, Any]:
    timeout = dt.timedelta(seconds=timeout_s)
    rank, size = membership.rank, membership.size
    group = dist.ProcessGroup(store, rank, size)
    if backend == GLOO:
        kind = dist.ProcessGroup.BackendType.GLOO
        collectives: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        collectives._set_sequence_number_for_group()  # noqa: SLF001 as torch's own helper does
    elif backend == "nccl":
        kind = dist.ProcessGroup.BackendType.NCCL
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout  # noqa: SLF001 as torch's own helper does
        collectives = dist.ProcessGroupNCCL(store, rank, size, options)
        collectives._set_sequence_number_for_group()  # noqa: SLF001
    else:
        kind = dist.ProcessGroup.BackendType.CUSTOM
        collectives = _plugin(backend, store, membership, timeout)
    group._set_default_backend(kind)  # noqa: SLF001
    group._register_backend(torch.device(device.type), kind, collectives)  # noqa: SLF001
    if backend in ENDED_BY_THE_DEVICE:
        open_group(group, collectives, device)
    return group, collectives


def _plugin(backend: str, store: Store, membership: GroupMembership, timeout: dt.timedelta) -> Any:
    """Make a backend that another library registered: HCCL of torch_npu."""
    plugin = dist.Backend._plugins[backend.upper()]  # noqa: SLF001 there is no public way
    if not plugin.extended_api:
        return plugin.creator_fn(store, membership.rank, membership.size, timeout)
    options = torch._C._distributed_c10d._DistributedBackendOptions()  # noqa: SLF001
    options.store, options.timeout = store, timeout
    options.group_rank, options.group_size = membership.rank, membership.size
    # Without ranks ProcessGroupHCCL takes a group for that of all, and its rank for the one in a
    # rank table (createHCCLCommEx).
    options.group_id, options.global_ranks_in_group = membership.name, list(membership.ranks)
    return plugin.creator_fn(options, None)


class Generations:
    """Generation of the groups that this process is in, and the announced generation.

    Args:
        rank: global rank.
        device: where the tensors are; its collective library is inside the facades.
        op_timeout_s: limit of one collective.
        open_store: connects to the rendezvous store.
        on_collective: called with its name when a collective begins.
        on_collective_end: called at its end; from any thread, and only where the host sees it
            (gloo).
        on_transfer: called with its name when a transfer between two ranks begins.
        stop_device: aborts the tasks of the device; called when a newer generation is announced,
            where the backend's operations end in no other way.

    Attributes:
        on_announced: called when a newer generation is announced.
        current: generation that this process takes part in, 0 before the first.
        announced: newest generation that the coordinator has announced.
        is_alone: collectives return at once, as if every rank had brought the same: while a
            process that joins later builds what the others have built together.
    """

    def __init__(
        self,
        rank: int,
        *,
        device: torch.device,
        op_timeout_s: float,
        open_store: Callable[[], StoreClient],
        on_collective: Callable[[str], None] = lambda _name: None,
        on_collective_end: Callable[[], None] = lambda: None,
        on_transfer: Callable[[str], None] = lambda _name: None,
        stop_device: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank = rank
        self.backend = backend_of(device)
        self.device = device
        self.op_timeout_s = op_timeout_s
        self.on_collective = on_collective
        self.on_collective_end = on_collective_end
        self.on_transfer = on_transfer
        self._stop_device = stop_device
        self.on_announced: Callable[[], None] = lambda: None
        self.current = 0
        self.announced = 0
        self.is_alone = False
        self._open_store = open_store
        self._client: StoreClient | None = None
        self._connections: dict[str, GroupConnection] = {}
        self._retired: list[GroupConnection] = []
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
        # Before the first generation nothing runs yet, and nothing would start the device again.
        if self.backend in ENDED_BY_THE_DEVICE and self.current:
            try:
                self._stop_device()
            except RuntimeError as exc:
                problems.append(exc)
        if client is not None:
            client.abort()
        self.on_announced()
        if problems:
            raise problems[0]

    def enter(self, generation: int) -> None:
        """Leave the connections of the generation before.

        Raises:
            Interrupted: a newer generation is announced.
        """
        client = self._open_store()
        with self._lock:
            self._retired = [*self._retired, *self._connections.values()]
            self._connections = {}
            self._client = client
            self.current = generation
        if self.backend not in ENDED_BY_THE_DEVICE:
            self.release_retired()
        self.check()

    def release_retired(self) -> None:
        """Forget the connections of former generations; of HCCL once the device works again.

        The destructor of a connection waits for its operations, and some of them never end: those
        connections are kept.
        """
        with self._lock:
            retired = self._retired
            self._retired = [connection for connection in retired if not connection.is_idle]

    @contextmanager
    def alone(self, *, is_alone: bool = True) -> Iterator[None]:
        """Let collectives return at once, without the other ranks; or, within that, with them."""
        was_alone, self.is_alone = self.is_alone, is_alone
        try:
            yield
        finally:
            self.is_alone = was_alone

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
            Interrupted: with the announced generation.
        """
        if generation != self.current or self.announced > generation:
            raise self.interruption()

    def interruption(self) -> Interrupted:
        """Return the error for everything that waits in the current generation."""
        if self.announced == GIVEN_UP:
            return Interrupted("the attempt is given up")
        return Interrupted(f"generation {self.announced} is announced")

    def connection(self, membership: GroupMembership) -> GroupConnection:
        """Return the connection of a group; connect if there is none yet, which is collective.

        Raises:
            Interrupted: a newer generation is announced.
            RuntimeError: a rank did not come.
        """
        self.check()
        with self._lock:
            connection = self._connections.get(membership.name)
            if connection is None:
                connection = GroupConnection(self.backend, self.device)
                self._connections[membership.name] = connection
        if connection.group is not None:
            return connection
        store = self.open_prefix(membership.name)
        connection.connect(store, membership, timeout_s=self.op_timeout_s)
        if self.announced > self.current:
            connection.abort()
        self.check()
        return connection

    def open_prefix(self, name: str) -> Store:
        """Return a part of the rendezvous store that only this generation has."""
        assert self._client is not None  # noqa: S101 enter() comes first
        return PrefixStore(f"g{self.current}/{name}", self._client.store)

    def replace(self, name: str, connection: GroupConnection) -> None:
        """Give a group another connection, which is aborted with the others."""
        with self._lock:
            self._retired.append(self._connections[name])
            self._connections[name] = connection

    def connections(self) -> dict[str, GroupConnection]:
        """Return the connections of this generation, by the name of their group."""
        with self._lock:
            return dict(self._connections)

    def break_connections(self) -> None:
        """Shut down the sockets of this generation, as a fault of the network does."""
        for connection in self.connections().values():
            shut_down(connection.sockets)
