"""The check for programs that an exception has ended and whose processes live on.

A hook at exit that uploads, or a thread that is no daemon, keeps a process alive for ever after its
traceback. Two signs together show it: the traceback is the last that its output tells, with no step
after it, and the stack of the main thread shows that the program has been left. A program that
prints the traceback of an exception that it handled is still inside of itself. An exception that
ended a child or a thread may leave the program waiting for it inside: that shows by silence and
idle processes. Times are seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from perdure.training.agent.evidence import dump_stacks
from perdure.training.agent.processors import waited_for_processor_s
from perdure.training.agent.worker_process import Worker
from perdure.training.agent.workers import WorkerGroup
from perdure.training.diagnosis.ending import find_last_traceback, find_traceback_of_helper

_log = logging.getLogger("perdure.agent")
# Hooks at exit, such as the last upload of a tracker, have this long.
EXIT_TIME_S = 30.0
# A program whose child or thread is dead may do without it, but not without any sign of life.
IDLE_TIME_S = 90.0
IDLE_LOOK_S = 3.0
IDLE_CORES = 0.1
IDLE_IO_BYTES = 64 << 10
PERIOD_S = 3.0
TAIL_BYTES = 64 << 10
_THREAD = re.compile(r"^Thread \w+ .*$", re.MULTILINE)
# The outermost functions of a program that is running.
# The last one: of a process that a thread of its parent has forked.
_INSIDE = ("<module> ", "_run_module_as_main ", "_run_code ", "_bootstrap ")


@dataclass(slots=True)
class LastWordsCheck:
    """The check of one attempt on one node.

    Attributes:
        exit_time_s: how long a process may live on after its last words.
        idle_time_s: how long it may be silent and idle after those of its child or thread.
        period_s: time between two looks at the output.
    """

    exit_time_s: float = EXIT_TIME_S
    idle_time_s: float = IDLE_TIME_S
    period_s: float = PERIOD_S
    _checked_s: float = 0.0
    _num_bytes: int = -1
    _printed_s: float = 0.0
    _words: dict[int, tuple[str, float]] = field(default_factory=dict)
    _helpers: dict[int, tuple[str, float]] = field(default_factory=dict)  # of a child or thread
    _proof: _Proof | None = None
    _suspect: Worker | None = None  # a look at a process that runs may miss frames

    def check(self, group: WorkerGroup, *, shown_steps_limit_s: float | None) -> None:
        """End the workers that live on after an exception has ended their program.

        Args:
            group: of the attempt.
            shown_steps_limit_s: a long time between two steps in the output; None: it shows none,
                and silence after the death of a child or thread proves nothing.
        """
        now_s = time.monotonic()
        if now_s - self._checked_s < self.period_s or group.is_stopping:
            return
        self._checked_s = now_s
        self._read(group, now_s)
        proof, self._proof = self._proof, None
        if proof is not None and proof.is_under_way:
            self._proof = proof
        elif proof is not None and proof.has_ended and self._line_of(proof.worker) is not None:
            if proof.worker is self._suspect:
                _end(proof.worker, self._line_of(proof.worker) or "")
            else:
                self._suspect = proof.worker
                self._proof = _Proof.begin(proof.worker, may_be_idle=proof.may_be_idle)
        else:
            self._suspect, self._proof = None, self._next_proof(group, now_s, shown_steps_limit_s)

    def _read(self, group: WorkerGroup, now_s: float) -> None:
        """Read the last words of each worker, where any output is new."""
        num_bytes = group.output.size_bytes(group.ranks)
        if num_bytes == self._num_bytes:
            return
        self._num_bytes, self._printed_s = num_bytes, now_s
        lines: dict[int, str] = {}
        helper_lines: dict[int, str] = {}
        for log in group.output.tails(group.ranks, TAIL_BYTES):
            line = find_last_traceback(log.text)
            if line is not None:
                lines[log.rank] = line
            line = find_traceback_of_helper(log.text)
            if line is not None:
                helper_lines[log.rank] = line
        self._words = _since(lines, self._words, now_s)
        self._helpers = _since(helper_lines, self._helpers, now_s)

    def _next_proof(
        self, group: WorkerGroup, now_s: float, steps_limit_s: float | None
    ) -> _Proof | None:
        due = [r for r, (_, since_s) in self._words.items() if now_s - since_s > self.exit_time_s]
        idle: list[int] = []
        if steps_limit_s is not None:
            is_silent = now_s - self._printed_s > max(self.idle_time_s, steps_limit_s)
            # The training has outlived a child or thread after whose end it printed for longer.
            ended = [
                r for r, (_, s) in self._helpers.items() if self._printed_s - s <= steps_limit_s
            ]
            idle = ended if is_silent else []
        running = {worker.rank: worker for worker in group.running_workers}
        for rank in (*idle, *due):
            if rank in running:
                return _Proof.begin(running[rank], may_be_idle=rank in idle)
        return None

    def _line_of(self, worker: Worker) -> str | None:
        words = self._words.get(worker.rank) or self._helpers.get(worker.rank)
        return words[0] if words is not None else None


def _since(
    lines: Mapping[int, str], earlier: Mapping[int, tuple[str, float]], now_s: float
) -> dict[int, tuple[str, float]]:
    """Add to each line when it was first the last of its rank."""
    return {
        rank: earlier[rank] if earlier.get(rank, ("",))[0] == line else (line, now_s)
        for rank, line in lines.items()
    }


@dataclass(slots=True)
class _Proof:
    """The look at the stacks of a worker's processes, in a thread: it runs other programs."""

    worker: Worker
    may_be_idle: bool  # where its idle processes are a proof, too
    is_under_way: bool = True
    has_ended: bool = False

    @classmethod
    def begin(cls, worker: Worker, *, may_be_idle: bool) -> _Proof:
        proof = cls(worker, may_be_idle)
        threading.Thread(target=proof._look, daemon=True).start()
        return proof

    def _look(self) -> None:
        try:
            pids = _tree(self.worker.process.pid)
            has_left = any(has_left_program(dump_stacks(pid), pid) for pid in pids)
            self.has_ended = has_left or (self.may_be_idle and _are_idle(pids))
        finally:
            self.is_under_way = False


