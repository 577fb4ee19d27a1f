"""The flow process as supervisor of a run: its threads, and what its end means.

The supervisor is not the owner: when this process dies, the attempt goes on and the next
supervisor adopts it. Only a cancellation takes the containers down. Times are seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import UUID

import httpx
import psutil
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, PrefectException, TerminationSignal
from prefect.runtime import flow_run as flow_run_runtime

from perdure.storage.errors import StorageError
from perdure.tasks.credentials import credentials_of
from perdure.tasks.env_secrets import BlockSecrets
from perdure.tasks.limits import limits_of
from perdure.tasks.orphaned_task_runs import close_flow_runs, close_orphaned_task_runs
from perdure.tasks.pausing import PauseLink, ServedFlowRun, was_resumed
from perdure.tasks.prefect_client import client_without_retries
from perdure.tasks.remote_jobs import artifact_of, is_kept
from perdure.tasks.reporting import CLOSE_TIMEOUT_S, Log, NotYet, Reporter
from perdure.tasks.retry_delay import RetryDelay
from perdure.tasks.runs import flow_runs_of, run_of
from perdure.tasks.states import give_back_end
from perdure.tasks.story import RunReporter
from perdure.tasks.termination import TerminationSignals
from perdure.training.config.job import Job
from perdure.training.errors import AlreadySupervised, InputError, RunConflict
from perdure.training.files import home_folder
from perdure.training.journal.history import RunHistory
from perdure.training.journal.ledger import RENEW_S
from perdure.training.journal.waits import Wait, WaitKind
from perdure.training.preflight.job import CheckedJob
from perdure.training.reporting.markdown import counted
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.store_outage import StoreOutage
from perdure.training.wire.requests import clear_requests, is_pause_wanted
from perdure.training.wire.store_wait import Waiter

CONTROL_PERIOD_S = 3.0
TERMINATED_CLOSE_S = 2.0  # the platform does not wait for what the server was not told yet
POLL_ENDS_S = 10.0  # a few requests of 5 s at most; the end of the flow does not wait for more
HANDOVER_S = 30.0  # for the supervisor before to notice, and to leave
HANDOVER_POLL_S = 1.0
HANDED_OVER = "resumed: another process supervises the run from now on"
OWN_SUPERVISOR_LIVES = "an earlier process of this flow run supervises the run and goes on"

T = TypeVar("T")


class _Periodic(threading.Thread):
    """Calls a function every so often until closed."""

    def __init__(self, name: str, period_s: float) -> None:
        super().__init__(name=name, daemon=True)
        self._period_s = period_s
        self._closed = threading.Event()

    def run(self) -> None:
        while not self._closed.wait(self._period_s):
            self.tick()

    def tick(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._closed.set()


class LeaseRenewal(_Periodic):
    """Renews the supervisor's lease in the store; notices when it has been superseded."""

    def __init__(self, run: RunHandle, logger: Log, outage: StoreOutage) -> None:
        super().__init__("perdure-lease", run.ledger.renew_s)
        self._run = run
        self._logger = logger
        self._outage = outage
        self.superseded: RunConflict | None = None

    def tick(self) -> None:
        """Renew once."""
        try:
            self._run.ledger.renew()
        except RunConflict as error:
            self.superseded = error
            self.close()
        except StorageError as error:  # one that does not pass by waiting
            self._outage.failed(error)
            self._logger.warning("supervisor lease not renewed: %s", error)
        else:
            self._outage.passed()


