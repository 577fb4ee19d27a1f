"""The story of a run as its supervisor tells it: to the terminal, the UI, the log and automations.

Times are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tasks.observe import Observation, publish
from tasks.reporting import PROGRESS_PERIOD_S, Log, Reporter
from training.journal.events import (
    AlertCleared,
    AlertRaised,
    CheckpointDamaged,
    LedgerEvent,
    StepRecord,
)
from training.journal.history import RunHistory
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

ACCOUNT_PERIOD_S = 30.0
ACCOUNT_SHARE = 0.05  # of the time, at most, goes into making accounts


class RunStory:
    """What is told of a run while it is supervised.

    Args:
        run: that is supervised.
        reporter: takes what the UI shows, and events.
        logger: of the flow run.
        target_step: the step the run ends at; None when the program decides.
    """

    def __init__(
        self, run: Run, reporter: Reporter, logger: Log, *, target_step: int | None
    ) -> None:
        self.reporter = reporter
        self.activity = "starting"
        self._run = run
        self._logger = logger
        self._target_step = target_step
        self._accountant = Accountant(run.store, run.job.run_id)
        self._progress_s = 0.0
        self._accounted_s = time.monotonic()
        self._account_period_s = ACCOUNT_PERIOD_S
        self._ettr: float | None = None
        self._last: StepRecord | None = None
        self._was_interrupted = False  # at the last look, by a pause or a recovery

    def start(self) -> None:
        """Begin to send to the server."""
        self.reporter.start()

    def close(self) -> None:
        """Send what is waiting, for a bounded time, and end."""
        self.reporter.close()

    def show(self, activity: str) -> None:
        """Show what is being done now, on the terminal and in the UI."""
        self.activity = activity
        self._publish(())

    def on_progress(self, progress: Progress) -> None:
        """Report what a watcher sees."""
        self._last = progress.last or self._last
        interruption = activity_of(self._run.history)
        if interruption is not None:
            self.activity = interruption
        elif progress.steps or self._was_interrupted:
            self.activity = "training"
        elif self._target_step is None and progress.is_running:
            self.activity = "the command is running"
        self._was_interrupted = interruption is not None
        self._publish(tuple(progress.steps))
        self._accountant.saw(progress.steps)
        self._report_events(progress.events)
        if progress.checkpoints:
            self.reporter.checkpoints(self._run.history)
            self.reporter.event("checkpoint", {"step": progress.checkpoints[-1]})
        if time.monotonic() - self._progress_s > PROGRESS_PERIOD_S:
            self._progress_s = time.monotonic()
            self.report_progress()
        if time.monotonic() - self._accounted_s > self._account_period_s:
            self._accounted_s = time.monotonic()
            history = self._run.history
            self.reporter.account(lambda: self._account(history))

    def _report_events(self, events: Sequence[LedgerEvent]) -> None:
        """Report what is new in the attempt log."""
        if not events:
            return
        view = self._run.history.attempts[-1]
        recoveries = {recovery.began.number: recovery for recovery in view.recoveries}
        for event in events:
            self._logger.info(event_text(event))
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
        view = self._run.history.attempts[-1]
        for recovery in view.recoveries:
            if recovery.ended is None:
                self.reporter.recovery_over(view, recovery)

    def report_progress(self) -> None:
        """Update the progress bar and the table of attempts."""
        step = self._last.step if self._last is not None else self._run.history.committed_step
        text = progress_text(self._last, self._target_step, self.activity, ettr=self._ettr)
        self.reporter.progress(step, self._target_step, text)

    def report_attempts(self) -> None:
        """Update the table of attempts, and that of alerts when there are any."""
        self.reporter.attempts(story_rows(self._run.history))
        alerts = alert_rows(self._run.history)
        if alerts:
            self.reporter.alerts(alerts)

    def report_account(self) -> None:
        """Show where the time went, in the UI and the store."""
        report = self._account(self._run.history)
        self._run.store.put(f"runs/{self._run.job.run_id}/timeline.png", report.png)
        self.reporter.account(lambda: report)

    def _account(self, history: RunHistory) -> AccountReport:
        began_s = time.monotonic()
        account = self._accountant.account(history, now_s=time.time())
        self._ettr = account.ettr
        report = account_report(account)
        took_s = time.monotonic() - began_s
        self._account_period_s = max(ACCOUNT_PERIOD_S, took_s / ACCOUNT_SHARE)
        return report

    def report_picture(self) -> bytes:
        """Draw the loss picture, put it into the UI and the store; returns the PNG."""
        png = loss_picture(self._run.history, self._accountant.kept())
        self._run.store.put(f"runs/{self._run.job.run_id}/loss.png", png)
        self.reporter.picture(png)
        return png

    def _publish(self, steps: tuple[StepRecord, ...]) -> None:
        run_id, history = self._run.job.run_id, self._run.history
        seen = Observation(run_id, self._target_step, self.activity, history, self._last, steps)
        publish(seen)
