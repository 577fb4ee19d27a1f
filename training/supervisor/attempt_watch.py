"""The watch over an attempt from outside, until no process of it is left.

The watch decides nothing about recovery: it notices the first failure, lets the others report
theirs, has everything stopped, and hands the evidence on. Times are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from perdure.training.agent.preparation import leaving_grace_s
from perdure.training.config.job import Job
from perdure.training.diagnosis.counts import find_target
from perdure.training.diagnosis.ending import FalseSuccess
from perdure.training.diagnosis.evidence import (
    Evidence,
    NodeOutput,
    SilentRank,
    SlowNode,
    SmallWorld,
    WorkerEnd,
)
from perdure.training.engines.base import Snapshot
from perdure.training.engines.fleet import Fleet
from perdure.training.errors import EngineError
from perdure.training.journal.attempt_log import Follower
from perdure.training.liveness.hang_limits import START_FIELD
from perdure.training.recovery.faults import Fault
from perdure.training.recovery.protocol import AttemptGivenUp
from perdure.training.supervisor.evidence import (
    log_path_of,
    lost_coordinators,
    newest_of,
    progress_of,
    silent_of,
    starting_nodes,
    step_of,
    unfinished_nodes,
)
from perdure.training.supervisor.exit_zero import (
    CommandExitCheck,
    RunSoFar,
    bad_end_of_session,
    is_done,
    was_stopped,
)
from perdure.training.supervisor.termination import MARGIN_S, Termination
from perdure.training.supervisor.watch import (
    AttemptEnd,
    AttemptStart,
    AttemptWatcher,
    Culprit,
    EndKind,
    Progress,
    WatchResult,
    first_culprit,
)
from perdure.training.supervisor.world_check import WorldCheck
from perdure.training.wire.agent import NodeLog
from perdure.training.wire.agent_status import AgentStatus
from perdure.training.wire.logs import WorkerLog

LOG_TAIL_BYTES = 64 * 1024
DEVICE_LOG_TAIL_BYTES = 64 * 1024

SETTLE_S = 1.0  # survivors saw a death over gloo within 34 ms
HANG_GRACE_S = 3.0  # ModelArts ends what hangs by force, too; it only needs time to print
STOP_MARGIN_S = 20.0
# At the end of an allocation, there is no time for them.
_WITHOUT_LOGS = frozenset({EndKind.COMPLETED, EndKind.ENDED_FROM_OUTSIDE})


@dataclass(frozen=True, slots=True)
class _Failure:
    """The first failure, and the state of the attempt then."""

    at_s: float
    snapshot: Snapshot
    refusal: str | None = None
    culprit: Culprit | None = None
    stacks: tuple[tuple[str, NodeLog], ...] = ()
    given_up: AttemptGivenUp | None = None
    silent: tuple[SilentRank, ...] = ()
    is_late_start: bool = False


class AttemptWatch:
    """Watches the attempt that `fleet` is running.

    Args:
        fleet: where the attempt runs.
        job: its limits say how long processes get to start and to end.
        start: its key and its time.
        stop_wanted: asked at every poll.
        on_progress: called at every poll with what is new, and once more at the end of the log.
        watchers: asked at every poll, in their order; the culprit of the first counts.
        termination: SIGTERM to this process; None: it ends this process by itself.
    """

    def __init__(
        self,
        fleet: Fleet,
        job: Job,
        start: AttemptStart,
        *,
        stop_wanted: Callable[[], bool],
        on_progress: Callable[[Progress], None],
        watchers: Sequence[AttemptWatcher] = (),
        termination: Termination | None = None,
    ) -> None:
        self._fleet = fleet
        self._start = start
        self._start_timeout_s = start.factor * job.restart.start_timeout_s
        self._request_grace_s = job.engine.grace_s
        self._leaving_grace_s = leaving_grace_s(job, job.engine.grace_s)
        # Below 0: the others end by themselves, unless that is a hang or a stop is wanted.
        self._failover_grace_s = job.restart.failover_grace_s
        self._restart_codes = job.worker.restart_codes
        self._hang_limit_s = job.watch.command_quiet_s
        self._stop_wanted = stop_wanted
        self._on_progress = on_progress
        self._termination = termination or Termination()
        self._target, self._saved_step = job.target_step, 0
        is_command = job.worker.is_command
        setting = find_target(" ".join(job.worker.command or ()))
        exits = CommandExitCheck(job.target_step, setting=setting) if is_command else None
        self._exit_check = exits
        worlds = WorldCheck(job, self._logs) if job.worker.is_launcher else None
        of_command = (watcher for watcher in (worlds, exits) if watcher is not None)
        self._watchers: Sequence[AttemptWatcher] = (*watchers, *of_command)
        self._log, self._log_container = self._follower(), ""
        self._progress = Progress()
        self._proc_start_cnt: dict[str, int] = {}
        # While this process waited for the store.
        self._stop_ordered = self._ended_on_request = False

    def know(self, so_far: RunSoFar) -> None:
        """Take what earlier attempts of the run have shown; it is called before `run`."""
        self._saved_step = so_far.saved_step
        if self._exit_check is not None:
            self._exit_check.earlier = so_far

    def stop_where_wanted(self) -> None:
        """Have the processes end on a request that comes while their end cannot be recorded."""
        if self._stop_ordered or not self._stop_wanted():
            return
        with suppress(EngineError):  # another supervisor has the run
            # A fault comes first all the same: it is still to be recorded.
            self._ended_on_request = not _has_failure(self._poll())
            self._fleet.stop(self._request_grace_s)
            self._stop_ordered = True

    def _follower(self) -> Follower:
        return Follower(partial(self._fleet.metrics, of_attempt=self._start.key))

    def _poll(self) -> Snapshot:
        return self._fleet.poll().of_attempt(*self._start.key)

    def run(self) -> AttemptEnd:
        """Watch to the end; every process of the attempt is gone when this returns."""
        began_s = time.monotonic()
        while True:
            snapshot = self._observe()
            if self._termination.is_wanted:
                if self.is_from_outside(snapshot):
                    return self.end_from_outside()
                if self._termination.is_alone():
                    self._termination.leave_now()
            answers = [watcher.check(self._progress) for watcher in self._watchers]
            results = [result for result in answers if result is not None]
            is_late = time.monotonic() - began_s > self._start_timeout_s
            end = self._end_after(results, is_late=is_late)
            if end is not None:
                return end
            time.sleep(self._fleet.poll_s)

    def _end_after(self, results: Sequence[WatchResult], *, is_late: bool) -> AttemptEnd | None:
        """End the attempt where a poll shows that it is over, or has to be.

        Args:
            results: of the watchers.
            is_late: whether every node should have started its processes by now.
        """
        snapshot = self._progress.snapshot
        answered = frozenset[str]().union(*(result.answered_nodes for result in results))
        has_failed = _has_failure(snapshot, answered)
        ends = [result.end for result in results]
        request = EndKind.STOPPED if self._stop_wanted() else None
        if request is None and EndKind.RESTARTED in ends:
            request = EndKind.RESTARTED
        # A fault comes before a request to stop: else nobody would learn of it.
        is_fault = has_failed or any(result.is_fault for result in results)
        if request is not None and (not is_fault or self._ended_on_request):
            return self._end_on_request(request)
        if EndKind.FAILED in ends:
            return self.wind_up(culprit=first_culprit(results, EndKind.FAILED))
        if _all_done(snapshot):
            return self._end(EndKind.COMPLETED, snapshot)
        starting = [node for node in starting_nodes(snapshot) if node not in answered]
        if starting and is_late:
            text = (
                f"{', '.join(starting)} did not start within {self._start_timeout_s:g} s "
                f"(raise {START_FIELD} if it needs longer)"
            )
            return self.wind_up(refusal=text, is_late_start=True)
        if has_failed or (snapshot.is_over and not starting):
            return self.wind_up()
        culprit = first_culprit(results, None)
        return self.wind_up(culprit=culprit) if culprit is not None else None

    def _end_on_request(self, request: EndKind) -> AttemptEnd:
        self._fleet.stop(self._request_grace_s)
        final = self._await_end(self._request_grace_s)
        exits = self._exit_check
        # It may have come to its target before.
        is_completed = _all_done(final)
        if exits is not None and (exits.false_successes or was_stopped(final)):
            is_completed = False
        return self._end(EndKind.COMPLETED if is_completed else request, final)

    def is_from_outside(self, snapshot: Snapshot) -> bool:
        """Whether SIGTERM has come to this process and all agents, or ends its whole container.

        A node that is drained takes some agents, and maybe this process, and the attempt goes on.
        """
        if not self._termination.is_wanted or self._termination.owns_machine:
            return self._termination.is_wanted
        if snapshot.agents:
            return all(status.is_terminated for status in snapshot.agents.values())
        return self._fleet.are_terminated

    def end_from_outside(self) -> AttemptEnd:
        """Let the agents end the attempt, with its last save, as far as the platform's grace goes.

        An agent that has shown how its processes ended goes away at once.
        """
        termination, grace_s = self._termination, self._leaving_grace_s
        assert termination.since_s is not None  # noqa: S101 asked by the callers
        if termination.owns_machine:
            self._fleet.stop(grace_s)
        snapshot, agents = self._progress.snapshot, dict(self._progress.snapshot.agents)
        deadline_s = termination.since_s + grace_s + MARGIN_S
        while time.monotonic() < deadline_s:
            if not snapshot.agents or (termination.owns_machine and snapshot.is_over):
                break
            time.sleep(self._fleet.poll_s)
            snapshot = self._observe()
            agents |= snapshot.agents
        final = Snapshot(agents)
        is_completed = _all_done(final) and self._has_reached_target(final)
        return self._end(EndKind.COMPLETED if is_completed else EndKind.ENDED_FROM_OUTSIDE, final)

    def _has_reached_target(self, final: Snapshot) -> bool:
        """Whether exits with 0 are the end of the training: a command may save on SIGTERM, too."""
        if self._exit_check is None:
            return True
        step, target = step_of(final, self._progress.last), self._exit_check.target
        return step is not None and target is not None and step >= target

    def wind_up(
        self,
        *,
        refusal: str | None = None,
        is_late_start: bool = False,
        culprit: Culprit | None = None,
    ) -> AttemptEnd:
        """Let the others report after the first failure, stop them, and poll once more.

        Args:
            refusal: why processes could not be started, when that is the failure.
            is_late_start: whether it is that nodes took too long.
            culprit: what the attempt ends for, when nothing else has happened.
        """
        at_s = time.time()
        time.sleep(SETTLE_S)
        failed = self._observe()
        if self.is_from_outside(failed):  # ranks may have ended before the signal came here
            return self.end_from_outside()
        # An event that the coordinator writes later follows from the order to stop.
        given_up = self._progress.given_up
        silent = tuple(silent_of(failed.agents.values()))
        silent = silent or ((culprit,) if isinstance(culprit, SilentRank) else ())
        # Before the order to stop, which would change them.
        stacks = tuple(self._fleet.stacks()) if silent else ()
        # Ranks that all live can save together; peers of a dead one cannot.
        all_live = isinstance(culprit, SlowNode | Fault)
        grace_s = self._request_grace_s if all_live else self._failover_grace_s
        grace_s = HANG_GRACE_S if silent else grace_s
        self._fleet.stop(grace_s)
        final = self._await_end(grace_s) if grace_s >= 0 else self._await_unforced_end()
        if self.is_from_outside(final):
            return self.end_from_outside()
        lost = tuple(dict.fromkeys((*failed.lost, *final.lost, *unfinished_nodes(final))))
        failure = _Failure(at_s, failed, refusal, culprit, stacks, given_up, silent, is_late_start)
        return self._end(EndKind.FAILED, Snapshot(final.agents, lost), failure)

    def end_of_failure(self) -> AttemptEnd | None:
        """Wind the attempt up where it has failed already; None: it has not."""
        return self.wind_up() if _has_failure(self._poll()) else None

    def _await_end(self, grace_s: float) -> Snapshot:
        deadline_s = time.monotonic() + grace_s + STOP_MARGIN_S
        snapshot = self._observe()
        while not snapshot.is_over and time.monotonic() < deadline_s:
            time.sleep(self._fleet.poll_s)
            snapshot = self._observe()
        return snapshot

    def _await_unforced_end(self) -> Snapshot:
        """Wait for processes that end by themselves, until that is a hang."""
        deadline_s = time.monotonic() + self._hang_limit_s
        snapshot = self._observe()
        while not snapshot.is_over and time.monotonic() < deadline_s and not self._stop_wanted():
            time.sleep(self._fleet.poll_s)
            snapshot = self._observe()
        if snapshot.is_over:
            return snapshot
        grace_s = self._request_grace_s if self._stop_wanted() else HANG_GRACE_S
        self._fleet.stop(grace_s)
        return self._await_end(grace_s)

    def _observe(self) -> Snapshot:
        self._read_log()
        progress = self._progress
        progress.take_snapshot(self._poll(), at_s=time.time())
        self._saved_step = max(self._saved_step, *progress.checkpoints, 0)
        for status in progress.snapshot.agents.values():
            self._proc_start_cnt[status.node] = status.proc_start_cnt
        if self._exit_check is not None:
            self._judge_exits(self._exit_check, progress.snapshot)
        self._on_progress(progress)
        return progress.snapshot

    def _judge_exits(self, exits: CommandExitCheck, snapshot: Snapshot) -> None:
        """Judge whether commands that exited with 0 have ended well."""
        exits.note(snapshot)
        exits.judge_early(snapshot, self._logs)
        unjudged = exits.unjudged(snapshot)
        if unjudged:
            exits.judge(unjudged, self._logs(), is_last=_all_done(snapshot))

    def _read_log(self) -> bool:
        """Read on in the attempt log. Returns whether there was more of it."""
        first = self._fleet.first_container
        if first != self._log_container:  # the first node was lost: another log begins elsewhere
            self._log, self._log_container = self._follower(), first
            self._progress.begin_log()
        events, progress = self._log.read(), self._progress
        progress.take(events or ())
        self._saved_step = max(self._saved_step, *progress.checkpoints, 0)
        return events is not None

    def _read_log_to_its_end(self) -> None:
        """Read what the processes wrote last, which the decision about their end needs."""
        while self._read_log():
            self._progress.at_s = time.time()
            self._on_progress(self._progress)

    def _end(
        self, kind: EndKind, snapshot: Snapshot, failure: _Failure | None = None
    ) -> AttemptEnd:
        self._read_log_to_its_end()
        failure = failure or _Failure(time.time(), snapshot)
        culprit = failure.culprit
        logs = {} if kind in _WITHOUT_LOGS else self._logs()
        exits = self._exit_check
        last, shown = self._progress.last, newest_of(snapshot, now_s=time.time())
        step = step_of(snapshot, last)
        step = exits.printed_step(logs) if step is None and exits is not None else step
        statuses = list(snapshot.agents.values())
        evidence = Evidence(
            at_s=failure.at_s,
            step=step,
            workers=tuple(_worker_ends(statuses, logs, exits.false_successes if exits else {})),
            lost_nodes=snapshot.lost,
            losses=self._fleet.losses(snapshot.lost) if kind is EndKind.FAILED else (),
            silent=failure.silent,
            staging_errors={s.node: s.staging_error for s in statuses if s.staging_error},
            unwritable=_unwritable(failure.snapshot, snapshot),
            oom_nodes=tuple(s.node for s in statuses if s.oom_kills),
            refusal=failure.refusal,
            is_late_start=failure.is_late_start,
            outputs=tuple(self._outputs()) if kind is EndKind.FAILED else (),
            rank_progress=tuple(progress_of(failure.snapshot.agents.values())),
            slow=culprit if isinstance(culprit, SlowNode) else None,
            chip=culprit if isinstance(culprit, Fault) else None,
            chips=tuple(self._progress.chips),
            given_up=failure.given_up,
            coordinator=next(lost_coordinators(statuses), None),
            ended_ranks=exits.early.ranks(step=step) if exits is not None else (),
            restart_codes=self._restart_codes,
            obstacles=tuple(obstacle for s in statuses for obstacle in s.obstacles),
            small_world=culprit if isinstance(culprit, SmallWorld) else None,
        )
        return AttemptEnd(
            kind,
            evidence,
            dict(self._proc_start_cnt),
            step,
            last.at_s if last is not None else shown.at_s if shown is not None else None,
            failure.stacks,
            max((w.ended_s for s in statuses for w in s.workers if w.ended_s), default=None),
            tuple(exits.notes) if exits is not None and kind is EndKind.COMPLETED else (),
            exits.target_shown(logs) if exits is not None else None,
            self._done_step(logs),
        )

    def _done_step(self, logs: Mapping[int, Sequence[WorkerLog]]) -> int | None:
        """Return the target where it is reached and saved: nothing is left that a restart wins."""
        exits = self._exit_check
        target = exits.proven_target(logs) if exits is not None else self._target
        if target is None or self._saved_step < target:
            return None
        # A step beyond a target that the program alone shows: the target is that of an epoch.
        is_ours = exits is None or exits.target is not None
        return target if is_ours or self._saved_step == target else None

    def _logs(self) -> dict[int, list[WorkerLog]]:
        """Fetch the ends of the output of the workers, by rank."""
        logs: dict[int, list[WorkerLog]] = {}
        for _, log in self._fleet.logs(LOG_TAIL_BYTES):
            logs.setdefault(log.rank, []).append(log)
        return logs

    def _outputs(self) -> Iterator[NodeOutput]:
        """Fetch the other texts of the nodes: device logs, reports of tools and platform."""
        # An earlier report of the platform is not about the end of this attempt.
        texts = self._fleet.texts(
            DEVICE_LOG_TAIL_BYTES, since_s=self._start.at_s, of_attempt=self._start.key
        )
        for node, text in texts:
            yield NodeOutput(node, text.name, text.text, rank=text.rank, device=text.device)


def _unwritable(*snapshots: Snapshot) -> dict[str, str]:
    """Map nodes whose scratch folder takes no files to the reason."""
    statuses = [status for snapshot in snapshots for status in snapshot.agents.values()]
    return {status.node: status.unwritable for status in statuses if status.unwritable}


def _all_done(snapshot: Snapshot) -> bool:
    if snapshot.lost or snapshot.unanswered or not snapshot.agents:
        return False
    return all(
        status.is_over and status.workers and all(is_done(worker) for worker in status.workers)
        for status in snapshot.agents.values()
    )


def _has_failure(snapshot: Snapshot, answered_nodes: Collection[str] = ()) -> bool:
    """Whether something of an attempt was lost, hangs or ended other than well.

    Args:
        snapshot: of its members.
        answered_nodes: nodes whose loss is answered already.
    """
    return any(node not in answered_nodes for node in snapshot.lost) or any(
        status.coordinator_end is not None
        or (status.hang is not None and status.hang.ends_attempt)
        or status.staging_error is not None
        or any(w.exit_code is not None and not is_done(w) for w in status.workers)
        for status in snapshot.agents.values()
    )


def _worker_ends(
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
                log_path=log_path_of(logs.get(worker.rank, [])),
                stopped=worker.stopped_by_agent,
                bad_end=false_successes.get(worker.rank) or bad_end_of_session(worker),
                is_command=status.is_command,
            )
