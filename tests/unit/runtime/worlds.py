"""Ranks whose process groups are facades: real processes, and a test that announces generations.

A program runs in every rank as `program(member, *arguments)`. What it says comes out of the
queue of the world; what it returns ends its process. What its links tell, as a session would tell
the coordinator, comes out of a queue of its own.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from tests.unit.storage.nodes import forked, pipe
from training.runtime.errors import WorkerError
from training.runtime.process_group.connections import StoreClient
from training.runtime.process_group.generations import Generations
from training.runtime.process_group.reconfigurable import install
from training.runtime.process_group.replay import ReplayableConnections, ReplayableProcessGroup

HOST = "127.0.0.1"
OP_TIMEOUT_S = 300.0  # beyond the limit of a test: what ends sooner was ended by an abort
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Promises:
    """That the facades of a world promise their results, as those over gloo do in a session."""

    keeps: bool = False
    budget_s: float = TIMEOUT_S


@dataclass(frozen=True)
class Broke:
    """What a rank tells of a link that broke."""

    number: int
    text: str


@dataclass(frozen=True)
class Reconnected:
    """What came of new links in a rank: how many operations ran again, or why there are none."""

    operations: int
    problem: str | None


@dataclass
class Member:
    """One rank, as its program sees it. Its facades are promising ones where it has `links`."""

    rank: int
    size: int
    generations: Generations
    _pipe: Any
    _links_pipe: Any
    links: ReplayableConnections | None = None
    _news: threading.Condition = field(default_factory=threading.Condition)
    _telling: threading.Lock = field(default_factory=threading.Lock)

    def say(self, word: Any) -> None:
        """Tell the test something."""
        self._pipe.send(word)

    def enter_next(self) -> int:
        """Wait for a generation to be announced, and enter it."""
        with self._news:
            assert self._news.wait_for(
                lambda: self.generations.announced > self.generations.current, TIMEOUT_S
            )
        self.generations.enter(self.generations.announced)
        return self.generations.current

    def listen(self) -> None:
        """Announce what the test says, as the thread that listens to a coordinator does."""
        while True:
            try:
                number, link = self._pipe.recv()
            except EOFError:
                os._exit(1)  # the test is gone
            if link is not None:
                threading.Thread(target=self._reconnect, args=(number, link), daemon=True).start()
                continue
            self.generations.announce(number)
            with self._news:
                self._news.notify_all()

    def tell_broken(self, text: str, number: int) -> None:
        """A link broke; from any thread."""
        with self._telling:
            self._links_pipe.send(Broke(number, text))

    def _reconnect(self, generation: int, number: int) -> None:
        assert self.links is not None
        count, problem = 0, None
        try:
            count = self.links.make_anew(generation, number)
        except (RuntimeError, WorkerError) as error:
            problem = f"{type(error).__name__}: {error}"
        with self._telling:
            self._links_pipe.send(Reconnected(count, problem))


@dataclass
class World:
    """The ranks of a test, and the store in which they find each other."""

    size: int
    promises: Promises | None = None
    store: TCPStore = field(
        default_factory=lambda: TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    )
    processes: dict[int, BaseProcess] = field(default_factory=dict)
    _pipes: dict[int, Any] = field(default_factory=dict)
    _links_pipes: dict[int, Any] = field(default_factory=dict)
    _broken: set[int] = field(default_factory=set)
    _reconnected: defaultdict[int, deque[Reconnected]] = field(
        default_factory=lambda: defaultdict(deque)
    )

    def start(
        self, program: Callable[..., Any], *arguments: Any, ranks: list[int] | None = None
    ) -> None:
        """Start ranks, all of them unless told otherwise."""
        for rank in range(self.size) if ranks is None else ranks:
            (mine, theirs), (mine_of_links, theirs_of_links) = pipe(), pipe()
            self._pipes[rank], self._links_pipes[rank] = mine, mine_of_links
            ends = (theirs, theirs_of_links)
            where = (rank, self.size, self.store.port)
            self.processes[rank] = forked(
                _take_part, program, where, ends, self.promises, arguments
            )
            for end in ends:
                end.close()

    def announce(self, generation: int, *, ranks: list[int] | None = None) -> None:
        """A generation begins, for all ranks that live unless told otherwise."""
        for rank, end in self._pipes.items():
            if self.processes[rank].is_alive() and (ranks is None or rank in ranks):
                end.send((generation, None))

    def reconnect(self, generation: int, number: int, *, ranks: list[int] | None = None) -> None:
        """Have ranks make new links under their facades, all of them unless told otherwise."""
        for rank in range(self.size) if ranks is None else ranks:
            self._pipes[rank].send((generation, number))

    def hear_broken(self, number: int) -> None:
        """Hear of any rank that the links broke that were made anew so many times.

        Gloo's operations do not always notice, so that it may be another than the one whose
        connections were shut down.
        """
        while number not in self._broken:
            self._hear_of_links()

    def hear_relinked(self, rank: int) -> Reconnected:
        """What came of new links in a rank."""
        while not self._reconnected[rank]:
            self._hear_of_links()
        return self._reconnected[rank].popleft()

    def forget_links(self) -> None:
        """A new generation counts its links anew."""
        self._broken.clear()

    def _hear_of_links(self) -> None:
        ends = {end: rank for rank, end in self._links_pipes.items()}
        ready = wait(list(ends), TIMEOUT_S)
        assert ready, "no rank tells anything of its links"
        for end in ready:
            assert isinstance(end, Connection)
            match end.recv():
                case Broke(number=number):
                    self._broken.add(number)
                case Reconnected() as word:
                    self._reconnected[ends[end]].append(word)

    def hear(self, rank: int) -> Any:
        """What a rank says next; a failure of its program is one of the test."""
        assert self._pipes[rank].poll(TIMEOUT_S), f"rank {rank} says nothing"
        word = self._pipes[rank].recv()
        assert not isinstance(word, Failed), f"rank {rank}: {word}"
        return word

    def hear_all(self) -> list[Any]:
        """Likewise, of every rank."""
        return [self.hear(rank) for rank in range(self.size)]

    def close(self) -> None:
        """End all ranks."""
        for process in self.processes.values():
            process.kill()
            process.join()


class Failed(str):
    """The traceback of a rank."""

    __slots__ = ()


def _take_part(
    program: Callable[..., Any],
    where: tuple[int, int, int],
    ends: tuple[Any, Any],
    promises: Promises | None,
    arguments: Any,
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    rank, size, port = where
    end, end_of_links = ends

    def open_store() -> StoreClient:
        return StoreClient(HOST, port)

    generations = Generations(
        rank, backend="gloo", device="cpu", op_timeout_s=OP_TIMEOUT_S, open_store=open_store
    )
    member = Member(rank, size, generations, end, end_of_links)
    if promises is None:
        install(generations, world_size=size)
    else:
        member.links = links = ReplayableConnections(
            generations,
            open_store=open_store,
            tell=member.tell_broken,
            budget_s=promises.budget_s,
            keeps=promises.keeps,
        )
        generations.on_announced = links.fail
        new_group = partial(ReplayableProcessGroup, generations, links)
        install(generations, world_size=size, new_group=new_group)
    threading.Thread(target=member.listen, daemon=True).start()
    try:
        end.send(program(member, *arguments))
    except BaseException:  # noqa: BLE001 told to the test, whatever it is
        end.send(Failed(traceback.format_exc()))
    os._exit(0)
