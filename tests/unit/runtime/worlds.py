"""Ranks whose process groups are facades: real processes, and a test that announces generations.

A program runs in every rank as `program(member, *arguments)`. What it says comes out of the
queue of the world; what it returns ends its process.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from tests.unit.storage.nodes import forked, pipe
from training.runtime.generations import Generations
from training.runtime.groups import install
from training.runtime.links import StoreClient

HOST = "127.0.0.1"
OP_TIMEOUT_S = 300.0  # beyond the limit of a test: what ends sooner was ended by an abort
TIMEOUT_S = 60.0


@dataclass
class Member:
    """One rank, as its program sees it."""

    rank: int
    size: int
    generations: Generations
    _pipe: Any
    _news: threading.Condition = field(default_factory=threading.Condition)

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
                number = self._pipe.recv()
            except EOFError:
                os._exit(1)  # the test is gone
            self.generations.announce(number)
            with self._news:
                self._news.notify_all()


@dataclass
class World:
    """The ranks of a test, and the store in which they find each other."""

    size: int
    store: TCPStore = field(
        default_factory=lambda: TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    )
    processes: dict[int, BaseProcess] = field(default_factory=dict)
    _pipes: dict[int, Any] = field(default_factory=dict)

    def start(
        self, program: Callable[..., Any], *arguments: Any, ranks: list[int] | None = None
    ) -> None:
        """Start ranks, all of them unless told otherwise."""
        for rank in range(self.size) if ranks is None else ranks:
            mine, theirs = pipe()
            self._pipes[rank] = mine
            self.processes[rank] = forked(
                _take_part, program, rank, self.size, self.store.port, theirs, arguments
            )
            theirs.close()

    def announce(self, generation: int, *, ranks: list[int] | None = None) -> None:
        """A generation begins, for all ranks that live unless told otherwise."""
        for rank, end in self._pipes.items():
            if self.processes[rank].is_alive() and (ranks is None or rank in ranks):
                end.send(generation)

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
    program: Callable[..., Any], rank: int, size: int, port: int, end: Any, arguments: Any
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    generations = Generations(
        rank,
        backend="gloo",
        device="cpu",
        op_timeout_s=OP_TIMEOUT_S,
        open_store=lambda: StoreClient(HOST, port),
    )
    install(generations, world_size=size)
    member = Member(rank, size, generations, end)
    threading.Thread(target=member.listen, daemon=True).start()
    try:
        end.send(program(member, *arguments))
    except BaseException:  # noqa: BLE001 told to the test, whatever it is
        end.send(Failed(traceback.format_exc()))
    os._exit(0)
