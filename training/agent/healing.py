"""Healing the chips of a node, and checking some of them while an attempt runs on the others.

A supervisor orders the first between two attempts in place, a coordinator the second before a rank
gets a new process. `next_act` decides what comes next; each act has a limit of its own. The work
runs in a thread: the agent goes on answering. Times are seconds.
"""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from perdure.training.agent.fork_server import Fork, ForkedProcess, start_alone
from perdure.training.config.job import RESERVED_NAMES
from perdure.training.environment import interface_variables
from perdure.training.journal.attempt_log import FILE_NAME, AttemptLog
from perdure.training.journal.events import ChipsHealed
from perdure.training.node_checks.chip_health import inspect_chips, reset_chips
from perdure.training.recovery.healing import (
    CHECK_LIMIT_S,
    Act,
    ActDone,
    HealPlan,
    NextAct,
    is_healed,
    next_act,
)
from perdure.training.recovery.rungs import Rung
from perdure.training.wire.agent import AgentConfig, StartOrder
from perdure.training.wire.node import Check, CheckOutcome, HealOrder, HealReply

_log = logging.getLogger("perdure.agent")

Key = tuple[int, int]  # placement and attempt
RECHECK_S = 1.0  # between two checks of a faulty chip
POLL_S = 0.01
OUTPUT = "heal"
# Named, not imported: it needs torch, and only the process that runs it loads that.
PROGRAM = "perdure.training.node_checks.chip_program:main"
_numbers = itertools.count(1)  # of computations: two ranks of a node may be checked at once

ForkFunction = Callable[[Fork], ForkedProcess | subprocess.Popen[bytes]]


