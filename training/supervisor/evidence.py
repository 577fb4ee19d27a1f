"""The evidence about the end of an attempt: the reports of agents in the terms of a diagnosis.

Times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from perdure.training.diagnosis.ending import FalseSuccess
from perdure.training.diagnosis.evidence import CoordinatorLost, NodeOutput, SilentRank, WorkerEnd
from perdure.training.engines.base import Snapshot
from perdure.training.engines.fleet import Fleet
from perdure.training.journal.events import StepRecord
from perdure.training.journal.time_account import SeenStep
from perdure.training.liveness.culprit import RankProgress
from perdure.training.liveness.heartbeat import Phase
from perdure.training.recovery.faults import FaultClass
from perdure.training.wire.agent import AgentStatus, HangReport, WorkerStatus
from perdure.training.wire.logs import WorkerLog

LOG_TAIL_BYTES = 64 * 1024
DEVICE_LOG_TAIL_BYTES = 64 * 1024
ENDED = "Z"  # the kernel's letter


def logs_by_rank(fleet: Fleet) -> dict[int, list[WorkerLog]]:
    """Fetch the ends of the output of the workers."""
    logs: dict[int, list[WorkerLog]] = {}
    for _, log in fleet.logs(LOG_TAIL_BYTES):
        logs.setdefault(log.rank, []).append(log)
    return logs


def outputs_of(fleet: Fleet, *, started_s: float) -> Iterator[NodeOutput]:
    """Fetch the other texts of the nodes: device logs, reports of tools and platform.

    Args:
        fleet: where the attempt runs.
        started_s: when the attempt was started; an earlier report of the platform is not its end.
    """
    for node, text in fleet.texts(DEVICE_LOG_TAIL_BYTES, since_s=started_s):
        yield NodeOutput(node, text.name, text.text, rank=text.rank, device=text.device)


def ends_of(
    statuses: Sequence[AgentStatus],
    logs: Mapping[int, Sequence[WorkerLog]],
    false_successes: Mapping[int, FalseSuccess],
) -> Iterator[WorkerEnd]:
    """Describe how each worker has ended.

    Args:
        statuses: by their agents.
        logs: the ends of the output, by rank.
        false_successes: by rank, of commands that exited with 0.
    """
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
                bad_end=false_successes.get(worker.rank) or bad_end_of_session(worker),
            )


def bad_end_of_session(worker: WorkerStatus) -> FalseSuccess | None:
    """Return the agent's objection to a session program that exited with 0."""
    if not worker.ended_early:
        return None
    return FalseSuccess(worker.error or "exit code 0 before the target", FaultClass.USER_CODE_ERROR)


def _log_path(logs: Sequence[WorkerLog]) -> str | None:
    """Return where to read on: the first stream, unless nothing was printed there."""
    return next((log.path for log in sorted(logs, key=lambda log: not log.text)), None)


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
            )


def coordinators_lost(statuses: Iterable[AgentStatus]) -> Iterator[CoordinatorLost]:
    """List the coordinator where it has ended by itself."""
    for status in statuses:
        end = status.coordinator_end
        if end is not None:
            yield CoordinatorLost(
                status.node, end.exit_code, end.ended_s, end.line, end.was_stopped
            )


def _why_silent(hang: HangReport) -> str:
    """Say what shows it for a command: the rank whose heartbeat stands still may only wait."""
    if hang.why or hang.rank is None:
        return hang.why
    return f"by the heartbeat of rank {hang.rank}, after step {hang.step}"


def progress_of(statuses: Iterable[AgentStatus]) -> Iterator[RankProgress]:
    """List the progress of every rank that lives, as far as it is known."""
    for status in statuses:
        for worker in status.known_ranks:
            if worker.rank is None or worker.pulse is None or worker.exit_code is not None:
                continue
            if worker.pulse.process_state == ENDED:
                continue
            yield RankProgress(
                rank=worker.rank,
                node=status.node,
                device=worker.local_rank,
                step=worker.step if worker.step is not None else -1,
                phase=worker.phase or ("" if status.is_command else Phase.START.name.lower()),
                entered=worker.pulse.entered,
                left=worker.pulse.left,
                operation=worker.pulse.operation,
                silent_s=worker.pulse.beat_s,
                process_state=worker.pulse.process_state,
                counts_collectives=not status.is_command,
            )


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


def step_of(snapshot: Snapshot, last: StepRecord | None) -> int | None:
    """Return the last step that every rank has completed, by heartbeats or records."""
    beats = [step for status in snapshot.agents.values() for step in status.steps]
    if beats:
        # A step that one rank has applied was voted, and every rank applies it.
        return max(beats)
    return last.step if last is not None else None
