"""The flow process as supervisor of a run: its threads, and what its end means.

The supervisor is not the owner: when this process dies, the attempt goes on and the next
supervisor adopts it. Only a cancellation takes the containers down. Times are seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.exceptions import Abort, PrefectException
from prefect.runtime import flow_run as flow_run_runtime

from storage.errors import StorageError
from tasks.credentials import credentials_of
from tasks.observe import Observation, publish
from tasks.patient_client import client_without_retries
from tasks.pausing import PauseLink, ServedFlowRun, was_resumed
from tasks.reporting import PROGRESS_PERIOD_S, Log, Reporter
from training.errors import InputError, RunConflict
from training.files import home_folder
from training.job import Job
from training.journal.events import (
    AlertCleared,
    AlertRaised,
    CheckpointDamaged,
    LedgerEvent,
    StepRecord,
)
from training.journal.history import RunHistory
from training.journal.ledger import RENEW_S
from training.recovery.protocol import PauseBegan, PauseEnded, RecoveryBegan, RecoveryEnded
from training.supervisor.accounts import Accountant, AccountReport, account_report
from training.supervisor.report import (
    activity_of,
    alert_facts,
    alert_rows,
    event_text,
    loss_picture,
    progress_text,
    story_rows,
)
from training.supervisor.run import Run
from training.supervisor.watch import Progress
from training.wire.requests import is_pause_wanted, take_back

CONTROL_PERIOD_S = 3.0
ACCOUNT_PERIOD_S = 30.0
ACCOUNT_SHARE = 0.05  # of the time, at most, goes into making accounts
HANDOVER_S = 30.0  # for the supervisor before to notice, and to leave
HANDOVER_POLL_S = 1.0
HANDED_OVER = "resumed: another process supervises the run from now on"

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

    def __init__(self, run: Run, logger: Log) -> None:
        super().__init__("perdure-lease", RENEW_S)
        self._run = run
        self._logger = logger
        self.superseded: RunConflict | None = None

    def tick(self) -> None:
        """Renew once."""
        try:
            self._run.ledger.renew()
        except RunConflict as error:
            self.superseded = error
            self.close()
        except StorageError as error:
            self._logger.warning("supervisor lease not renewed: %s", error)


class RequestPoller(_Periodic):
    """Polls the server for requests to cancel the run, to pause it and to resume it.

    A worker's own observer gives up for good after a server outage of half a minute (3.8.8),
    and a flow that was started in the foreground has none.
    """

    def __init__(self, flow_run_id: UUID, run: Run) -> None:
        super().__init__("perdure-control", CONTROL_PERIOD_S)
        self._flow_run_id = flow_run_id
        self._run = run
        self._link = PauseLink(run.store, run.job.run_id)
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
        self._link.look(state, flow_run, paused_at=pause.began.step if pause is not None else None)


def has_open_attempt(job: Job) -> bool:
    """Whether an attempt of the run may be alive: it is adopted whatever preflight would find."""
    try:
        run = Run(job, home=home_folder(), credentials=credentials_of(job.storage))
        return run.refresh().open_attempt is not None
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

    def __init__(self, job: Job, logger: Log) -> None:
        self.job = job
        self.logger = logger
        self.run = Run(job, home=home_folder(), credentials=credentials_of(job.storage))
        self.flow_run_id = _flow_run_id()
        self.reporter = Reporter(job.run_id, self.flow_run_id, logger)
        self.activity = "starting"
        self._lease = LeaseRenewal(self.run, logger)
        self._requests = RequestPoller(self.flow_run_id, self.run) if self.flow_run_id else None
        self.accountant = Accountant(self.run.store, job.run_id)
        self._progress_s = 0.0
        self._accounted_s = time.monotonic()
        self._account_period_s = ACCOUNT_PERIOD_S
        self._ettr: float | None = None
        self._last: StepRecord | None = None
        self._was_interrupted = False  # at the last look, by a pause or a recovery

    def __enter__(self) -> Self:
        history = self._take()
        if history.attempts:
            self.logger.info(
                "run %s is taken up again: %d attempts so far, committed step %d",
                self.job.run_id, len(history.attempts), history.committed_step,
            )  # fmt: skip
        self.reporter.start()
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
        self._lease.close()
        self._lease.join(RENEW_S)  # a late renewal would bring back a lease that was given up
        if self._requests is not None:
            self._requests.close()
        # What ends a flow's process is no Exception (3.8.8): TerminationSignal, KeyboardInterrupt,
        # CancelledError, Abort.
        if kind is not None and not issubclass(kind, Exception):
            self._interrupted(kind)
        self.reporter.close()

    @property
    def target_step(self) -> int | None:
        """The step the run ends at; None when the program decides."""
        return None if self.job.worker.is_command else self.job.steps

    def stop_wanted(self) -> bool:
        """Whether the run is to be cancelled.

        Raises:
            RunConflict: another supervisor has taken the run.
            Abort: the flow run was resumed, and a worker starts another process for it.
        """
        if self._lease.superseded is not None:
            raise self._lease.superseded
        if self._requests is not None and self._requests.is_handed_over:
            # The one way out that leaves the state of the flow run to that process (3.8.8).
            raise Abort(HANDED_OVER)
        return self._requests is not None and self._requests.cancel_wanted

    def show(self, activity: str) -> None:
        """Show what is being done now, on the terminal and in the UI."""
        self.activity = activity
        self._publish(())

    def on_progress(self, progress: Progress) -> None:
        """Report what a watcher sees."""
        self._last = progress.last or self._last
        interruption = activity_of(self.run.history)
        if interruption is not None:
            self.activity = interruption
        elif progress.steps or self._was_interrupted:
            self.activity = "training"
        elif self.target_step is None and progress.is_running:
            self.activity = "the command is running"
        self._was_interrupted = interruption is not None
        self._publish(tuple(progress.steps))
        self.accountant.saw(progress.steps)
        self._report_events(progress.events)
        if progress.checkpoints:
            self.reporter.checkpoints(self.run.history)
            self.reporter.event("checkpoint", {"step": progress.checkpoints[-1]})
        if time.monotonic() - self._progress_s > PROGRESS_PERIOD_S:
            self._progress_s = time.monotonic()
            self.report_progress()
        if time.monotonic() - self._accounted_s > self._account_period_s:
            self._accounted_s = time.monotonic()
            history = self.run.history
            self.reporter.account(lambda: self._account(history))

    def _report_events(self, events: Sequence[LedgerEvent]) -> None:
        """Report what is new in the attempt log."""
        if not events:
            return
        view = self.run.history.attempts[-1]
        recoveries = {recovery.began.number: recovery for recovery in view.recoveries}
        for event in events:
            self.logger.info(event_text(event))
            match event:
                case RecoveryBegan():
                    self.reporter.recovery_began(view, recoveries[event.number])
                case RecoveryEnded() if event.number in recoveries:
                    self.reporter.recovery_over(view, recoveries[event.number])
                case PauseBegan() | PauseEnded():
                    paused = isinstance(event, PauseBegan)
                    self.reporter.event("pause", {"paused": paused, "step": event.step})
                case CheckpointDamaged():
                    facts = event.model_dump(mode="json", exclude={"kind", "number"})
                    self.reporter.event("checkpoint_damaged", facts)
                case AlertRaised():
                    self.reporter.event("alert", alert_facts(view, event))
                case AlertCleared():
                    self.reporter.event("alert_cleared", alert_facts(view, event))
        self.report_attempts()

    def report_cut_off(self) -> None:
        """Report recoveries that the end of the newest attempt cut off."""
        view = self.run.history.attempts[-1]
        for recovery in view.recoveries:
            if recovery.ended is None:
                self.reporter.recovery_over(view, recovery)

    def report_progress(self) -> None:
        """Update the progress bar and the table of attempts."""
        step = self._last.step if self._last is not None else self.run.history.committed_step
        text = progress_text(self._last, self.target_step, self.activity, ettr=self._ettr)
        self.reporter.progress(step, self.target_step, text)

    def report_attempts(self) -> None:
        """Update the table of attempts, and that of alerts when there are any."""
        self.reporter.attempts(story_rows(self.run.history))
        alerts = alert_rows(self.run.history)
        if alerts:
            self.reporter.alerts(alerts)

    def report_account(self) -> None:
        """Show where the time went, in the UI and the store."""
        report = self._account(self.run.history)
        self.run.store.put(f"runs/{self.job.run_id}/timeline.png", report.png)
        self.reporter.account(lambda: report)

    def _account(self, history: RunHistory) -> AccountReport:
        began_s = time.monotonic()
        account = self.accountant.account(history, now_s=time.time())
        self._ettr = account.ettr
        report = account_report(account)
        took_s = time.monotonic() - began_s
        self._account_period_s = max(ACCOUNT_PERIOD_S, took_s / ACCOUNT_SHARE)
        return report

    def report_picture(self) -> bytes:
        """Draw the loss picture, put it into the UI and the store; returns the PNG."""
        png = loss_picture(self.run.history, self.accountant.kept())
        self.run.store.put(f"runs/{self.job.run_id}/loss.png", png)
        self.reporter.picture(png)
        return png

    def _take(self) -> RunHistory:
        """Take the run; after a Resume the supervisor before may need a moment to leave."""
        resumed = self.flow_run_id is not None and _is_resumed(self.flow_run_id)
        until_s = time.monotonic() + (HANDOVER_S if resumed else 0.0)
        while True:
            try:
                history = self.run.take()
                break
            except RunConflict:
                if time.monotonic() > until_s:
                    raise
                time.sleep(HANDOVER_POLL_S)
        if resumed:
            take_back(self.run.store, self.job.run_id)
        elif is_pause_wanted(self.run.store, self.job.run_id):
            self.logger.warning(
                "run %s is paused on request: its ranks wait for `perdure resume %s`",
                self.job.run_id, self.job.run_id,
            )  # fmt: skip
        return history

    def _publish(self, steps: tuple[StepRecord, ...]) -> None:
        run_id, history = self.job.run_id, self.run.history
        seen = Observation(run_id, self.target_step, self.activity, history, self._last, steps)
        publish(seen)

    def _interrupted(self, kind: type[BaseException]) -> None:
        """End this process: a cancellation takes everything down, any other reason nothing."""
        flow_run_id = self.flow_run_id
        cancelled = flow_run_id is not None and _ask(
            lambda client: _is_cancelled(client.read_flow_run(flow_run_id).state), default=False
        )
        if cancelled or issubclass(kind, KeyboardInterrupt):
            self.logger.info("cancelled: stopping the processes of the run")
            self.run.end("cancelled", f"cancelled ({kind.__name__})")
            return
        if self._requests is not None and self._requests.is_handed_over:
            self.logger.info(HANDED_OVER)
        else:
            self.logger.warning(
                "%s: this supervisor ends, the attempt goes on; start the run again to adopt it",
                kind.__name__,
            )
        with suppress(StorageError):  # the next supervisor need not wait for the lease to run out
            self.run.ledger.release()


def _flow_run_id() -> UUID | None:
    value = flow_run_runtime.id
    return UUID(str(value)) if value else None
