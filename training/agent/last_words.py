"""The check for programs that an exception has ended and whose processes live on.

A hook at exit that uploads, or a thread that is no daemon, keeps a process alive for ever after its
traceback. Two signs together show it: the traceback is the last that its output tells, with no step
after it, and the stack of the main thread shows that the program has been left. A program that
prints the traceback of an exception that it handled is still inside of itself. Times are seconds of
CLOCK_MONOTONIC.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from perdure.training.agent.evidence import dump_stacks
from perdure.training.agent.worker_process import Worker
from perdure.training.agent.workers import WorkerGroup
from perdure.training.diagnosis.ending import find_last_traceback

_log = logging.getLogger("perdure.agent")
# Hooks at exit, such as the last upload of a tracker, have this long.
EXIT_TIME_S = 30.0
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
        period_s: time between two looks at the output.
    """

    exit_time_s: float = EXIT_TIME_S
    period_s: float = PERIOD_S
    _checked_s: float = 0.0
    _num_bytes: int = -1
    _words: dict[int, tuple[str, float]] = field(default_factory=dict)
    _proof: _Proof | None = None
    _suspect: Worker | None = None  # a look at a process that runs may miss frames

    def check(self, group: WorkerGroup) -> None:
        """End the workers that live on after an exception has ended their program."""
        now_s = time.monotonic()
        if now_s - self._checked_s < self.period_s or group.is_stopping:
            return
        self._checked_s = now_s
        self._read(group, now_s)
        proof, self._proof = self._proof, None
        if proof is not None and proof.is_under_way:
            self._proof = proof
        elif proof is not None and proof.has_left and proof.worker.rank in self._words:
            if proof.worker is self._suspect:
                _end(proof.worker, self._words[proof.worker.rank][0])
            else:
                self._suspect, self._proof = proof.worker, _Proof.begin(proof.worker)
        else:
            self._suspect, self._proof = None, self._next_proof(group, now_s)

    def _read(self, group: WorkerGroup, now_s: float) -> None:
        """Read the last words of each worker, where any output is new."""
        num_bytes = group.output.size_bytes(group.ranks)
        if num_bytes == self._num_bytes:
            return
        self._num_bytes = num_bytes
        lines: dict[int, str] = {}
        for log in group.output.tails(group.ranks, TAIL_BYTES):
            line = find_last_traceback(log.text)
            if line is not None:
                lines[log.rank] = line
        earlier = self._words
        self._words = {
            rank: earlier[rank] if earlier.get(rank, ("",))[0] == line else (line, now_s)
            for rank, line in lines.items()
        }

    def _next_proof(self, group: WorkerGroup, now_s: float) -> _Proof | None:
        due = [r for r, (_, since_s) in self._words.items() if now_s - since_s > self.exit_time_s]
        running = {worker.rank: worker for worker in group.running_workers}
        for rank in due:
            if rank in running:
                return _Proof.begin(running[rank])
        return None


@dataclass(slots=True)
class _Proof:
    """The look at the stacks of a worker's processes, in a thread: it runs other programs."""

    worker: Worker
    is_under_way: bool = True
    has_left: bool = False

    @classmethod
    def begin(cls, worker: Worker) -> _Proof:
        proof = cls(worker)
        threading.Thread(target=proof._look, daemon=True).start()
        return proof

    def _look(self) -> None:
        try:
            pids = _tree(self.worker.process.pid)
            self.has_left = any(has_left_program(dump_stacks(pid), pid) for pid in pids)
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