class RequestPoller(_Periodic):
    """Polls the server for requests to cancel the run, to pause it and to resume it.

    A worker's own observer gives up for good after a server outage of half a minute (3.8.8),
    and a flow that was started in the foreground has none.
    """

    def __init__(self, flow_run_id: UUID, run: RunHandle) -> None:
        super().__init__("perdure-control", CONTROL_PERIOD_S)
        self._flow_run_id = flow_run_id
        self._run = run
        self._link = PauseLink(run.brief_store, run.job.run_id)
        self.cancel_wanted = False

    @property
    def is_handed_over(self) -> bool:
        """Whether Prefect has another process supervise the run from now on."""
        return self._link.is_handed_over

    def tick(self) -> None:
        """Poll once; no answer means no request."""
        _ask(self._look, None)

    def _look(self, client: SyncPrefectClient) -> None:
        state = client.read_flow_run(self._flow_run_id).state
        if state is None:
            return
        self.cancel_wanted = self.cancel_wanted or _is_cancelled(state)
        pause = self._run.history.pause
        flow_run = ServedFlowRun(client, self._flow_run_id)
        if state.is_final() and not _is_cancelled(state):
            self._put_right(flow_run)
            return
        self._link.look(state, flow_run, paused_at=pause.began.step if pause is not None else None)

    def _put_right(self, flow_run: ServedFlowRun) -> None:
        """Take back a report of its end: this process lives.

        A worker reports the end of a process some seconds late, as the end of whatever the flow
        run is by then; a heartbeat that came late was not lost; and a pause that nobody resumed
        is failed by the server (3.8.8).
        """
        if self._closed.is_set():
            return  # it is over by now, and the state is this process's own
        if self._link.is_paused:
            flow_run.show_paused("the supervisor lives; paused")
        else:
            flow_run.show_running("the supervisor lives")


def has_open_attempt(job: Job) -> bool:
    """Whether an attempt of the run may be alive: it is adopted whatever preflight would find."""
    try:
        return run_of(job).refresh().open_attempt is not None
    except (StorageError, InputError):
        return False  # preflight reports what is wrong


def _ask(question: Callable[[SyncPrefectClient], T], default: T) -> T:
    """The server's answer to one request; the default when there is none."""
    try:
        with client_without_retries() as client:
            return question(client)
    except (httpx.HTTPError, PrefectException, OSError, StorageError):
        return default


def _is_cancelled(state: State[Any] | None) -> bool:
    return state is not None and (state.is_cancelling() or state.is_cancelled())


def _is_resumed(flow_run_id: UUID) -> bool:
    """Whether the flow run that begins here was resumed by a user; False without answer."""
    return _ask(lambda client: was_resumed(client.read_flow_run_states(flow_run_id)), default=False)


