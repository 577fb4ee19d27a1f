"""The check of workers that exited with 0, in the watch of an attempt: whether they ended well.

A session program says so itself, and its agent knows where it was to end. A command is judged by
the end of its output, once its node has no process of it any more, and by how far it is known to
have come. Steps are completed optimizer steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from perdure.training.diagnosis.counts import BAR, ITERATION, Count, farthest_counts, find_counts
from perdure.training.diagnosis.ending import (
    UNSEEN_NOTE,
    FalseSuccess,
    Output,
    describe_leftovers,
    find_crash,
    judge_leftovers,
    judge_no_sample,
    judge_short_end,
    judge_signal,
    shows_steps,
)
from perdure.training.diagnosis.exits import EXIT_DONE
from perdure.training.diagnosis.stated_end import EndReason, StatedEnd, choose_stated_end
from perdure.training.engines.base import Snapshot
from perdure.training.journal.history import RunHistory
from perdure.training.liveness.heartbeat import Phase
from perdure.training.recovery.faults import FaultClass
from perdure.training.supervisor.early_ranks import EarlyRanks, judge_early_rank
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


@dataclass(frozen=True, slots=True)
class RunSoFar:
    """What earlier attempts of a command have shown, for one that shows nothing.

    Attributes:
        target: last step of the training, as the program prints it; None: not known.
        step: the farthest step; 0: none is known.
        saved_step: the newest complete checkpoint; 0: there is none.
    """

    target: int | None = None
    step: int = 0
    saved_step: int = 0

    @classmethod
    def of(cls, history: RunHistory) -> Self:
        """Read it from the ledger."""
        ended = [view.ended for view in history.attempts if view.ended is not None]
        targets = [end.shown_target for end in ended if end.shown_target is not None]
        step = max((end.to_step or 0 for end in ended), default=0)
        saved_step = history.committed_step
        return cls(targets[-1] if targets else None, max(step, saved_step), saved_step)


NOTHING_SO_FAR = RunSoFar()


def shown_target(history: RunHistory, snapshot: Snapshot | None) -> int | None:
    """Return the last step of the training that a command shows, now or in an earlier attempt."""
    agents = snapshot.agents.values() if snapshot is not None else ()
    shown = [status.shown for status in agents if status.shown is not None]
    targets = [step.target for step in shown if step.target is not None]
    return max(targets) if targets else RunSoFar.of(history).target


@dataclass(slots=True)
class CommandExitCheck:
    """The check of commands that exit with 0: evidence that they have not ended well.

    Attributes:
        target: step that the job's command trains to; None: not known.
        earlier: what earlier attempts have shown.
        setting: target in the arguments of the command; None: they name none.
        false_successes: by rank.
        notes: for the user, about a good end.
        early: ranks that left before the others.
    """

    target: int | None = None
    earlier: RunSoFar = NOTHING_SO_FAR
    setting: int | None = None
    false_successes: dict[int, FalseSuccess] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    early: EarlyRanks = field(default_factory=EarlyRanks)
    _judged_ranks: set[int] = field(default_factory=set)
    _steps: list[int] = field(default_factory=list)
    _shown_target: int | None = None
    _names: dict[int, str] = field(default_factory=dict)
    _left_running: dict[int, tuple[LeftProcess, ...]] = field(default_factory=dict)

    def check(self, progress: Progress) -> WatchResult | None:  # noqa: ARG002 judge() has the exits
        """End the attempt once the exit of a command proved to be no success."""
        return WatchResult(EndKind.FAILED) if self.false_successes else None

    def note(self, snapshot: Snapshot) -> None:
        """Note how far the program has come, and the processes that commands left running."""
        for status in snapshot.agents.values():
            for worker in status.workers:
                is_whole = status.is_launcher
                name = f"the command on {status.node}" if is_whole else f"rank {worker.rank}"
                self._names[worker.rank] = name
            for worker in status.workers[:1]:
                self._left_running[worker.rank] = status.left_running
            if status.shown is not None and status.shown.target is not None:
                self._shown_target = status.shown.target
        statuses = snapshot.agents.values()
        saved = [save.step for status in statuses for save in status.saved]
        steps = [step for status in statuses for step in status.steps] or saved
        step = max(steps, default=-1)
        if step >= 0 and step not in self._steps[-1:]:
            self._steps = [*self._steps[-1:], step]

    def judge_early(
        self, snapshot: Snapshot, read_logs: Callable[[], Mapping[int, Sequence[WorkerLog]]]
    ) -> None:
        """Judge ranks that exited with 0 while the others train."""
        now_s = time.time()
        self.early.note(snapshot, step=self._steps[-1] if self._steps else None, now_s=now_s)
        self.false_successes |= self.early.judge(read_logs, now_s=now_s)

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
            self._judge_end(by_itself[-1].rank, logs)

    def target_shown(self, logs: Mapping[int, Sequence[WorkerLog]]) -> int | None:
        """Return the target that the program itself shows, for the attempts that follow."""
        if self._shown_target is not None:
            return self._shown_target
        printed = self._printed(logs)
        return next((count.target for count in printed if count.is_of_steps), None)

    def printed_step(self, logs: Mapping[int, Sequence[WorkerLog]]) -> int | None:
        """Return the last step that the ends of the output show."""
        return max((count.step for count in self._printed(logs) if count.is_of_steps), default=None)

    def proven_target(self, logs: Mapping[int, Sequence[WorkerLog]]) -> int | None:
        """Return the target of the whole training; a bar in output of any form may be another.

        A target that the program shows may be an epoch's: nothing that it counts is short of its
        end then.
        """
        if self.target is not None:
            return self.target
        printed = self._printed(logs)
        if any(count.is_short for count in printed):
            return None
        iterations = (count.target for count in printed if count.name == ITERATION)
        return self._shown_target or next(iterations, None)

    def _judge_left(self, ranks: Collection[int], logs: Mapping[int, Sequence[WorkerLog]]) -> None:
        """Judge processes that outlive their script: harmless, unless training had not finished."""
        counts = self._counts(logs)
        has_finished = bool(counts) and not any(count.is_short for count in counts)
        for rank in ranks:
            left = self._left_running.get(rank, ())
            training = [process.name for process in left if process.trains]
            if training and not has_finished:
                self.false_successes[rank] = judge_leftovers(training)
            elif left:
                self.notes.append(describe_leftovers([process.name for process in left]))

    def _judge_end(self, rank: int, logs: Mapping[int, Sequence[WorkerLog]]) -> None:
        """Judge how far the program came, once no process of it is left."""
        counts = self._counts(logs)
        short = next((count for count in counts if count.is_short), None)
        stated = choose_stated_end(_texts(logs), is_short=short is not None)
        # Megatron prints its last iteration; others may count from 0, or show every tenth step.
        is_there = short is None and any(
            count.is_of_steps and (count.name != ITERATION or count.step >= count.target)
            for count in counts
        )
        # A rank that a signal ended: the others may have come to the end without it.
        ranks = (
            (other, judge_early_rank(other, logs, name=name, went_on=False))
            for other, name in self._names.items()
            if len(self._names) > 1
        )
        early = next(((other, bad) for other, bad in ranks if bad is not None), None)
        bad: FalseSuccess | None
        if short is not None:
            bad = judge_short_end(short, stated, has_stepped=self._has_stepped(logs))
        elif stated is not None and stated.reason is EndReason.SIGNAL and not is_there:
            bad = judge_signal("; ".join((*(count.text for count in counts[:1]), stated.line)))
        elif early is not None:
            rank, bad = early
        elif stated is not None and not counts and self.earlier.step and self._lacks_sample(stated):
            bad = judge_no_sample(stated.line)
        else:
            bad = None
        if bad is not None:
            self.false_successes[rank] = bad
        elif short is not None and stated is not None:
            self.notes.append(f"{short.text} by a rule of the program: {stated.line}")
        elif not self._steps and not any(map(shows_steps, _texts(logs))):
            self.notes.append(UNSEEN_NOTE)

    def _lacks_sample(self, stated: StatedEnd) -> bool:
        return stated.reason is EndReason.NO_SAMPLE and not self._steps

    def _has_stepped(self, logs: Mapping[int, Sequence[WorkerLog]]) -> bool:
        """Whether this attempt has completed a step; a bar that resumes is drawn before it."""
        if not self.earlier.step or len(self._steps) > 1:
            return True
        counts = [count for count in self._printed(logs) if count.is_of_steps]
        farthest = max((*self._steps, *(count.step for count in counts)), default=0)
        return farthest > self.earlier.step or any(count.stride < count.step for count in counts)

    def _printed(self, logs: Mapping[int, Sequence[WorkerLog]]) -> list[Count]:
        """Read the counts of all outputs."""
        texts = list(_texts(logs))
        return farthest_counts(
            count for text in texts for count in find_counts(text, setting=self.setting)
        )

    def _counts(self, logs: Mapping[int, Sequence[WorkerLog]]) -> list[Count]:
        """List how far this attempt, or the run, came; the job's own target goes before others."""
        printed = self._printed(logs)
        of_steps = [count for count in printed if count.is_of_steps]
        if self.target is not None:
            printed = [
                replace(count, target=self.target)
                for count in of_steps
                if count.target == self.target or count.name != BAR
            ][:1]
        target = self.target or self._shown_target or self.earlier.target
        if target is None:
            return printed
        if self._steps:
            step, is_first = self._steps[-1], len(self._steps) == 1
            stride = round(UNSEEN_STRIDE * target) if is_first else step - self._steps[0]
            count = Count(step, target, max(1, stride))
            return [count] if self.target is not None else [count, *printed]
        if not of_steps and self.earlier.step:
            return [Count(self.earlier.step, target, 1), *printed]
        return printed


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