class NodeHealing:
    """The healing of one container's chips.

    Args:
        config: the agent's configuration.
        folder: the container's folder.
        fork: starts processes that have torch already; where it raises OSError, an interpreter is
            started instead.
    """

    def __init__(self, config: AgentConfig, folder: Path, fork: ForkFunction) -> None:
        self._config = config
        self._folder = folder
        self._fork = fork
        self._lock = threading.Lock()
        self._healing: tuple[Key, _Course] | None = None
        self._checks: list[_Course] = []

    def heal(self, order: HealOrder, attempt_folder: Path) -> HealReply:
        """Begin to heal, unless it was begun. Returns how far it is."""
        key = (order.placement, order.attempt)
        with self._lock:
            if self._healing is None or self._healing[0] != key:
                self._end()
                self._healing = (key, self._begin(order, partial(_record, attempt_folder)))
            return HealReply(done=self._healing[1].done)

    def check(self, start: StartOrder, plan: HealPlan, then: Callable[[ChipsHealed], None]) -> None:
        """Begin to carry out a plan while an attempt runs; the result is not recorded.

        Args:
            start: order that began the attempt.
            plan: devices, and acts with them.
            then: called with the result, unless the check is ended before.
        """
        order = HealOrder(
            placement=start.placement,
            attempt=start.attempt,
            rung=Rung.PROCESS_REPLACE,
            plan=plan,
            slots_per_node=start.slots_per_node,
            variables=start.variables,
            cwd=start.cwd,
        )
        with self._lock:
            running = [course for course in self._checks if course.done is None]
            self._checks = [*running, self._begin(order, then)]

    def _begin(self, order: HealOrder, then: Callable[[ChipsHealed], None]) -> _Course:
        course = _Course(order, self._config, self._folder, self._fork, then)
        threading.Thread(target=course.run, daemon=True).start()
        return course

    def end(self) -> None:
        """End what runs; its order gets no answer any more."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        for course in (*self._checks, *([self._healing[1]] if self._healing is not None else ())):
            course.stop.set()
        self._checks.clear()


def _record(attempt_folder: Path, event: ChipsHealed) -> None:
    try:
        attempt_folder.mkdir(parents=True, exist_ok=True)
        with AttemptLog(attempt_folder / FILE_NAME) as log:
            log.append(event)
    except OSError as error:  # the supervisor has it all the same
        _log.warning("the attempt's log does not take the record of the healing: %s", error)


class _Course:
    """A healing, from its first act to its last."""

    def __init__(
        self,
        order: HealOrder,
        config: AgentConfig,
        folder: Path,
        fork: ForkFunction,
        then: Callable[[ChipsHealed], None],
    ) -> None:
        self._order = order
        self._config = config
        self._folder = folder
        self._fork = fork
        self._then = then
        self.stop = threading.Event()
        self.done: ChipsHealed | None = None

    def run(self) -> None:
        """Carry out one act after the other, and pass the result on."""
        began_s, acts = time.monotonic(), list[ActDone]()
        while (act := next_act(self._order.plan, acts)) is not None and not self.stop.is_set():
            acts.append(self._carry_out(act, was_reset=bool(acts)))
        if self.stop.is_set():
            return
        event = ChipsHealed(
            at_s=time.time(),
            number=1,
            node=self._config.node,
            rung=self._order.rung,
            succeeded=is_healed(acts),
            acts=tuple(acts),
            seconds=time.monotonic() - began_s,
        )
        self._then(event)
        self.done = event

    def _carry_out(self, act: NextAct, *, was_reset: bool) -> ActDone:
        began_s = time.monotonic()
        # Some servers reset all chips at once.
        devices = self._all_devices if was_reset else self._order.plan.devices or self._all_devices
        if act.act is Act.RESET:
            is_good, finding = reset_chips(self._order.plan.devices or self._all_devices)
            done = ActDone(Act.RESET, is_good, finding)
        else:
            done = self._check(devices, until_s=began_s + act.wait_s)
        took_s = time.monotonic() - began_s
        return ActDone(done.act, done.is_good, done.seen, done.codes, took_s)

    @property
    def _all_devices(self) -> tuple[int, ...]:
        return tuple(range(self._order.slots_per_node))

    def _check(self, devices: Sequence[int], *, until_s: float) -> ActDone:
        """Check until the devices are good, or the time is over."""
        while True:
            done = self._check_once(devices)
            left_s = until_s - time.monotonic()
            if done.is_good or left_s <= 0 or self.stop.wait(min(RECHECK_S, left_s)):
                return done

    def _check_once(self, devices: Sequence[int]) -> ActDone:
        order = self._order
        try:
            look = inspect_chips(order.plan, order.slots_per_node, self._folder, suspects=devices)
        except OSError as error:
            return ActDone(Act.CHECK, is_good=False, seen=f"not possible: {error}")
        if not look.is_good:
            return ActDone(Act.CHECK, is_good=False, seen=look.text, codes=look.codes)
        wrong = self._compute(devices)
        finding = "; ".join(wrong) or f"{look.text}, and computes right"
        return ActDone(Act.CHECK, is_good=not wrong, seen=finding, codes=look.codes)

    def _compute(self, devices: Sequence[int]) -> list[str]:
        """Have the devices compute, all at once. Returns what is wrong with them."""
        until_s = time.monotonic() + CHECK_LIMIT_S
        try:
            started = [(device, *self._start(device)) for device in devices]
        except OSError as error:
            return [f"the computation does not start: {error}"]
        results = [self._await(*computation, until_s=until_s) for computation in started]
        return [text for text in results if text]

    def _start(self, device: int) -> tuple[ForkedProcess | subprocess.Popen[bytes], Path]:
        order = self._order
        name = f"{OUTPUT}-p{order.placement:04d}-a{order.attempt:04d}-{next(_numbers)}"
        output = self._folder / f"{name}.json"
        output.unlink(missing_ok=True)
        # The agent itself may run as a rank of another program.
        inherited = {n: text for n, text in os.environ.items() if n not in RESERVED_NAMES}
        request = Fork(
            function=PROGRAM,
            name=f"{OUTPUT}-{device}",
            arguments=(str(device),),
            environment={
                **interface_variables(self._config.host),
                **inherited,
                **order.variables,
            },
            cwd=order.cwd,
            stdout=str(output),
            stderr=str(self._folder / f"{OUTPUT}.log"),
        )
        try:
            return self._fork(request), output
        except OSError:  # a command's container has no fork server
            return start_alone(request), output

    def _await(
        self,
        device: int,
        process: ForkedProcess | subprocess.Popen[bytes],
        output: Path,
        *,
        until_s: float,
    ) -> str | None:
        """Wait for a device. Returns what is wrong with it, None when it computes right."""
        while process.poll() is None:
            if self.stop.is_set() or time.monotonic() > until_s:
                process.kill()
                return f"device {device}: no result within {CHECK_LIMIT_S:g} s"
            time.sleep(POLL_S)
        try:
            check = Check.model_validate_json(output.read_text(encoding="utf-8"))
        except (OSError, ValidationError):
            return f"device {device}: its process ended with exit code {process.poll()}"
        finally:
            output.unlink(missing_ok=True)
        return check.seen if check.outcome is CheckOutcome.FAILED else None
