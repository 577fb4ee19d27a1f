"""A worker's connection to the coordinator of its attempt.

A thread listens: a new generation cuts the connections under the collective that the training
thread waits in. A worker that loses its coordinator ends, for it would not learn any more that it
has been replaced (fencing). Times are seconds.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from perdure.training.diagnosis.exits import EXIT_RESTART_ME
from perdure.training.recovery.protocol import (
    Gathered,
    GiveUp,
    NewGeneration,
    Paused,
    PauseRequest,
    Plan,
    Reconnect,
)
from perdure.training.recovery.repair import RepairPlan
from perdure.training.recovery.replicas import ParallelLayout
from perdure.training.runtime.errors import GIVEN_UP, GivenUp, Interrupted
from perdure.training.wire.coordinator import (
    TO_MEMBER,
    CoordinatorAddress,
    Gather,
    WorkerJoined,
    pack_document,
    unpack_document,
)
from perdure.training.wire.transport import Connection

_log = logging.getLogger("perdure.runtime")

CONNECT_TIMEOUT_S = 60.0
REJOIN_TIMEOUT_S = 5.0  # of a try
BEAT_S = 1.0
MOVED_POLL_S = 0.1


class CoordinatorClient(Connection):
    """A worker's side of the connection.

    Args:
        address_file: where the agent writes the coordinator's address.
        rank: global rank.
        layout: the program's layout; None: the job's.
        on_generation: called by the listening thread with the number of a new generation.
        on_wait: called now and then while the training thread waits for the coordinator.

    Attributes:
        layout: the program's layout, for a coordinator that comes later; None: the job's.
        pause_wanted: all ranks are to pause.
        on_reconnect: called in a thread of its own when connections are to be re-established.
        on_moved: called with its new address when the coordinator is on another node.
    """

    def __init__(
        self,
        address_file: Path,
        *,
        rank: int,
        on_generation: Callable[[int], None],
        on_wait: Callable[[], None],
        layout: ParallelLayout | None = None,
        rejoin_s: float = 0.0,
        on_moved: Callable[[CoordinatorAddress], None] = lambda _address: None,
    ) -> None:
        self._address_file = address_file
        self._rank, self.layout = rank, layout
        self._rejoin_s = rejoin_s
        self._on_moved = on_moved
        self._on_generation = on_generation
        self._on_wait = on_wait
        self._news = threading.Condition()
        self._generation = 0
        self._plans: dict[int, RepairPlan] = {}
        self._given_up: str | None = None
        self.pause_wanted = False
        self._num_pause_requests = 0
        self._num_gathered = 0
        self._gathered: dict[int, tuple[str, ...]] = {}
        self.on_reconnect: Callable[[int, int], None] = lambda _generation, _link: None
        self._address = self._read_address()
        joined = self._joined(self._address)
        address = self._address
        super().__init__(address.host, address.port, joined, timeout_s=CONNECT_TIMEOUT_S)
        if rejoin_s:
            threading.Thread(target=self._follow, daemon=True, name="coordinator").start()

    def _read_address(self) -> CoordinatorAddress:
        text = self._address_file.read_text(encoding="utf-8")
        return CoordinatorAddress.model_validate_json(text)

    def _joined(self, address: CoordinatorAddress) -> WorkerJoined:
        token = SecretStr(address.token)
        return WorkerJoined(token=token, rank=self._rank, pid=os.getpid(), layout=self.layout)

    def _follow(self) -> None:
        """Go over to a coordinator on another node, whose address the agent writes."""
        written, wanted = 0, self._address
        while not self.is_closed:
            time.sleep(MOVED_POLL_S)
            now = self._address_file.stat().st_mtime_ns
            if now != written:
                written, wanted = now, self._read_address()
            if wanted == self._address:
                continue
            # First this: what the connection brings opens others to the store there.
            self._on_moved(wanted)
            joined = self._joined(wanted)
            try:
                self.connect(wanted.host, wanted.port, joined, timeout_s=REJOIN_TIMEOUT_S)
            except OSError as exc:
                _log.info(f"the coordinator at {wanted.host} cannot be reached: {exc}")
            else:
                self._address = wanted

    def newer_than(self, generation: int) -> int:
        """Wait for a generation after this one.

        Raises:
            GivenUp: there will be none.
        """
        self._wait(lambda: self._generation > generation)
        return self._generation

    def plan_for(self, generation: int) -> RepairPlan:
        """Wait for what is to be done in a generation.

        Raises:
            Interrupted: a newer generation came instead.
            GivenUp: there will be none.
        """
        self._wait(lambda: generation in self._plans or self._generation > generation)
        if self._generation > generation:
            raise Interrupted(f"generation {self._generation} is announced")
        return self._plans[generation]

    def pause(self, generation: int, *, step: int, until: Callable[[], bool]) -> None:
        """Report that this rank has paused at a step, and wait until the pause is over.

        The ranks have agreed to pause; whether that is still wanted the coordinator answers.

        Raises:
            Interrupted: a generation after this one came.
            GivenUp: the attempt ends.
        """
        with self._news:
            num_previous = self._num_pause_requests
        self.send(Paused(step=step, is_paused=True))
        self._wait(
            lambda: (
                (self._num_pause_requests > num_previous and not self.pause_wanted)
                or self._generation > generation
                or until()
            )
        )
        if self._generation > generation:
            raise Interrupted(f"generation {self._generation} is announced")

    def gather(self, document: Any) -> list[Any]:
        """Gather a JSON document of every rank, by rank, through the coordinator. Collective.

        After the first generation was announced.

        Raises:
            GivenUp: the attempt ends.
            Interrupted: the coordinator has announced a generation that this rank cannot join.
        """
        self._num_gathered += 1
        number, generation = self._num_gathered, self._generation
        self.send(Gather(number=number, document=pack_document(document)))
        self._wait(lambda: number in self._gathered or self._generation > generation)
        if number not in self._gathered:
            raise Interrupted(f"generation {self._generation} is announced")
        return [unpack_document(text) for text in self._gathered.pop(number)]

    def _wait(self, is_over: Callable[[], bool]) -> None:
        with self._news:
            while not is_over():
                if self._given_up is not None:
                    raise GivenUp(self._given_up)
                self._news.wait(BEAT_S)
                self._on_wait()

    def receive(self, line: bytes) -> None:
        """Take an order in, and wake the training thread."""
        message = TO_MEMBER.validate_json(line)
        if isinstance(message, NewGeneration):
            # First the connections, or a waiting thread would find the old ones.
            self._on_generation(message.number)
        if isinstance(message, Reconnect):
            # Not here: this thread has to receive a generation that ends the attempt at it.
            arguments = (message.generation, message.connection)
            threading.Thread(target=self.on_reconnect, args=arguments, daemon=True).start()
        with self._news:
            match message:
                case NewGeneration():
                    self._generation = max(self._generation, message.number)
                case Plan():
                    self._plans = {message.generation: message.plan}
                case PauseRequest():
                    self.pause_wanted = message.wanted
                    self._num_pause_requests += 1
                case GiveUp():
                    self._given_up = message.why
                case Gathered():
                    self._gathered[message.number] = message.documents
            self._news.notify_all()
        if isinstance(message, GiveUp):
            # The collective in which the training thread waits will never end.
            self._on_generation(GIVEN_UP)

    @property
    def _is_needed(self) -> bool:
        """Whether this rank cannot go on without the connection that it does not have."""
        return self._given_up is None and not (self.is_open or self.is_closed)

    def lost(self, why: str) -> None:
        """End this process, unless the attempt ends anyway or another coordinator comes."""
        deadline_s = time.monotonic() + self._rejoin_s
        while self._is_needed and time.monotonic() < deadline_s:
            time.sleep(MOVED_POLL_S)
        if self._is_needed:
            _log.info(f"the coordinator is gone ({why}): ending")
            os._exit(EXIT_RESTART_ME)
