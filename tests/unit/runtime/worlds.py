"""Ranks with reconfigurable process groups: real processes, and a test that announces generations.

A program runs in every rank as `program(member, *arguments)`. The world receives what it sends;
what it returns ends its process. What its connections report, as a session would report it to the
coordinator, comes over a pipe of its own.
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
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from perdure.training.recovery.protocol import Reconnected
from perdure.training.runtime.errors import WorkerError
from perdure.training.runtime.process_group.generations import Generations, StoreClient
from perdure.training.runtime.process_group.reconfigurable import install
from perdure.training.runtime.process_group.replay import (
    ReplayableConnections,
    ReplayableProcessGroup,
)
from tests.unit.storage.nodes import forked, pipe
from tests.waiting import BEYOND_A_TEST_S

HOST = "127.0.0.1"
CPU = torch.device("cpu")
OP_TIMEOUT_S = BEYOND_A_TEST_S
TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Replay:
    """That the groups of a world are replayable ones, as those over gloo are in a session."""

    is_on: bool = False
    budget_s: float = TIMEOUT_S


@dataclass
class Member:
    """One rank, as its program sees it. Its groups are replayable where it has `connections`."""

    rank: int
    size: int
    generations: Generations
    _pipe: Any
    _reports_pipe: Any
    connections: ReplayableConnections | None = None
    _announced: threading.Condition = field(default_factory=threading.Condition)
    _reporting: threading.Lock = field(default_factory=threading.Lock)
    _reconnects: list[threading.Thread] = field(default_factory=list)

    def await_reports(self) -> None:
        """Wait until what was reconnected is reported: the process may be done a moment before."""
        for thread in self._reconnects:
            thread.join(TIMEOUT_S)

    def send(self, message: Any) -> None:
        """Send the test something."""
        self._pipe.send(message)

    def enter_next(self) -> int:
        """Wait for a generation to be announced, and enter it."""
        with self._announced:
            assert self._announced.wait_for(
                lambda: self.generations.announced > self.generations.current, TIMEOUT_S
            )
        self.generations.enter(self.generations.announced)
        return self.generations.current

    def listen(self) -> None:
        """Announce what the test sends, as the thread that listens to a coordinator does."""
        while True:
            try:
                number, connection = self._pipe.recv()
            except EOFError:
                os._exit(1)  # the test is gone
            if connection is not None:
                thread = threading.Thread(
                    target=self._reconnect, args=(number, connection), daemon=True
                )
                self._reconnects.append(thread)
                thread.start()
                continue
            self.generations.announce(number)
            with self._announced:
                self._announced.notify_all()

    def report_broken(self, _text: str, number: int) -> None:
        """A connection broke, replaced so often before; from any thread."""
        with self._reporting:
            self._reports_pipe.send(number)

    def _reconnect(self, generation: int, number: int) -> None:
        assert self.connections is not None
        count, problem = 0, None
        try:
            count = self.connections.reconnect(generation, number)
        except (RuntimeError, WorkerError) as error:
            problem = f"{type(error).__name__}: {error}"
        with self._reporting:
            self._reports_pipe.send(
                Reconnected(
                    generation=generation, connection=number, operations=count, problem=problem
                )
            )


@dataclass
class World:
    """The ranks of a test, and the store in which they find each other."""

    size: int
    replay: Replay | None = None
    store: TCPStore = field(
        default_factory=lambda: TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    )
    processes: dict[int, BaseProcess] = field(default_factory=dict)
    _pipes: dict[int, Any] = field(default_factory=dict)
    _reports_pipes: dict[int, Any] = field(default_factory=dict)
    _broken: set[int] = field(default_factory=set)
    _reconnected: defaultdict[int, deque[Reconnected]] = field(
        default_factory=lambda: defaultdict(deque)
    )

    def start(
        self, program: Callable[..., Any], *arguments: Any, ranks: list[int] | None = None
    ) -> None:
        """Start these ranks, by default all of them."""
        for rank in range(self.size) if ranks is None else ranks:
            (mine, theirs), (mine_of_links, theirs_of_links) = pipe(), pipe()
            self._pipes[rank], self._reports_pipes[rank] = mine, mine_of_links
            ends = (theirs, theirs_of_links)
            where = (rank, self.size, self.store.port)
            self.processes[rank] = forked(_take_part, program, where, ends, self.replay, arguments)
            for end in ends:
                end.close()

    def announce(self, generation: int, *, ranks: list[int] | None = None) -> None:
        """Announce a generation to these ranks, by default to all that live."""
        for rank, end in self._pipes.items():
            if self.processes[rank].is_alive() and (ranks is None or rank in ranks):
                end.send((generation, None))

    def reconnect(self, generation: int, number: int, *, ranks: list[int] | None = None) -> None:
        """Have these ranks reconnect, by default all of them."""
        for rank in range(self.size) if ranks is None else ranks:
            self._pipes[rank].send((generation, number))

    def receive_broken(self, number: int) -> None:
        """Wait until a rank reports that its connections, replaced so often before, broke.

        Gloo's operations do not always notice, so that it may be another than the one whose
        connections were shut down.
        """
        while number not in self._broken:
            self._receive_reports()

    def reconnected(self, rank: int) -> Reconnected:
        """How a rank has reconnected."""
        while not self._reconnected[rank]:
            self._receive_reports()
        return self._reconnected[rank].popleft()

    def forget_breaks(self) -> None:
        """Count from 0 again, as a new generation does."""
        self._broken.clear()

    def _receive_reports(self) -> None:
        ends = {end: rank for rank, end in self._reports_pipes.items()}
        ready = wait(list(ends), TIMEOUT_S)
        assert ready, "no rank reports anything"
        for end in ready:
            assert isinstance(end, Connection)
            match end.recv():
                case int(number):
                    self._broken.add(number)
                case Reconnected() as report:
                    self._reconnected[ends[end]].append(report)

    def receive(self, rank: int) -> Any:
        """What a rank sends next; a failure of its program is one of the test."""
        assert self._pipes[rank].poll(TIMEOUT_S), f"rank {rank} sends nothing"
        message = self._pipes[rank].recv()
        assert not isinstance(message, Failed), f"rank {rank}: {message}"
        return message

    def receive_all(self) -> list[Any]:
        """Likewise, of every rank."""
        return [self.receive(rank) for rank in range(self.size)]

    def close(self) -> None:
        """End all ranks."""
        for process in self.processes.values():
            process.kill()
            process.join()


def summed(member: Member, group: dist.ProcessGroup | None = None) -> float:
    """The sum over the ranks of a group of their numbers from 1."""
    tensor = torch.tensor([member.rank + 1.0])
    dist.all_reduce(tensor, group=group)
    return float(tensor)


class Failed(str):
    """The traceback of a rank."""

    __slots__ = ()


def _take_part(
    program: Callable[..., Any],
    where: tuple[int, int, int],
    ends: tuple[Any, Any],
    replay: Replay | None,
    arguments: Any,
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    rank, size, port = where
    end, end_of_links = ends

    def open_store() -> StoreClient:
        return StoreClient(HOST, port)

    generations = Generations(rank, device=CPU, op_timeout_s=OP_TIMEOUT_S, open_store=open_store)
    member = Member(rank, size, generations, end, end_of_links)
    if replay is None:
        install(generations, world_size=size)
    else:
        member.connections = connections = ReplayableConnections(
            generations,
            open_store=open_store,
            report=member.report_broken,
            budget_s=replay.budget_s,
            replays=replay.is_on,
        )
        generations.on_announced = connections.fail
        new_group = partial(ReplayableProcessGroup, generations, connections)
        install(generations, world_size=size, new_group=new_group)
    threading.Thread(target=member.listen, daemon=True).start()
    try:
        end.send(program(member, *arguments))
    except BaseException:  # noqa: BLE001 whatever it is, the test reports it
        end.send(Failed(traceback.format_exc()))
    member.await_reports()
    os._exit(0)
