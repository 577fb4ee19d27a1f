"""The check of workers that exited with 0, in the watch of an attempt: whether they ended well.

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
from perdure.training.supervisor.watch import EndKind, Progress, WatchResult
from perdure.training.wire.agent_status import LeftProcess, WorkerStatus
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


def good_end_text(reached: str | None, notes: Sequence[str]) -> str:
    """Build the sentence about a good end.

    Args:
        reached: how far the run came; None: a command none of whose steps is known.
        notes: for the user, beside it.
    """
    return "; ".join((reached or "the command has ended well", *notes))


@dataclass(slots=True)
class CommandExitCheck:
    """The check of commands that exit with 0: evidence that they have not ended well.

    Attributes:
        target: step that the job's command trains to; None: not known.
        false_successes: by rank.
        notes: for the user, about a good end.
    """

    target: int | None = None
    false_successes: dict[int, FalseSuccess] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _judged_ranks: set[int] = field(default_factory=set)
    _steps: list[int] = field(default_factory=list)
    _left_running: dict[int, tuple[LeftProcess, ...]] = field(default_factory=dict)

    def check(self, progress: Progress) -> WatchResult | None:  # noqa: ARG002 judge() has the exits
        """End the attempt once the exit of a command proved to be no success."""
        return WatchResult(EndKind.FAILED) if self.false_successes else None

    def note(self, snapshot: Snapshot) -> None:
        """Note how far the program has come, and the processes that commands left running."""
        for status in snapshot.agents.values():
            for worker in status.workers[:1]:
                self._left_running[worker.rank] = status.left_running
        step = max((s for status in snapshot.agents.values() for s in status.steps), default=-1)
        if step >= 0 and step not in self._steps[-1:]:
            self._steps = [*self._steps[-1:], step]

    def unjudged(self, snapshot: Snapshot) -> list[WorkerStatus]:
        """List workers that exited with 0 on nodes where nothing is left, and were not judged."""
        return [
            worker
            for status in snapshot.agents.values()
            if status.is_over
            for worker in status.workers
            if worker.exit_code == EXIT_DONE and worker.rank not in self._judged_ranks
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
            workers: not judged before.
            logs: the ends of the output of all workers, by rank.
            is_last: whether no other process is left: nobody will count on.
        """
        self._judged_ranks.update(worker.rank for worker in workers)
        by_itself = [worker for worker in workers if not worker.stopped_by_agent]
        for worker in by_itself:
            outputs = [Output(log.text, log.written_s) for log in logs.get(worker.rank, ())]
            crash = find_crash(outputs)
            if crash is not None:
                self.false_successes[worker.rank] = FalseSuccess(crash)
        if by_itself and not self.false_successes:
            self._judge_left([worker.rank for worker in by_itself], logs)
        if is_last and by_itself and not self.false_successes:
            short = find_short_end(self._counts(logs))
            if short is not None:
                self.false_successes[by_itself[-1].rank] = short
            elif not self._steps and not any(map(shows_steps, _texts(logs))):
                self.notes.append(UNSEEN_NOTE)

    def _judge_left(self, ranks: Collection[int], logs: Mapping[int, Sequence[WorkerLog]]) -> None:
        """Judge processes that outlive their script: harmless, unless training had not finished."""
        counts = [count for count in self._counts(logs) if count is not None]
        has_finished = bool(counts) and not any(count.is_short for count in counts)
        for rank in ranks:
            left = self._left_running.get(rank, ())
            training = [process.name for process in left if process.trains]
            if training and not has_finished:
                self.false_successes[rank] = judge_leftovers(training)
            elif left:
                self.notes.append(describe_leftovers([process.name for process in left]))

    def _counts(self, logs: Mapping[int, Sequence[WorkerLog]]) -> Iterator[Count | None]:
        if self.target is not None and self._steps:
            step, is_first = self._steps[-1], len(self._steps) == 1
            stride = round(UNSEEN_STRIDE * self.target) if is_first else step - self._steps[0]
            yield Count(step, self.target, max(1, stride))
        printed = map(find_count, _texts(logs))
        counts = [count for count in printed if count is not None]
        # The node whose output came farthest counts; not all nodes print.
        yield max(counts, key=lambda count: count.step, default=None)


def _texts(logs: Mapping[int, Sequence[WorkerLog]]) -> Iterator[str]:
    return (log.text for rank in logs.values() for log in rank)


def was_stopped(snapshot: Snapshot) -> bool:
    """Whether a worker that exited with 0 had been asked to stop: it need not have been done."""
    return any(
        worker.stopped_by_agent for status in snapshot.agents.values() for worker in status.workers
    )


def bad_end_of_session(worker: WorkerStatus) -> FalseSuccess | None:
    """Return the agent's objection to a session program that exited with 0."""
    if not worker.ended_early:
        return None
    return FalseSuccess(worker.error or "exit code 0 before the target", FaultClass.USER_CODE_ERROR)
