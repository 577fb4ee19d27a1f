"""Try all that recovery demands of a device: a program with a task on stdin, a `Trial` on stdout.

It provokes errors instead of imitating them: memory that is not there, work that stops under a
thread that waits for it, a collective that some ranks never enter. It keeps the exceptions of the
device's library word for word, with the class that Perdure gives them. Times are seconds.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from perdure.training.device import (
    Healing,
    device_name,
    healing_of,
    local_devices,
    memory_of,
    pick_device,
)
from perdure.training.diagnosis.recognise import recognise
from perdure.training.drill.device_report import ProvokedError, Trial, TrialTask
from perdure.training.node_checks import burn_in
from perdure.training.runtime.process_group.generations import Generations, StoreClient
from perdure.training.runtime.process_group.reconfigurable import install
from perdure.training.runtime.recoverable import classify
from perdure.training.wire.node import Check, CheckOutcome
from perdure.training.wire.rendezvous import serve_store

MATRIX = {"cpu": 256}
DEVICE_MATRIX = 2048
WORK_S = 2.0  # of queued work, stopped after half of it
WAIT_S = 1.0  # in a collective that not all ranks enter
NUM_GENERATIONS = 3
OP_TIMEOUT_S = 120.0


class _DeviceTrials:
    """The trials of a device, in order; a failed trial is a failed check."""

    def __init__(self, task: TrialTask, device: torch.device) -> None:
        self.task, self.device = task, device
        self.healing: Healing = healing_of(device)
        self.checks: list[Check] = []
        self.exceptions: list[ProvokedError] = []
        self._store: TCPStore | None = None

    def observe(self, provoked_by: str, error: BaseException, *, is_interrupted: bool) -> None:
        """Add an exception to the report, word for word."""
        fault = classify(error, is_interrupted=is_interrupted)
        lines = (recognise(line, "") for line in str(error).splitlines())
        recognition = next((match for match in lines if match is not None), None)
        self.exceptions.append(
            ProvokedError(
                provoked_by=provoked_by,
                type=f"{type(error).__module__}.{type(error).__qualname__}",
                text=str(error),
                is_fault=fault is not None,
                kind=fault.kind if fault is not None else None,
                fault_class=recognition.fault_class if recognition is not None else None,
            )
        )

    def do(self, name: str, trial: Callable[[], str | None]) -> None:
        """Run a trial. It returns its finding; None: it does not apply to this device."""
        began_s = time.monotonic()
        try:
            finding = trial()
        except Exception as error:  # noqa: BLE001 the report has any error
            outcome, finding = CheckOutcome.FAILED, "".join(traceback.format_exception(error))
        else:
            outcome = CheckOutcome.OK if finding is not None else CheckOutcome.SKIPPED
            finding = finding or f"does not apply to {self.device.type}"
        took_s = time.monotonic() - began_s
        self.checks.append(Check(name=name, outcome=outcome, seen=finding, seconds=took_s))

    def memory(self) -> str | None:
        """Ask the device how much memory it has."""
        sizes = memory_of(self.device)
        return f"{sizes[0]} bytes free of {sizes[1]}" if sizes is not None else None

    def random_numbers(self) -> str | None:
        """Restore the state of the random numbers, and compare the numbers that follow."""
        module = torch.get_device_module(self.device)
        if self.device.type == "cpu":
            return None
        state = module.get_rng_state(self.device)
        first = torch.rand(1000, device=self.device).cpu()
        module.set_rng_state(state, self.device)
        if not torch.equal(first, torch.rand(1000, device=self.device).cpu()):
            raise RuntimeError("random numbers differ after their state was set back")
        return "the same numbers again"

    def out_of_memory(self) -> str | None:
        """Allocate more memory than there is, for the exception."""
        sizes = memory_of(self.device)
        if sizes is None:
            return None
        try:
            torch.empty(2 * sizes[1], dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            self.observe("more memory than there is", error, is_interrupted=False)
            return type(error).__name__
        raise RuntimeError("twice the device's memory was allocated")

    def stopped(self) -> str | None:
        """Stop work under a thread that waits for it, for the exception; then work again."""
        if self.device.type != "npu":
            return None
        queue = self._work()
        threading.Timer(WORK_S / 2, self.healing.stop).start()
        try:
            queue()
        except RuntimeError as error:
            self.observe("stop_device under work", error, is_interrupted=True)
            error_type = type(error).__name__
        else:
            raise RuntimeError("work that was stopped came to its end")
        self.healing.clean((), is_damaged=False)
        return f"{error_type}, then {self._works()}"

    def _work(self) -> Callable[[], None]:
        """Prepare matrix products for `WORK_S`. Returns a function that runs them and waits."""
        size = MATRIX.get(self.device.type, DEVICE_MATRIX)
        matrix = torch.ones(size, size, device=self.device)
        (matrix @ matrix).sum().item()
        began_s = time.monotonic()
        (matrix @ matrix).sum().item()
        count = math.ceil(WORK_S / max(1e-6, time.monotonic() - began_s))

        def queue() -> None:
            for _ in range(count):
                product = matrix @ matrix
            product.sum().item()

        return queue

    def _works(self) -> str:
        check = burn_in.check_device(self.device, 0.0)
        if check.outcome is not CheckOutcome.OK:
            raise RuntimeError(check.seen)
        return check.seen

    def generations(self) -> str | None:
        """End collectives that a rank never enters with their generation, again and again."""
        if self.task.size == 1:
            return None
        if self.task.rank == 0:
            self._store = serve_store(self.task.host, self.task.port)
        generations = _join(self.task, self.device, self.healing)
        took_s = [self._generation(generations, number + 1) for number in range(NUM_GENERATIONS)]
        return f"{NUM_GENERATIONS} generations, up after {', '.join(f'{s:.2f} s' for s in took_s)}"

    def _generation(self, generations: Generations, number: int) -> float:
        """Enter a generation, sum, and wait in vain for its last rank. Returns the sum's time."""
        began_s = time.monotonic()
        generations.announce(number)
        generations.enter(number)
        if number > 1:
            self.healing.clean((), is_damaged=False)
        generations.release_retired()
        total = torch.full((1,), self.task.rank + 1.0, device=self.device)
        dist.all_reduce(total)
        size = self.task.size
        if total.item() != size * (size + 1) / 2:
            raise RuntimeError(f"the sum over {size} ranks is {total.item()}")
        took_s = time.monotonic() - began_s
        if number < NUM_GENERATIONS:
            self._wait_in_vain(generations, number + 1)
        return took_s

    def _wait_in_vain(self, generations: Generations, number: int) -> None:
        if self.task.rank == self.task.size - 1:
            time.sleep(WAIT_S)
            return
        threading.Timer(WAIT_S, partial(generations.announce, number)).start()
        never = torch.ones(1, device=self.device)
        try:
            dist.all_reduce(never)
            never.item()
        except RuntimeError as error:
            self.observe("a collective that its last rank never enters", error, is_interrupted=True)
            return
        raise RuntimeError("a collective ended that one rank has not entered")


