"""Ranks of a command that exit with 0 while others are there, in the watch of an attempt.

Uneven data or an early `return` ends a rank, and the others wait for it, or fail because they miss
it: the rank that left is the first cause. Ranks also end one after the other when the training is
over, so that a rank alone proves nothing. A signal to one rank is stated in its own output.

Times are seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from perdure.training.diagnosis.counts import Count, farthest_counts, find_counts
from perdure.training.diagnosis.ending import (
    RANK_CODE,
    RANK_WHY,
    FalseSuccess,
    judge_signal,
)
from perdure.training.diagnosis.evidence import EndedRank
from perdure.training.diagnosis.exits import EXIT_DONE
from perdure.training.diagnosis.stated_end import EndReason, choose_stated_end
from perdure.training.engines.base import Snapshot
from perdure.training.recovery.faults import FaultClass
from perdure.training.wire.agent_status import AgentStatus
from perdure.training.wire.logs import WorkerLog

# Further steps of the others that show that they train on without it.
MARGIN_STEPS = 3
# The others may be saving for the same signal.
WAIT_S = 60.0
POLL_S = 5.0

Logs = Mapping[int, Sequence[WorkerLog]]


@dataclass(slots=True)
class EarlyRanks:
    """The ranks of one attempt that left before the others."""

    _ended: dict[tuple[str, int | None], EndedRank] = field(default_factory=dict)
    # Those with output of their own, by its number: since when, and the step then.
    _open: dict[int, tuple[float, int | None, EndedRank]] = field(default_factory=dict)
    _polled_s: float = float("-inf")

    def note(self, snapshot: Snapshot, *, step: int | None, now_s: float) -> None:
        """Note the ranks that have ended since the last poll, and whether the others train on.

        Args:
            snapshot: of the members.
            step: the newest step; None: not known.
            now_s: the time.
        """
        statuses = list(snapshot.agents.values())
        workers = [worker for status in statuses for worker in status.workers]
        if all(worker.exit_code == EXIT_DONE for worker in workers):
            self._open.clear()  # the end of all is judged as a whole
            return
        for ended, log in _ended_ranks(statuses, step):
            key = ended.node, ended.rank
            if key not in self._ended:
                self._ended[key] = ended
                if log is not None:
                    self._open[log] = (now_s, ended.step, ended)
        for key, ended in self._ended.items():
            if _has_gone_on(ended.step, step):
                self._ended[key] = replace(ended, went_on=True)

    def ranks(self, *, step: int | None) -> tuple[EndedRank, ...]:
        """List the ranks that have left, as evidence.

        Args:
            step: the last step of the attempt, where nothing showed it when they left.
        """
        ended = self._ended.values()
        return tuple(rank if rank.step is not None else replace(rank, step=step) for rank in ended)

    def judge(self, read_logs: Callable[[], Logs], *, now_s: float) -> dict[int, FalseSuccess]:
        """Find the ranks whose own output shows that they left too early.

        Args:
            read_logs: reads the ends of the output of all ranks.
            now_s: the time.
        """
        if not self._open or now_s - self._polled_s < POLL_S:
            return {}
        self._polled_s = now_s
        logs = read_logs()
        newest = max((count.step for count in _counts_of(logs)), default=None)
        bad: dict[int, FalseSuccess] = {}
        for log, (since_s, step_then, ended) in list(self._open.items()):
            step = step_then if step_then is not None else newest
            self._open[log] = (since_s, step, ended)
            went_on = self._ended[ended.node, ended.rank].went_on or _has_gone_on(step, newest)
            if went_on or now_s - since_s >= WAIT_S:
                del self._open[log]
                early_end = judge_early_rank(log, logs, name=ended.name, went_on=went_on)
                bad |= {log: early_end} if early_end is not None else {}
        return bad


def judge_early_rank(rank: int, logs: Logs, *, name: str, went_on: bool) -> FalseSuccess | None:
    """Judge a rank by its own output; None: it does not show that the rank left too early.

    Args:
        rank: number of its output.
        logs: the ends of the output.
        name: its name in messages.
        went_on: whether other ranks have trained on.
    """
    counts = _counts_of({rank: logs.get(rank, ())})
    short = next((count for count in counts if count.is_short), None)
    texts = (log.text for log in logs.get(rank, ()))
    stated = choose_stated_end(texts, is_short=short is not None)
    ended = f"{short.text}" if short is not None else "ended"
    if stated is not None and stated.reason is EndReason.SIGNAL and (short or not counts):
        return judge_signal(f"{name} {ended}: {stated.line}")
    if short is None or not went_on:
        return None
    line = f" ({stated.line})" if stated is not None else ""
    return FalseSuccess(
        f"{name} {ended} with exit code 0, while the other ranks trained on{line}",
        FaultClass.UNKNOWN, RANK_WHY, code=RANK_CODE,
    )  # fmt: skip


def _counts_of(logs: Logs) -> list[Count]:
    texts = (log.text for rank in logs.values() for log in rank)
    return farthest_counts(count for text in texts for count in find_counts(text))


def _has_gone_on(step: int | None, newest: int | None) -> bool:
    return step is not None and newest is not None and newest >= step + MARGIN_STEPS


def _ended_ranks(
    statuses: Sequence[AgentStatus], step: int | None
) -> Iterator[tuple[EndedRank, int | None]]:
    """List what has exited with 0, with the number of its own output, if it has any."""
    for status in statuses:
        for former in status.former_ranks:
            at = former.step if former.step is not None else step
            yield EndedRank(former.rank, status.node, former.local_rank, former.ended_s, at), None
        for worker in status.workers:
            if worker.exit_code == EXIT_DONE and not worker.stopped_by_agent:
                rank = None if status.is_launcher else worker.rank
                device = None if status.is_launcher else worker.local_rank
                yield EndedRank(rank, status.node, device, worker.ended_s, step), worker.rank
