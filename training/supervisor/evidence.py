"""What agents report at the end of an attempt, in the terms of a diagnosis. Times are seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from perdure.training.diagnosis.evidence import CoordinatorLost, NodeOutput, SilentRank, WorkerEnd
from perdure.training.engines.base import Snapshot
from perdure.training.engines.fleet import Fleet
from perdure.training.journal.events import StepRecord
from perdure.training.journal.time_account import SeenStep
from perdure.training.supervisor.exit_zero import CommandExitCheck, bad_end_of_session
from perdure.training.wire.agent import AgentStatus, HangReport
from perdure.training.wire.logs import WorkerLog
from perdure.training.wire.rank_snapshot import RankSnapshot

LOG_TAIL_BYTES = 64 * 1024
DEVICE_LOG_TAIL_BYTES = 64 * 1024
ENDED = "Z"  # the kernel's letter


def logs_by_rank(fleet: Fleet) -> dict[int, list[WorkerLog]]:
    """The ends of what the workers have printed."""
    found: dict[int, list[WorkerLog]] = {}
    for _, log in fleet.logs(LOG_TAIL_BYTES):
        found.setdefault(log.rank, []).append(log)
    return found


def outputs_of(fleet: Fleet, *, started_s: float) -> Iterator[NodeOutput]:
    """What the nodes know beside that: device logs, what tools and platform report.

    Args:
        fleet: of the run.
        started_s: when the attempt was; what the platform reported before is not its end.
    """
    for node, one in fleet.texts(DEVICE_LOG_TAIL_BYTES, since_s=started_s):
        yield NodeOutput(node, one.name, one.text, rank=one.rank, device=one.device)


def ends_of(
    statuses: Sequence[AgentStatus],
    logs: dict[int, list[WorkerLog]],
    command_ends: CommandExitCheck | None,
) -> Iterator[WorkerEnd]:
    """How each worker has ended."""
    bad = command_ends.bad if command_ends is not None else {}
    for status in statuses:
        for worker in status.workers:
            if worker.exit_code is None or worker.ended_s is None:
                continue
            yield WorkerEnd(
                # A launcher has all the ranks of its node.
                rank=None if status.is_launcher else worker.rank,
                node=status.node,
                device=None if status.is_launcher else worker.local_rank,
                exit_code=worker.exit_code,
                # Ends come in any order after the errors; the first error is nearest to the cause.
                ended_s=worker.error_s or worker.ended_s,
                error=worker.error,
                log="".join(log.text for log in logs.get(worker.rank, [])),
                log_path=_log_path(logs.get(worker.rank, [])),
                stopped=worker.stopped_by_agent,
                bad_end=bad.get(worker.rank) or bad_end_of_session(worker),
            )


def _log_path(logs: Sequence[WorkerLog]) -> str | None:
    """Where to read on: the first stream, unless nothing was printed there."""
    return next((log.path for log in sorted(logs, key=lambda log: not log.text)), None)


def silent_of(
    statuses: Iterable[AgentStatus], *, ends_attempt: bool = True
) -> Iterator[SilentRank]:
    """The ranks that agents have found to be silent for too long."""
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
            )


def coordinators_lost(statuses: Iterable[AgentStatus]) -> Iterator[CoordinatorLost]:
    """The coordinator, where it has ended by itself."""
    for status in statuses:
        end = status.coordinator_end
        if end is not None:
            yield CoordinatorLost(
                status.node, end.exit_code, end.ended_s, end.line, end.was_stopped
            )


def _why_silent(hang: HangReport) -> str:
    """What shows it, for a command: the rank whose heartbeat stands still may be a waiting one."""
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
    """The newest step of a command that its ranks have completed, or shown, since their start."""
    found = [
        SeenStep(rank.step, now_s - rank.pulse.step_age_s)
        for status in snapshot.agents.values()
        if status.is_command
        for rank in status.ranks
        if rank.step is not None and rank.pulse is not None and rank.pulse.step_age_s is not None
    ]
    shown = [status.shown for status in snapshot.agents.values() if status.shown is not None]
    found += [SeenStep(one.step, now_s - one.age_s) for one in shown]
    return max(found, key=lambda one: (one.step, -one.at_s), default=None)


def step_of(snapshot: Snapshot, last: StepRecord | None) -> int | None:
    """The last step that every rank is known to have completed, by heartbeats or records."""
    beats = [step for status in snapshot.agents.values() for step in status.steps]
    if beats:
        # A step that one rank has applied was voted, and every rank applies it.
        return max(beats)
    return last.step if last is not None else None