def _end(worker: Worker, line: str) -> None:
    """End a process whose program an exception has ended: its end is that of the exception."""
    _log.warning(f"rank {worker.rank} lives on after an exception and is ended: {line}")
    worker.raised = line
    worker.process.send_signal(signal.SIGKILL)


def _tree(pid: int) -> Sequence[int]:
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def _are_idle(pids: Sequence[int]) -> bool:
    """Whether processes neither compute nor wait for a processor, read or write; takes seconds."""
    before_s, before_bytes = _use_of(pids)
    time.sleep(IDLE_LOOK_S)
    after_s, after_bytes = _use_of(pids)
    is_busy = after_s - before_s > IDLE_CORES * IDLE_LOOK_S
    return not is_busy and after_bytes - before_bytes < IDLE_IO_BYTES


def _use_of(pids: Sequence[int]) -> tuple[float, int]:
    used_s, io_bytes = 0.0, 0
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            times, counters = process.cpu_times(), process.io_counters()
            used_s += times.user + times.system + waited_for_processor_s(pid)
            io_bytes += counters.read_chars + counters.write_chars
    return used_s, io_bytes


def has_left_program(stacks: str | None, pid: int) -> bool:
    """Whether the main thread of a process is in no frame of its program any more.

    Args:
        stacks: of all threads, as py-spy prints them, innermost frames first; None: not known.
        pid: number of the process, which is that of its main thread, too.
    """
    if stacks is None:
        return False
    headings = list(_THREAD.finditer(stacks))
    for heading, following in zip(headings, [*headings[1:], None], strict=True):
        text = heading[0]
        if not text.startswith(f"Thread {pid} ") and '"MainThread"' not in text:
            continue
        end = following.start() if following is not None else len(stacks)
        frames = [line.strip() for line in stacks[heading.end() : end].splitlines() if line.strip()]
        return not frames or not frames[-1].startswith(_INSIDE)
    return False