class Supervision:
    """A run taken by this flow run: use as a context around everything that touches it."""

    def __init__(self, checked: CheckedJob, logger: Log) -> None:
        self.job = job = checked.job
        self.logger = logger
        self.flow_run_id = _flow_run_id()
        self.has_cancelled = False  # whether the end of this process was the end of the run
        home = home_folder()
        self.outage = StoreOutage(home, job.run_id, logger)
        self.run = RunSupervisor(
            job,
            home=home,
            credentials=credentials_of(job.storage),
            secrets=BlockSecrets(job),
            flow_run=str(self.flow_run_id) if self.flow_run_id else None,
            outage=self.outage,
        )
        self.story = RunReporter(
            self.run,
            Reporter(
                job.run_id,
                self.flow_run_id,
                logger,
                flow_runs=lambda: flow_runs_of(self.run.history),
            ),
            logger,
            target_step=job.target_step,
        )
        self.outage.on_change = self.story.waits
        self.run.on_wait = self.story.waits
        self.retry_delay = RetryDelay(self.stop_wanted)
        self._lease = LeaseRenewal(self.run, logger, self.outage)
        self._requests = RequestPoller(self.flow_run_id, self.run) if self.flow_run_id else None
        self._signal = TerminationSignals(
            self.run.termination,
            job.engine.grace_s,
            trains_elsewhere=not job.engine.on_this_machine,
        )

    def __enter__(self) -> Self:
        history = self._take()
        self._signal.install()
        if history.attempts:
            self.logger.info(
                "run %s is taken up again: %s so far, committed step %d",
                self.job.run_id, counted(len(history.attempts), "attempt"), history.committed_step,
            )  # fmt: skip
        self.story.start()
        if is_kept(self.job):
            self.story.reporter.artifact(artifact_of(self.job, history.epoch))
        self.story.reporter.submit("left open", lambda: self._close_orphaned_task_runs(history))
        self.story.reporter.submit("limits", self._name_limits)
        self._lease.start()
        if self._requests is not None:
            self._requests.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._requests is not None and self._requests.cancel_wanted:
            self._signal.disarm()  # the processes of the run are to be ended first
        self.outage.give_up()  # before all: the renewal of the lease may be waiting for the store
        self._end_threads()
        is_terminated = self.run.termination.is_wanted or kind is TerminationSignal
        # A flow's process is ended by no Exception (3.8.8): TerminationSignal, KeyboardInterrupt,
        # CancelledError, Abort.
        if kind is not None and not issubclass(kind, Exception):
            self._interrupted(kind)
        is_in_haste = is_terminated and not self.has_cancelled
        self.story.close(TERMINATED_CLOSE_S if is_in_haste else CLOSE_TIMEOUT_S)
        self._signal.restore()
        if kind is TerminationSignal:
            self._signal.hurry()

    def _end_threads(self) -> None:
        """End what would otherwise write after this process has set its last word."""
        self._lease.close()
        if self._requests is not None:
            self._requests.close()
        self._lease.join(RENEW_S)  # a late renewal would bring back a lease that was given up
        if self._requests is not None:
            self._requests.join(POLL_ENDS_S)  # a late "it lives" would follow Completed

    def stop_wanted(self) -> bool:
        """Whether the run is to be cancelled.

        Raises:
            RunConflict: another supervisor has taken the run.
            Abort: another process of this flow run supervises from now on.
        """
        if self._lease.superseded is not None:
            self._leave_own(self._lease.superseded)
            raise self._lease.superseded
        if self._requests is not None and self._requests.is_handed_over:
            # The one way out that leaves the state of the flow run to that process (3.8.8).
            raise Abort(HANDED_OVER)
        return self._requests is not None and self._requests.cancel_wanted

    def _close_orphaned_task_runs(self, history: RunHistory) -> None:
        """End the task runs, and the flow runs, of supervisors before this one."""
        if history.undecided_attempt is not None:
            # Not refresh(): this is the reporter's thread, and the run's history is the flow's.
            history = self.run.ledger.read()
            if history.undecided_attempt is not None:
                raise NotYet("the ladder is about to be asked about their attempt")
        took = history.supervisor
        by = f"supervisor {took.epoch} (process {took.pid} on {took.host})" if took else None
        process_began = datetime.fromtimestamp(psutil.Process().create_time(), UTC)
        with get_client(sync_client=True) as client:
            flow_run_id = self.flow_run_id
            close_orphaned_task_runs(
                client, history, flow_run_id=flow_run_id, began=process_began, adopted_by=by
            )
            if flow_run_id is not None:
                close_flow_runs(client, history, successor=flow_run_id)

    def _name_limits(self) -> None:
        """Show the concurrency limits that can keep the next supervisor waiting."""
        if self.flow_run_id is None:
            return
        with get_client(sync_client=True) as client:
            deployment_id = client.read_flow_run(self.flow_run_id).deployment_id
            if deployment_id is None:
                return  # of a terminal: no limit is asked
            self.story.limits = limits_of(client, [client.read_deployment(deployment_id)])
        for limit in self.story.limits:
            self.logger.warning("%s: a supervisor that has ended may wait for its slot", limit)

    def close_own(self) -> None:
        """Have the task runs of this process end as the ledger has it, not by the signal."""
        now = datetime.now(UTC)  # later ones are not over
        self.story.reporter.submit("left open", lambda: self._close_own(now))

    def _close_own(self, now: datetime) -> None:
        with get_client(sync_client=True) as client:
            history, flow_run_id = self.run.refresh(), self.flow_run_id
            close_orphaned_task_runs(
                client, history, flow_run_id=flow_run_id, began=now, adopted_by=None
            )

    def _take(self) -> RunHistory:
        """Take the run; after a Resume the supervisor before may need a moment to leave."""
        resumed = self.flow_run_id is not None and _is_resumed(self.flow_run_id)
        history = self._take_from_former(HANDOVER_S if resumed else 0.0)
        if resumed:
            clear_requests(self.run.store, self.job.run_id)
        elif is_pause_wanted(self.run.store, self.job.run_id):
            self.logger.warning(
                "run %s is paused on request: its ranks wait for 'perdure resume %s'",
                self.job.run_id, self.job.run_id,
            )  # fmt: skip
        return history

    def _take_from_former(self, timeout_s: float) -> RunHistory:
        """Take the run once the supervisor before has left; a wait for it is shown."""
        began_s, until_s, has_waited = time.time(), time.monotonic() + timeout_s, False
        try:
            while True:
                try:
                    return self.run.take()
                except RunConflict as conflict:
                    if time.monotonic() > until_s:
                        self._leave_own(conflict)
                        raise
                    wait = Wait(kind=WaitKind.LOCK, since_s=began_s, why=str(conflict))
                has_waited = True
                self.run.note_wait(wait, by=Waiter.STARTER)
                time.sleep(HANDOVER_POLL_S)
        finally:
            if has_waited:
                self.run.note_wait(None, by=Waiter.STARTER)

    def _leave_own(self, conflict: RunConflict) -> None:
        """Leave the state of the flow run to the process of it that supervises, if one does.

        Raises:
            Abort: one does; this ends the process, and nothing else (3.8.8).
        """
        flow_run_id = str(self.flow_run_id) if self.flow_run_id else None
        if (
            flow_run_id is not None
            and isinstance(conflict, AlreadySupervised)
            and conflict.flow_run == flow_run_id
        ):
            self.logger.info(OWN_SUPERVISOR_LIVES)
            _ask(lambda client: give_back_end(client, UUID(flow_run_id)), None)
            raise Abort(OWN_SUPERVISOR_LIVES) from conflict

    def _interrupted(self, kind: type[BaseException]) -> None:
        """End this process: a cancellation takes everything down, any other reason nothing."""
        if self._lease.superseded is not None:
            return  # the lease is another's
        flow_run_id = self.flow_run_id
        cancelled = flow_run_id is not None and _ask(
            lambda client: _is_cancelled(client.read_flow_run(flow_run_id).state), default=False
        )
        # Ctrl-C in `perdure run`; in the terminal of what serves deployments it is for that alone.
        if cancelled or (issubclass(kind, KeyboardInterrupt) and not _is_of_deployment()):
            self.logger.info("cancelled: stopping the processes of the run")
            self._signal.disarm()
            try:
                self.run.end("cancelled", f"cancelled ({kind.__name__})")
            except StorageError as error:
                self.run.stop_processes()
                self.logger.warning(
                    "the processes are stopped, and the end is not on record, because the store "
                    "does not answer: %s; once it does, `perdure cancel %s` records it",
                    error, self.job.run_id,
                )  # fmt: skip
                return
            self.has_cancelled = True
            self.close_own()
            with suppress(StorageError):  # the run has ended, whatever can be shown of it
                self.story.end("cancelled")
            return
        if self._requests is not None and self._requests.is_handed_over:
            self.logger.info(HANDED_OVER)
        else:
            self.logger.warning(
                "%s: this supervisor ends, the attempt goes on; start the run again to adopt it",
                kind.__name__,
            )
        self.run.withdraw()
        self.run.leave()


def _is_of_deployment() -> bool:
    """Whether a worker, or a process that serves flows, has started this flow run."""
    context = FlowRunContext.get()
    flow_run = context.flow_run if context is not None else None
    return flow_run is not None and flow_run.deployment_id is not None


def _flow_run_id() -> UUID | None:
    value = flow_run_runtime.id
    return UUID(str(value)) if value else None
