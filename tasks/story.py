"""The story of a run, as its supervisor reports it to terminal, UI, log and automations.

What follows from the ledger is shown whenever that has grown, so it also follows after another
supervisor's death. Values that change with every step are shown now and then. Times are seconds.
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import TaskRun

from perdure.storage.errors import StorageError
from perdure.tasks.artifacts import TOP, Artifact, ArtifactKind, checkpoint_rows
from perdure.tasks.engine_log import silence_engine_log
from perdure.tasks.observe import Observation, publish
from perdure.tasks.reporting import CLOSE_TIMEOUT_S, Log, Reporter
from perdure.tasks.runs import flow_runs_of
from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.events import (
    AlertCleared,
    AlertRaised,
    BatchSkipped,
    CheckpointDamaged,
    LedgerEvent,
    ProgramNotice,
    StepRecord,
)
from perdure.training.journal.history import RunHistory
from perdure.training.journal.waits import Wait, WaitKind
from perdure.training.recovery.faults import Fault
from perdure.training.recovery.protocol import (
    AttemptGivenUp,
    PauseBegan,
    PauseEnded,
    RecoveryBegan,
    RecoveryEnded,
)
from perdure.training.recovery.rungs import Rung
from perdure.training.reporting.action_items import Need, NeedKind, attention, waits_for_node
from perdure.training.reporting.ettr import Accountant, AccountReport, account_report
from perdure.training.reporting.facts import (
    AlertFacts,
    DecisionFacts,
    FaultFacts,
    RecoveryFacts,
)
from perdure.training.reporting.fault_report import ReportPlace, fault_reports
from perdure.training.reporting.markdown import plain
from perdure.training.reporting.rows import (
    OPEN,
    activity_of,
    alert_cells,
    alert_rows,
    event_text,
    loss_picture,
    progress_text,
    story_rows,
)
from perdure.training.reporting.summary import attempts_table, attempts_title
from perdure.training.supervisor.exit_zero import shown_target
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.waiting import wait_of
from perdure.training.supervisor.watch import Progress

UPDATE_PERIOD_S = 30.0
WAIT_PERIOD_S = 30.0
STANDS_AFTER_S = 10.0  # without a step
ROOM_NEED_S = 60.0  # a wait for the platform needs a person after that
_NEEDS = (WaitKind.NODE, WaitKind.PLATFORM, WaitKind.AGENTS)
CHECKPOINTS_PERIOD_S = 300.0
ACCOUNT_SHARE = 0.05  # of the time, at most, goes into making accounts
# Share of the run's age: pictures of weeks need not follow every half a minute.
ACCOUNT_AGE_SHARE = 0.01
ACCOUNT_MAX_PERIOD_S = 600.0
RECENT = 5  # attempts whose reports may still change
CONTINUED = ", continued"  # end of the name of a placement's second task run
BAD_NEWS = (
    RecoveryBegan, AttemptGivenUp, CheckpointDamaged, AlertRaised, ProgramNotice, BatchSkipped,
)  # fmt: skip


class RunReporter:
    """Reports a run to the terminal, the UI and the store while it is supervised.

    Args:
        run: the supervised run.
        reporter: sends artifacts and events to the server.
        logger: logger of the flow run.
        target_step: the step the run ends at; None: the program decides, and may show it.
    """

    def __init__(
        self, run: RunSupervisor, reporter: Reporter, logger: Log, *, target_step: int | None
    ) -> None:
        self.reporter = reporter
        self.activity = "starting"
        self._wait: Wait | None = None  # of this process
        self._agents_wait: Wait | None = None
        self._waited_s = float("-inf")
        self._needed_s: float | None = None  # since when a wait needs a person, as shown
        self.ettr: float | None = None
        self.placement_task: TaskRun | None = None
        self._run = run
        self._logger = logger
        self._target_step = target_step
        self._is_command = run.job.worker.is_command
        self._accountant = Accountant(run.store, run.job.run_id)
        self._shown_s = 0.0
        self._shown: RunHistory | None = None
        self._shown_activity = ""
        self._are_checkpoints_new = True
        self._checkpoints_s = time.monotonic()
        self._accounted_s = time.monotonic()
        self._account_period_s = UPDATE_PERIOD_S
        self._last: StepRecord | None = None
        self._called_for: set[tuple[NeedKind, str]] = set()
        self._reported: tuple[int, int] | None = None  # the attempt whose end is
        self._was_interrupted = False  # at the last look, by a pause or a recovery
        self.limits: Sequence[str] = ()  # concurrency limits on its flow run

    def start(self) -> None:
        """Begin to send to the server: first what the ledger says now."""
        silence_engine_log()
        self.reporter.start()
        self.update()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Send what is waiting, for a bounded time, and end."""
        self.reporter.close(timeout_s)

    def waits(self, wait: Wait | None) -> None:
        """Show what the supervisor waits for, from any thread; None: it goes on."""
        self._wait = wait
        now_s = time.monotonic()
        if wait is None or now_s - self._waited_s > WAIT_PERIOD_S:
            self._waited_s = now_s
            self._publish(())
            # Not the rest: it may need the store that cannot be used.
            self._show_progress()
        if wait is None or self._lasting_wait is not None:
            self._show_need(wait)

    @property
    def _lasting_wait(self) -> Wait | None:
        """The wait that needs a person: for room, the platform, or a way to the agents."""
        wait = self._wait
        if wait is None or wait.kind not in _NEEDS:
            return None
        return wait if time.time() - wait.since_s > ROOM_NEED_S else None

    def _show_need(self, wait: Wait | None) -> None:
        """Show once that the run waits for a person, and once that it does no longer."""
        need = wait.since_s if wait is not None else None
        if need != self._needed_s:
            self._needed_s = need
            self._show_history(self._run.history)

    @property
    def phase(self) -> str:
        """The activity for people: a wait takes the place of whatever has come to a stand."""
        wait = self._wait or self._agents_wait
        if wait is None or wait.kind is WaitKind.RESUME:  # whose activity says it
            return self.activity
        is_old = self._last is None or time.time() - self._last.at_s > STANDS_AFTER_S
        return wait.text if is_old else f"{self.activity}; {wait.text}"

    def show(self, activity: str) -> None:
        """Show what is being done now, on the terminal and in the UI."""
        self.activity = activity
        self._publish(())
        self.update()

    def on_progress(self, progress: Progress) -> None:
        """Report what a watcher sees."""
        self._last = progress.last or self._last
        if self._run.job.target_step is None:
            self._target_step = shown_target(self._run.history, progress.snapshot)
        self._agents_wait = wait_of(self._run.history, progress.snapshot)
        interruption = activity_of(self._run.history)
        if interruption is not None:
            self.activity = interruption
        elif progress.steps or self._was_interrupted:
            self.activity = "training"
        elif self._is_command and self._last is None and progress.is_running:
            self.activity = "the command is running"
        self._was_interrupted = interruption is not None
        self._publish(tuple(progress.steps))
        self._accountant.add_steps(progress.steps)
        self._report_events(progress.events)
        if progress.checkpoints:
            self._are_checkpoints_new = True
            self.reporter.event("checkpoint", {"step": progress.checkpoints[-1]})
        self.update()
        if time.monotonic() - self._accounted_s > self._account_period_s:
            self._accounted_s = time.monotonic()
            history = self._run.history
            self.reporter.artifacts("account", lambda: self._account_artifacts(history))

    def attempt_ended(self, decided: str | None, *, log: Log) -> None:
        """Report, once, that the newest attempt is over, with recoveries that its end cut off.

        Args:
            decided: fault and decision on one line; None where nothing broke it.
            log: logger of the task, whose page shows this line and no state's message (3.8.8).
        """
        view = self._run.history.attempts[-1]
        if self._reported == view.key:
            return
        self._reported = view.key
        self._agents_wait = None
        for recovery in view.recoveries:
            if recovery.is_cut_off and view.ended is not None:
                facts = RecoveryFacts.of(view, recovery).payload
                self.reporter.event("recovery", facts, at_s=view.ended.at_s)
        self.update()
        if decided is not None:
            self._report_decision(view, decided, log)

    def _report_decision(self, view: AttemptView, text: str, log: Log) -> None:
        assert view.ended is not None  # noqa: S101 the caller saw it fail
        assert view.ended.fault is not None  # noqa: S101 the caller saw it fail
        assert view.decision is not None  # noqa: S101 the caller saw it fail
        fault, stops = view.ended.fault, view.decision.rung is Rung.STOP
        level = logging.ERROR if stops else logging.WARNING
        log.log(level, "attempt %d.%d ended: %s", *view.key, text)
        self._fault_event(view, fault)
        self.reporter.event("recovery", DecisionFacts.of(view).payload, at_s=view.ended.at_s)
        answer = f"{fault.fault_class} -> {view.decision.rung}"
        self.show(f"{'stopping' if stops else 'recovering'}: {answer}")

    def update(self) -> None:
        """Show what has changed: at once where the ledger has grown, else now and then."""
        history, now_s = self._run.history, time.monotonic()
        if history is not self._shown:
            self._shown = history
            self._show_history(history)
        is_due = now_s - self._shown_s > UPDATE_PERIOD_S
        if is_due or self.phase != self._shown_activity:
            self._shown_s, self._shown_activity = now_s, self.phase
            self._show_progress()
        if is_due:
            self._look_again()
        are_old = now_s - self._checkpoints_s > CHECKPOINTS_PERIOD_S  # retention deletes, too
        if is_due and (self._are_checkpoints_new or are_old):
            self._show_checkpoints()

    def _look_again(self) -> None:
        """Read what others have put on record, such as the release of a node."""
        with suppress(StorageError):
            self._run.refresh()

    def end(self, outcome: str) -> None:
        """Show how the run ended: tables, the loss and the timeline, in the UI and the store."""
        self._run.refresh()
        self._wait = self._agents_wait = None
        if self._last is None:  # this process has watched no attempt
            records = self._accountant.kept_steps()
            self._last = records[max(records)] if records else None
        self._shown_s = 0.0
        self._are_checkpoints_new = True
        try:
            self._show_account()  # first: the progress has the ETTR of the whole run
        finally:
            self.show(outcome)
        if not self._is_command or self._last is not None:
            self._show_loss()

    def _show_history(self, history: RunHistory) -> None:
        """Show everything that follows from the ledger; what has not changed is not sent."""
        run_id, spares = self._run.job.run_id, self._run.spares()
        items = attention(
            run_id,
            history,
            spares=spares,
            warm=self._run.warm_spares,
            limits=self.limits,
            wait=self._lasting_wait,
        )
        self.reporter.artifact(Artifact(TOP, ArtifactKind.MARKDOWN, items.body, items.title))
        self._call_for_help(items.needs)
        self._name_placement(history)
        table = attempts_table(story_rows(history))
        if table:  # a table without rows is an empty page
            title = attempts_title(history)
            self.reporter.artifact(Artifact("attempts", ArtifactKind.TABLE, table, title))
        alerts = alert_rows(history)
        if alerts:
            num_open = sum(row.state == OPEN for row in alerts)
            title = f"Alerts: {num_open} open, {len(alerts) - num_open} past"
            rows = [alert_cells(row) for row in alerts]
            self.reporter.artifact(Artifact("alerts", ArtifactKind.TABLE, rows, title))
        waits = self._lasting_wait is not None or waits_for_node(history, spares=spares)
        place = ReportPlace(run_id, self._run.store.url, waits=waits)
        for report in fault_reports(history, place, recent=RECENT):
            self.reporter.artifact(
                Artifact(report.name, ArtifactKind.MARKDOWN, report.body, report.title)
            )

    def _name_placement(self, history: RunHistory) -> None:
        """Have the task run of the placement name its nodes, also once one was replaced."""
        task_run, placed = self.placement_task, history.placement
        if task_run is None or placed is None:
            return
        nodes = ",".join(member.node for member in placed.members)
        beginning, _, former_nodes = task_run.name.partition(" on ")
        continued = CONTINUED if former_nodes.endswith(CONTINUED) else ""
        name = f"placement {placed.placement} on {nodes}{continued}"
        if name.startswith(f"{beginning} on ") and name != task_run.name:
            task_run.name = name  # each of its states sends the name along (3.8.8)
            self.reporter.submit("placement", lambda: rename(task_run, name))

    def _call_for_help(self, needs: Sequence[Need]) -> None:
        """An event for each need that is new; a failed run is an event of Prefect's own."""
        now = {(need.kind, need.title): need for need in needs}
        for key, need in now.items():
            if key not in self._called_for and need.kind is not NeedKind.FAILED:
                facts = {"what": need.title, "why": need.why, "action": plain(need.action)}
                self.reporter.event(
                    "action_required", {"need": need.kind, "node": need.node, **facts}
                )
        self._called_for = set(now)

    def _show_progress(self) -> None:
        if self._target_step is None or (self._is_command and self._last is None):
            return
        step = self._last.step if self._last is not None else self._run.history.committed_step
        percent = min(100.0, 100.0 * step / self._target_step)
        text = progress_text(self._last, self._target_step, self.phase, ettr=self.ettr)
        self.reporter.artifact(Artifact("progress", ArtifactKind.PROGRESS, round(percent, 2), text))

    def _show_checkpoints(self) -> None:
        self._checkpoints_s, self._are_checkpoints_new = time.monotonic(), False
        history = self._run.history

        def build() -> list[Artifact]:
            rows = checkpoint_rows(self._run.checkpoints, self._run.home, history)
            if not rows:
                return []
            title = f"{len(rows)} kept, the newest of step {rows[0]['step']}"
            return [Artifact("checkpoints", ArtifactKind.TABLE, rows, title)]

        self.reporter.artifacts("checkpoints", build)

    def _report_events(self, events: Sequence[LedgerEvent]) -> None:
        """Report what is new in the attempt log."""
        if not events:
            return
        view = self._run.history.attempts[-1]
        recoveries = {recovery.began.number: recovery for recovery in view.recoveries}
        for event in events:
            failed = isinstance(event, RecoveryEnded) and not event.succeeded
            level = logging.WARNING if failed or isinstance(event, BAD_NEWS) else logging.INFO
            self._logger.log(level, event_text(event))
            match event:
                case RecoveryBegan():
                    self._fault_event(view, event.fault)
                case RecoveryEnded() if event.number in recoveries:
                    facts = RecoveryFacts.of(view, recoveries[event.number]).payload
                    self.reporter.event("recovery", facts, at_s=event.at_s)
                case PauseBegan() | PauseEnded():
                    facts = {"paused": isinstance(event, PauseBegan), "step": event.step}
                    self.reporter.event("pause", facts, at_s=event.at_s)
                case CheckpointDamaged():
                    facts = event.model_dump(mode="json", exclude={"kind", "number"})
                    self.reporter.event("checkpoint_damaged", facts, at_s=event.at_s)
                case AlertRaised():
                    facts = AlertFacts.of(view, event).payload
                    self.reporter.event("alert", facts, at_s=event.at_s)
                case AlertCleared():
                    facts = AlertFacts.of(view, event).payload
                    self.reporter.event("alert_cleared", facts, at_s=event.at_s)

    def _fault_event(self, view: AttemptView, fault: Fault) -> None:
        self.reporter.event("fault", FaultFacts.of(view, fault).payload, at_s=fault.at_s)

    def _show_account(self) -> None:
        """Publish the time account, in the UI and the store."""
        report = self._account(self._run.history)
        self._run.store.put(f"runs/{self._run.job.run_id}/timeline.png", report.png)
        self.reporter.artifacts("account", lambda: _account_artifacts(report))

    def _account_artifacts(self, history: RunHistory) -> list[Artifact]:
        return _account_artifacts(self._account(history))

    def _account(self, history: RunHistory) -> AccountReport:
        began_s = time.monotonic()
        account = self._accountant.account(history, now_s=time.time())
        self.ettr = account.known_ettr
        report = account_report(account)
        took_s = time.monotonic() - began_s
        age_s = min(ACCOUNT_MAX_PERIOD_S, account.wall_s * ACCOUNT_AGE_SHARE)
        self._account_period_s = max(UPDATE_PERIOD_S, took_s / ACCOUNT_SHARE, age_s)
        return report

    def _show_loss(self) -> None:
        """The loss picture, in the UI and the store."""
        png = loss_picture(self._run.history, self._accountant.kept_steps())
        self._run.store.put(f"runs/{self._run.job.run_id}/loss.png", png)
        picture = _inline("loss with faults marked", png)
        self.reporter.artifact(
            Artifact("loss", ArtifactKind.MARKDOWN, picture, "Loss, faults marked")
        )

    def _publish(self, steps: tuple[StepRecord, ...]) -> None:
        run_id, history = self._run.job.run_id, self._run.history
        observation = Observation(run_id, self._target_step, self.phase, history, self._last, steps)
        publish(observation)


