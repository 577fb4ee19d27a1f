"""The nodes of a launched run as a supervisor sees them: who is there, with which containers.

Every node is asked again and again, and nobody waits for the answers: what is known is at most a
poll old, or as old as a node is silent. Times are seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from perdure.storage.errors import StorageError
from perdure.training.engines.launched.meeting import HostCalls, Registrations, by_node
from perdure.training.engines.launched.messages import (
    ContainersQuery,
    HostedContainer,
    HostOrder,
    HostReply,
    Registration,
)
from perdure.training.errors import AgentUnreachable, EngineError
from perdure.training.wire.transport import TimedLine

LIST_S = 3.0  # between two looks into the store
POLL_S = 0.3  # between two polls of a node
POLL_TIMEOUT_S = 5.0
FIRST_WAIT_S = 5.0  # for the first answers: a node that is silent for longer counts as lost
SILENT_S = 10.0  # a node that answers nobody for so long gets no container

_log = logging.getLogger("perdure.engine")


@dataclass(slots=True)
class HostState:
    """What is known of a node.

    Attributes:
        containers: as it answered last; None: it has not answered yet.
        is_gone: whether nothing listens at its address any more.
        answered_s: time of the last answer.
        poll: nonce and future of the poll that has not been answered yet.
    """

    registration: Registration
    containers: tuple[HostedContainer, ...] | None = None
    is_gone: bool = False
    answered_s: float = 0.0
    asked_s: float = 0.0
    poll: tuple[str, Future[TimedLine]] | None = field(default=None, repr=False)

    @property
    def held(self) -> tuple[HostedContainer, ...]:
        """Its containers, as far as they are known and not gone with it."""
        return () if self.is_gone or self.containers is None else self.containers

    def is_usable(self, now_s: float) -> bool:
        """Whether it would take a container."""
        return (
            not self.is_gone
            and self.containers is not None
            and (now_s - self.answered_s < SILENT_S)
        )


class Hosts:
    """The nodes of one run.

    Args:
        registrations: where they tell each other their addresses.
        calls: carries orders to them.
        clock: monotonic.
    """

    def __init__(
        self,
        registrations: Registrations,
        calls: HostCalls,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registrations, self._calls, self._clock = registrations, calls, clock
        self._states: dict[str, HostState] = {}
        self._listed_s = float("-inf")

    def states(self, *, wait_s: float = 0.0) -> Mapping[str, HostState]:
        """What is known of every node, by name.

        Args:
            wait_s: for the nodes that have not answered since this call.
        """
        self._list()
        self._ask(is_at_once=wait_s > 0)
        unheard = any(s.containers is None and not s.is_gone for s in self._states.values())
        wait_s = max(wait_s, FIRST_WAIT_S if unheard else 0.0)
        polls = [state.poll[1] for state in self._states.values() if state.poll is not None]
        if wait_s and polls:
            concurrent.futures.wait(polls, timeout=wait_s)
        for state in self._states.values():
            self._hear(state)
            if wait_s and state.containers is None:
                state.containers = ()  # nobody waits for it a second time
        return self._states

    def _list(self) -> None:
        now_s = self._clock()
        if now_s - self._listed_s < LIST_S:
            return
        self._listed_s = now_s
        try:
            registrations, _ = self._registrations.read()
        except StorageError as error:
            _log.warning("the nodes cannot be listed now: %s", error)
            return
        for node, registration in by_node(registrations).items():
            state = self._states.get(node)
            if state is None or state.registration.instance != registration.instance:
                self._states[node] = HostState(registration)

    def _ask(self, *, is_at_once: bool) -> None:
        now_s = self._clock()
        for state in self._states.values():
            is_due = is_at_once or now_s - state.asked_s >= POLL_S
            if state.poll is None and is_due:
                state.asked_s = now_s
                state.poll = self._calls.send(
                    state.registration, ContainersQuery(), timeout_s=POLL_TIMEOUT_S
                )

    def _hear(self, state: HostState) -> None:
        if state.poll is None or not state.poll[1].done():
            return
        (nonce, answer), state.poll = state.poll, None
        try:
            self._note(state, self._calls.receive(state.registration, nonce, answer))
        except ConnectionRefusedError:
            state.is_gone = True
        except (AgentUnreachable, EngineError) as error:
            _log.debug("%s", error)

    def _note(self, state: HostState, reply: HostReply) -> None:
        state.containers, state.is_gone = reply.containers, False
        state.answered_s = self._clock()

    def order(
        self, orders: Iterable[tuple[str, HostOrder]], *, timeout_s: float, needs_all: bool
    ) -> None:
        """Give orders to nodes, all at once, and wait for them.

        Args:
            orders: with the names of their nodes.
            timeout_s: for the answers.
            needs_all: whether a node that is gone, or silent, is an error.

        Raises:
            EngineError: a node refuses, or does not answer and is needed.
        """
        sent = []
        for node, order in orders:
            state = self._states[node]
            state.poll = None  # its answer would not show what the order changes
            sent.append((state, *self._calls.send(state.registration, order, timeout_s=timeout_s)))
        problems: list[EngineError] = []
        for state, nonce, answer in sent:
            try:
                self._note(state, self._calls.receive(state.registration, nonce, answer))
            except ConnectionRefusedError:
                state.is_gone = True
                if needs_all:
                    problems.append(EngineError(f"{state.registration.node} is gone"))
            except AgentUnreachable as error:
                if needs_all:
                    problems.append(EngineError(str(error)))
            except EngineError as error:
                problems.append(error)
        if problems:
            raise problems[0]
