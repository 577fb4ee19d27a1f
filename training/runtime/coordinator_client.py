"""A worker's line to the coordinator of its attempt.

A thread listens: a new generation cuts the links under whatever the training thread waits for.
A worker that loses its coordinator ends, for nobody would tell it any more that it has been
replaced (fencing). Times are seconds.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from pydantic import SecretStr, ValidationError

from training.diagnosis.exits import EXIT_RESTART_ME
from training.recovery.protocol import (
    CoordinatorMessage,
    GiveUp,
    NewGeneration,
    Paused,
    PauseRequest,
    Plan,
    Reconnect,
    ToMember,
)
from training.recovery.repair import RepairPlan
from training.runtime.errors import GivenUp, Interrupted
from training.runtime.process_group.generations import GIVEN_UP
from training.wire.coordinator import TO_MEMBER, CoordinatorAddress, WorkerJoined, dump_line

_log = logging.getLogger("perdure.runtime")

CONNECT_TIMEOUT_S = 60.0
BEAT_S = 1.0


class CoordinatorClient:
    """Speaks to the coordinator.

    Args:
        address: where it listens.
        rank: of this process.
        on_generation: called by the listening thread with the number of a new generation.
        on_wait: called now and then while the training thread waits for the coordinator.

    Attributes:
        pause_wanted: somebody wants all ranks to stand still.
        on_reconnect: called in a thread of its own when the links are to be made anew.
    """

    def __init__(
        self,
        address: CoordinatorAddress,
        *,
        rank: int,
        on_generation: Callable[[int], None],
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_generation = on_generation
        self._on_wait = on_wait
        self._news = threading.Condition()
        self._generation = 0
        self._plans: dict[int, RepairPlan] = {}
        self._given_up: str | None = None
        self._is_closed = False
        self.pause_wanted = False
        self._wishes_told = 0
        where = (address.host, address.port)
        self.on_reconnect: Callable[[int, int], None] = lambda _generation, _link: None
        self._sending = threading.Lock()  # whoever notices a broken link is no thread of ours
        self._socket = socket.create_connection(where, timeout=CONNECT_TIMEOUT_S)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.say(WorkerJoined(token=SecretStr(address.token), rank=rank, pid=os.getpid()))
        threading.Thread(target=self._listen, daemon=True, name="coordinator").start()

    @classmethod
    def of_file(
        cls,
        path: Path,
        *,
        rank: int,
        on_generation: Callable[[int], None],
        on_wait: Callable[[], None],
    ) -> CoordinatorClient:
        """Call the coordinator whose address a file holds."""
        address = CoordinatorAddress.model_validate_json(path.read_text(encoding="utf-8"))
        return cls(address, rank=rank, on_generation=on_generation, on_wait=on_wait)

    def say(self, message: CoordinatorMessage) -> None:
        """Tell the coordinator something; a dead line is the listening thread's business."""
        try:
            with self._sending:
                self._socket.sendall(dump_line(message))
        except OSError as exc:
            self._lost(str(exc))

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
            Interrupted: a newer one came instead.
            GivenUp: there will be none.
        """
        self._wait(lambda: generation in self._plans or self._generation > generation)
        if self._generation > generation:
            raise Interrupted(f"generation {self._generation} is announced")
        return self._plans[generation]

    def stands_still(self, generation: int, *, step: int, until: Callable[[], bool]) -> None:
        """Tell that this rank stands at a step, and wait until nobody wants a pause any more.

        The ranks have agreed to stand; whether that is still wanted the coordinator answers.

        Raises:
            Interrupted: a generation after this one came.
            GivenUp: the attempt ends.
        """
        with self._news:
            told = self._wishes_told
        self.say(Paused(step=step, is_paused=True))
        self._wait(
            lambda: (
                (self._wishes_told > told and not self.pause_wanted)
                or self._generation > generation
                or until()
            )
        )
        if self._generation > generation:
            raise Interrupted(f"generation {self._generation} is announced")

    def close(self) -> None:
        """Hang up: the work is done."""
        self._is_closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other side was faster

    def _wait(self, is_over: Callable[[], bool]) -> None:
        with self._news:
            while not is_over():
                if self._given_up is not None:
                    raise GivenUp(self._given_up)
                self._news.wait(BEAT_S)
                self._on_wait()

    def _listen(self) -> None:
        why = "it hung up"
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    self._hear(TO_MEMBER.validate_json(line))
        except (OSError, ValidationError) as exc:
            why = str(exc)
        except Exception as exc:  # noqa: BLE001 a rank that hears nothing any more must not go on
            why = f"{type(exc).__name__}: {exc}"
        self._lost(why)

    def _hear(self, message: ToMember) -> None:
        if isinstance(message, NewGeneration):
            # First the links, or a waiting thread would find the old ones.
            self._on_generation(message.number)
        if isinstance(message, Reconnect):
            # Not here: this thread has to hear of a generation that ends the attempt at it.
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
                    self._wishes_told += 1
                case GiveUp():
                    self._given_up = message.why
            self._news.notify_all()
        if isinstance(message, GiveUp):
            # Whatever the training thread waits for in a collective will never come.
            self._on_generation(GIVEN_UP)

    def _lost(self, why: str) -> None:
        if self._is_closed or self._given_up is not None:
            return
        _log.info(f"the coordinator is gone ({why}): ending")
        os._exit(EXIT_RESTART_ME)
