"""Whether workers that exited with 0 have ended well, as the watch of an attempt sees them.

A session program says so itself, and its agent knows where it was to end. A command is judged by
the end of its output, once its node has no process of it any more, and by how far it is known to
have come. Steps are completed optimizer steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from perdure.training.diagnosis.ending import (
    UNSEEN_NOTE,
    Count,
    FalseSuccess,
    Output,
    describe_leftovers,
    find_count,
    find_crash,
    find_short_end,
    judge_leftovers,
    shows_steps,
)
from perdure.training.diagnosis.exits import EXIT_DONE
from perdure.training.engines.base import Snapshot
from perdure.training.liveness.heartbeat import Phase
from perdure.training.recovery.faults import FaultClass
from perdure.training.wire.agent import AgentStatus, LeftProcess, WorkerStatus
from perdure.training.wire.logs import WorkerLog

UNSEEN_STRIDE = 0.01  # of the target, where only one heartbeat of a command was seen


def is_done(worker: WorkerStatus) -> bool:
    """Whether the worker did all its work, by its exit code and its heartbeat.

    torch 2.13 aborts one process in about fifty while it exits, after collectives of DTensors
    over gloo ("terminate called without an active exception"). Once the worker has reported that
    it is done, how the interpreter ends is no fault.
    """
    if worker.exit_code is None or worker.ended_early:
        return False
    ended_badly = worker.exit_code < 0 and worker.phase == Phase.DONE.name.lower()
    return worker.exit_code == EXIT_DONE or ended_badly


def bad_end_of_session(worker: WorkerStatus) -> FalseSuccess | None:
    """What its agent says about a session program that exited with 0."""
    if not worker.ended_early:
        return None
    return FalseSuccess(worker.error or "exit code 0 before the target", FaultClass.USER_CODE_ERROR)


def good_end_text(reached: str | None, notes: Sequence[str]) -> str:
    """What is said of a good end.

    Args:
        reached: how far it came; None of a command none of whose steps is known.
        notes: what a user has to know beside it.
    """
    return "; ".join((reached or "the command has ended well", *notes))


@dataclass(slots=True)
class CommandExitCheck:
    """What shows that a command that exited with 0 has not ended well.

    Attributes:
        target: step that the job's command trains to; None: not known.
        bad: by rank, what was found.
        notes: what a user has to know about a good end.
    """

    target: int | None = None
    bad: dict[int, FalseSuccess] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _judged: set[int] = field(default_factory=set)
    _steps: list[int] = field(default_factory=list)
    _left: dict[int, tuple[LeftProcess, ...]] = field(default_factory=dict)

    def note(self, snapshot: Snapshot) -> None:
        """Keep how far the program has come, and what commands have left running."""
        for status in snapshot.agents.values():
            for worker in status.workers[:1]:
                self._left[worker.rank] = status.left_running
        step = max((step for one in snapshot.agents.values() for step in one.steps), default=-1)
        if step >= 0 and step not in self._steps[-1:]:
            self._steps = [*self._steps[-1:], step]

    def fresh(self, snapshot: Snapshot) -> list[WorkerStatus]:
        """Workers that exited with 0 since the last time, of nodes where nothing is left."""
        return [
            worker
            for status in snapshot.agents.values()
            if status.is_over
            for worker in status.workers
            if worker.exit_code == EXIT_DONE and worker.rank not in self._judged
        ]

    def judge(
        self,
        workers: Sequence[WorkerStatus],
        logs: Mapping[int, Sequence[WorkerLog]],
        *,
        is_last: bool,
    ) -> None:
        """Judge workers that exited with 0.

        Args:
            workers: that have not been judged.
            logs: the ends of the output of all, by rank.
            is_last: whether no other process is left: nobody will count on.
        """
        self._judged.update(worker.rank for worker in workers)
        by_itself = [worker for worker in workers if not worker.stopped_by_agent]
        for worker in by_itself:
            outputs = [Output(log.text, log.written_s) for log in logs.get(worker.rank, ())]
            crash = find_crash(outputs)
            if crash is not None:
                self.bad[worker.rank] = FalseSuccess(crash)
        if by_itself and not self.bad:
            self._judge_left([worker.rank for worker in by_itself], logs)
        if is_last and by_itself and not self.bad:
            short = find_short_end(self._counts(logs))
            if short is not None:
                self.bad[by_itself[-1].rank] = short
            elif not self._steps and not any(map(shows_steps, _texts(logs))):
                self.notes.append(UNSEEN_NOTE)

    def _judge_left(self, ranks: Collection[int], logs: Mapping[int, Sequence[WorkerLog]]) -> None:
        """A script that did not wait for its training; what outlives a finished one is harmless."""
        counts = [count for count in self._counts(logs) if count is not None]
        has_finished = bool(counts) and not any(count.is_short for count in counts)
        for rank in ranks:
            left = self._left.get(rank, ())
            training = [one.name for one in left if one.trains]
            if training and not has_finished:
                self.bad[rank] = judge_leftovers(training)
            elif left:
                self.notes.append(describe_leftovers([one.name for one in left]))

    def _counts(self, logs: Mapping[int, Sequence[WorkerLog]]) -> Iterator[Count | None]:
        if self.target is not None and self._steps:
            before = self._steps[:-1]
            step = self._steps[-1]
            stride = step - before[0] if before else round(UNSEEN_STRIDE * self.target)
            yield Count(step, self.target, max(1, stride))
        printed = map(find_count, _texts(logs))
        counts = [count for count in printed if count is not None]
        # With several nodes one of them prints: the one that came farthest.
        yield max(counts, key=lambda count: count.step, default=None)


def _texts(logs: Mapping[int, Sequence[WorkerLog]]) -> Iterator[str]:
    return (log.text for rank in logs.values() for log in rank)


def was_stopped(snapshot: Snapshot) -> bool:
    """Whether a worker that exited with 0 had been asked to stop: it need not have been done."""
    return any(worker.stopped_by_agent for worker in _workers(snapshot))


def _workers(snapshot: Snapshot) -> Iterator[WorkerStatus]:
    statuses: Iterator[AgentStatus] = iter(snapshot.agents.values())
    return (worker for status in statuses for worker in status.workers)