def _join(task: TrialTask, device: torch.device, healing: Healing) -> Generations:
    generations = Generations(
        task.rank,
        device=device,
        op_timeout_s=OP_TIMEOUT_S,
        open_store=partial(StoreClient, task.host, task.port),
        stop_device=healing.stop,
    )
    install(generations, world_size=task.size)
    return generations


def try_device(task: TrialTask) -> Trial:
    """Run all trials of a device."""
    device = pick_device(task.rank)
    trying = _DeviceTrials(task, device)
    for name, trial in _trials(trying):
        trying.do(name, trial)
    burnt = burn_in.check_device(device, task.burn_in_s)
    return Trial(
        rank=task.rank,
        device=str(device),
        name=device_name(device),
        checks=(burnt, *trying.checks),
        exceptions=tuple(trying.exceptions),
    )


def _trials(trying: _DeviceTrials) -> Iterator[tuple[str, Callable[[], str | None]]]:
    yield "device_memory", trying.memory
    yield "random_numbers", trying.random_numbers
    yield "out_of_memory", trying.out_of_memory
    yield "generations", trying.generations  # before a device is stopped alone
    yield "stop_and_restart", trying.stopped


def main() -> None:
    """Read the task, try, print."""
    if sys.argv[1:] == ["--count"]:  # a separate process, so that its caller loads no driver
        sys.stdout.write(f"{local_devices()}\n")
        return
    task = TrialTask.model_validate_json(sys.stdin.buffer.read())
    answer = try_device(task).model_dump_json()
    sys.stdout.write(answer + "\n")
    sys.stdout.flush()
    os._exit(0)  # provoked errors may keep a library from ending


if __name__ == "__main__":
    main()
