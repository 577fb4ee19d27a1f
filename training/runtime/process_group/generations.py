"""The lives of the process groups in this process, and the links inside each.

A generation is one life: recovery begins a new one, and what waits in the one before fails.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from training.runtime.errors import Interrupted
from training.runtime.process_group.connections import Link, StoreClient

GIVEN_UP = sys.maxsize  # as a generation: the attempt has none any more


class Generations:
    """Which life of the groups this process is in, and which one is announced.

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
        is_alone: collectives answer without the others, as if every rank had brought the same:
            while a process that joins later builds what the others have built together.
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
        self._links: dict[str, Link] = {}
        self._lost: list[Link] = []
        self._lock = threading.Lock()

    def announce(self, generation: int) -> None:
        """A newer generation is there: whatever waits in the present one fails. Any thread."""
        with self._lock:
            if generation <= self.announced:
                return
            self.announced = generation
            links, client = list(self._links.values()), self._client
        problems = []
        for link in links:
            try:
                link.abort()
            except RuntimeError as exc:  # what a backend's own abort raises; the others are cut
                problems.append(exc)
        if client is not None:
            client.abort()
        self.on_announced()
        if problems:
            raise problems[0]

    def enter(self, generation: int) -> None:
        """Leave the old links behind.

        Raises:
            Interrupted: a newer one is announced.
        """
        client = self._open_store()
        with self._lock:
            # A link whose operations do not end would never be destroyed, and whoever let go of
            # it would wait for that.
            self._lost = [one for one in (*self._lost, *self._links.values()) if not one.is_idle]
            self._links = {}
            self._client = client
            self.current = generation
        self.check()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Collectives answer without the others while this lasts."""
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
        """What those that wait in the present generation are told."""
        if self.announced == GIVEN_UP:
            return Interrupted("the attempt is given up")
        return Interrupted(f"generation {self.announced} is announced")

    def link(self, name: str, *, rank: int, size: int) -> dist.ProcessGroup:
        """The inside of a facade, connected when it was not yet; collective in that case.

        Raises:
            Interrupted: a newer generation is announced.
            RuntimeError: somebody did not come.
        """
        self.check()
        with self._lock:
            link, client = self._links.get(name), self._client
            if link is None:
                link = self._links[name] = Link(self.backend, self.device)
        if link.group is not None:
            return link.group
        assert client is not None  # noqa: S101 enter() comes first
        store = PrefixStore(f"g{self.current}/{name}", client.store)
        group = link.connect(store, rank=rank, size=size, timeout_s=self.op_timeout_s)
        if self.announced > self.current:
            link.abort()
        self.check()
        return group

    def replace(self, name: str, link: Link) -> None:
        """Put another link under a facade, to be aborted with the others."""
        with self._lock:
            self._lost.append(self._links[name])
            self._links[name] = link

    def links(self) -> dict[str, Link]:
        """The links of this generation, by the name of their facade."""
        with self._lock:
            return dict(self._links)
