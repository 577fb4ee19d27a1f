"""The evidence about the end of an attempt: the reports of agents in the terms of a diagnosis.

Times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from perdure.training.diagnosis.evidence import CoordinatorLost, SilentRank
from perdure.training.engines.base import Snapshot
from perdure.training.journal.events import StepRecord
from perdure.training.journal.time_account import SeenStep
from perdure.training.wire.agent_status import AgentState, AgentStatus, HangReport
from perdure.training.wire.logs import WorkerLog
from perdure.training.wire.rank_snapshot import RankSnapshot

ENDED = "Z"  # the kernel's letter


def silent_of(
    statuses: Iterable[AgentStatus], *, ends_attempt: bool = True
) -> Iterator[SilentRank]:
    """List the ranks that agents report as silent for too long."""
    for status in statuses:
        if status.hang is not None and status.hang.ends_attempt == ends_attempt:
            hang = status.hang
            yield SilentRank(
                None if status.is_command else hang.rank,
                status.node,
                hang.silent_s,
                hang.limit_s,
                hang.phase,
                _why_silent(hang),
                hang.stopped,
                hang.field,
                hang.is_slow_start,
                hang.is_busy,
            )


def _why_silent(hang: HangReport) -> str:
    """Say what shows it for a command: the rank whose heartbeat stands still may only wait."""
    if hang.why or hang.rank is None:
        return hang.why
    return f"by the heartbeat of rank {hang.rank}, after step {hang.step}"


def progress_of(statuses: Iterable[AgentStatus]) -> Iterator[RankSnapshot]:
    """List the ranks that live, as far as they are known."""
    for status in statuses:
        for rank in RankSnapshot.all_of(status):
            if rank.process_state != ENDED:
                yield rank


def newest_of(snapshot: Snapshot, *, now_s: float) -> SeenStep | None:
    """Return the newest step of a command that its ranks have completed, or printed."""
    steps = [
        SeenStep(rank.step, now_s - rank.pulse.step_age_s)
        for status in snapshot.agents.values()
        if status.is_command
        for rank in status.ranks
        if rank.step is not None and rank.pulse is not None and rank.pulse.step_age_s is not None
    ]
    shown = [status.shown for status in snapshot.agents.values() if status.shown is not None]
    steps += [SeenStep(output.step, now_s - output.age_s) for output in shown]
    return max(steps, key=lambda step: (step.step, -step.at_s), default=None)


def first_of(snapshot: Snapshot, *, now_s: float) -> SeenStep | None:
    """Return the first step that the output of a command shows, else the newest that it has.

    A busy supervisor polls a program only after its second step, or its third.
    """
    shown = [status.shown for status in snapshot.agents.values() if status.shown is not None]
    first_steps = [
        SeenStep(output.first_step, now_s - output.first_age_s)
        for output in shown
        if output.first_step is not None
    ]
    newest = newest_of(snapshot, now_s=now_s)
    return min(first_steps, key=lambda step: step.at_s, default=newest)


def step_of(snapshot: Snapshot, last: StepRecord | None) -> int | None:
    """Return the last step that every rank has completed, by heartbeats or records."""
    beats = [step for status in snapshot.agents.values() for step in status.steps]
    if beats:
        # A step that one rank has applied was voted, and every rank applies it.
        return max(beats)
    return last.step if last is not None else None


def log_path_of(logs: Sequence[WorkerLog]) -> str | None:
    """Return where to read on: the first stream, unless nothing was printed there."""
    return next((log.path for log in sorted(logs, key=lambda log: not log.text)), None)


def lost_coordinators(statuses: Iterable[AgentStatus]) -> Iterator[CoordinatorLost]:
    """List the coordinator where it has ended by itself."""
    for status in statuses:
        end = status.coordinator_end
        if end is not None:
            yield CoordinatorLost(
                status.node, end.exit_code, end.ended_s, end.line, end.was_stopped
            )


def starting_nodes(snapshot: Snapshot) -> list[str]:
    """List nodes that have not begun, so that `over` does not mean the end yet."""
    waiting = (AgentState.IDLE, AgentState.STAGING)
    return [status.node for status in snapshot.agents.values() if status.state in waiting]


def unfinished_nodes(snapshot: Snapshot) -> list[str]:
    """List nodes whose processes did not end when ordered: they count as lost."""
    alive = [status.node for status in snapshot.agents.values() if not status.is_over]
    return [*alive, *snapshot.unanswered]