def report_end(run: RunSupervisor, flow_run_id: UUID, logger: Log) -> None:
    """Show the end of a run that its own supervisor may not have come to show."""
    history = run.refresh()
    if history.ended is None:
        return
    former = flow_runs_of(history)
    reporter = Reporter(run.job.run_id, flow_run_id, logger, flow_runs=lambda: former)
    story = RunReporter(run, reporter, logger, target_step=run.job.target_step)
    story.start()
    try:
        story.end(history.ended.outcome)
    finally:
        story.close()


def rename(task_run: TaskRun, name: str) -> None:
    """Name a task run on the server.

    Raises:
        Exception: the server does not take it.
    """
    with get_client(sync_client=True) as client:
        client.set_task_run_name(task_run.id, name)


def _account_artifacts(report: AccountReport) -> list[Artifact]:
    picture = _inline("where the time of every attempt went", report.png)
    text = f"{report.text}.\n\n{picture}"
    return [
        Artifact("ettr", ArtifactKind.TABLE, list(report.rows), report.text),
        Artifact("timeline", ArtifactKind.MARKDOWN, text, "Timeline of the attempts"),
    ]


def _inline(name: str, png: bytes) -> str:
    """A picture inside the markdown, so that the UI needs no file server."""
    return f"![{name}](data:image/png;base64,{base64.b64encode(png).decode()})"
