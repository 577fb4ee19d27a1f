"""Artifacts and events, sent to the Prefect server from a thread of their own.

With the server down one artifact call blocks for over a minute (3.8.8: five client retries
with back-off), so nothing here may run in the flow's thread, and nothing here may fail a run:
what the server did not take waits and is sent again. Of updates to one artifact only the newest
waits.
"""

from __future__ import annotations

import base64
import contextvars
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
)
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.events import emit_event

from tasks.prefect_client import without_retries
from training.journal.history import AttemptView, InProcessRecovery, RunHistory
from training.recovery.faults import Fault
from training.supervisor.accounts import AccountReport
from training.supervisor.report import (
    OPEN,
    AlertRow,
    AttemptRow,
    fault_report,
    outcome_of,
    recovery_facts,
    recovery_report,
)

CLOSE_TIMEOUT_S = 15.0
RETRY_S = 5.0
PROGRESS_PERIOD_S = 2.0
# Of a payload: labels of the event's resource, `perdure.fault_class` and so on.
LABELS = ("fault_class", "rung", "point", "node", "recoverable_by")

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


class Reporter:
    """Reports a run to the Prefect server.

    Start it inside the flow: artifacts are linked to the flow run of the starting context.
    """

    def __init__(self, run_id: str, flow_run_id: UUID | None, logger: Log) -> None:
        self._run_id = run_id
        self._flow_run_id = flow_run_id
        self._logger = logger
        self._waiting: dict[str, Callable[[], None]] = {}
        self._wake = threading.Condition()
        self._closing = False
        self._is_refused = False  # the last report was; an outage is one line of the log
        self._artifact_ids: dict[str, UUID] = {}
        # A bare thread's artifacts have no flow run, and Prefect calls them deprecated (3.8.8).
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._loop,), name="perdure-reporter", daemon=True
        )

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def close(self) -> None:
        """Send what is waiting, for a bounded time, and end."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._logger.warning("the Prefect server did not take the last artifacts in time")

    def progress(self, step: int, target: int | None, text: str) -> None:
        """The progress bar of the run."""
        if target is not None:
            percent = min(100.0, 100.0 * step / target)
            self._artifact("progress", create_progress_artifact, percent, text)

    def attempts(self, rows: Sequence[AttemptRow]) -> None:
        """The table of attempts."""
        table = [_important_first(asdict(row)) for row in rows]
        whole = [row for row in rows if row.generation is None]
        title = (
            f"{len(whole)} attempts, the last {whole[-1].outcome}" if whole else "No attempt yet"
        )
        self._artifact("attempts", create_table_artifact, table, title)

    def checkpoints(self, history: RunHistory) -> None:
        """The table of committed checkpoints."""
        table = [
            {"step": seen.step, "placement": seen.placement, "attempt": seen.attempt}
            for seen in history.checkpoints
        ]
        title = f"{len(table)} committed, the newest of step {history.committed_step}"
        self._artifact("checkpoints", create_table_artifact, table, title)

    def account(self, build: Callable[[], AccountReport]) -> None:
        """Where the run's time went: a table, and a picture of the attempts.

        Args:
            build: called in the thread of the reporter: reading and drawing take their time.
        """

        def send() -> None:
            report = build()
            self._put("ettr", create_table_artifact, report.rows, report.text)
            picture = _inline("where the time of every attempt went", report.png)
            text = f"{report.text}.\n\n{picture}"
            self._put("timeline", create_markdown_artifact, text, "Timeline of the attempts")

        self._submit("account", send)

    def alerts(self, rows: Sequence[AlertRow]) -> None:
        """The table of alerts."""
        table = [asdict(row) for row in rows]
        num_open = sum(row.state == OPEN for row in rows)
        title = f"Alerts: {num_open} open, {len(rows) - num_open} past"
        self._artifact("alerts", create_table_artifact, table, title)

    def fault(self, view: AttemptView) -> None:
        """The report and the events of the fault that ended an attempt, and of the decision."""
        assert view.ended is not None  # noqa: S101 the caller saw it fail
        assert view.ended.fault is not None  # noqa: S101 likewise
        assert view.decision is not None  # noqa: S101 likewise
        fault, decision, (placement, attempt) = view.ended.fault, view.decision, view.key
        title = _headline(fault, decision.rung)
        name = f"fault-p{placement}-a{attempt}"
        self._artifact(name, create_markdown_artifact, fault_report(view), title)
        self._fault_event(fault)
        self.event("recovery", {"rung": decision.rung, "reason": decision.reason,
                                "isolate": decision.isolate, "placement": placement,
                                "attempt": attempt})  # fmt: skip

    def recovery_began(self, view: AttemptView, recovery: InProcessRecovery) -> None:
        """The report and the event of a fault that processes of the attempt survived."""
        self._recovery_report(view, recovery)
        self._fault_event(recovery.began.fault)

    def recovery_over(self, view: AttemptView, recovery: InProcessRecovery) -> None:
        """The report and the event of a recovery inside the processes that ended."""
        self._recovery_report(view, recovery)
        self.event("recovery", recovery_facts(view, recovery))

    def _recovery_report(self, view: AttemptView, recovery: InProcessRecovery) -> None:
        placement, attempt = view.key
        name = f"fault-p{placement}-a{attempt}-r{recovery.began.number}"
        text, began = recovery_report(view, recovery), recovery.began
        title = _headline(began.fault, f"{began.decision.rung} ({outcome_of(view, recovery)})")
        self._artifact(name, create_markdown_artifact, text, title)

    def _fault_event(self, fault: Fault) -> None:
        self.event("fault", {"fault_class": fault.fault_class, "evidence": fault.evidence,
                             "node": fault.node, "rank": fault.rank, "code": fault.code,
                             "step": fault.step, "device": fault.device,
                             "recoverable_by": fault.recoverable_by,
                             "user_fault": fault.user_fault,
                             "hardware_fault": fault.hardware_fault})  # fmt: skip

    def picture(self, png: bytes) -> None:
        """The loss picture; inline, so that the UI needs no file server."""
        text = _inline("loss with faults marked", png)
        self._artifact("loss", create_markdown_artifact, text, "Loss, faults marked")

    def event(self, kind: str, payload: Mapping[str, Any]) -> None:
        """An event `perdure.<kind>` about this run, for automations."""
        resource = {
            "prefect.resource.id": f"perdure.run.{self._run_id}",
            "prefect.resource.name": self._run_id,
            **labels_of(payload),
        }
        related = []
        if self._flow_run_id is not None:
            related.append(
                {
                    "prefect.resource.id": f"prefect.flow-run.{self._flow_run_id}",
                    "prefect.resource.role": "flow-run",
                }
            )
        # It is sent later, from another thread: a copy, and plain JSON in place of enums.
        document = json.loads(json.dumps(payload))

        def send() -> None:
            emit_event(f"perdure.{kind}", resource=resource, related=related, payload=document)

        # Unlike an artifact, an event is not replaced by the next: its name is its own.
        self._submit(f"event-{kind}-{id(send)}", send)

    def _submit(self, name: str, send: Callable[[], None]) -> None:
        with self._wake:
            self._waiting[name] = send
            self._wake.notify()

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                name = next(iter(self._waiting))
                send = self._waiting.pop(name)
            try:
                # Retried here: a server that is back is to be noticed before the run ends.
                with without_retries():
                    send()
                self._is_refused = False
            except Exception as error:  # noqa: BLE001 a dead server must never end a run
                self._retry_later(name, send, error)

    def _retry_later(self, name: str, send: Callable[[], None], error: Exception) -> None:
        """Keep what was not sent, unless something newer of its name is waiting."""
        if not self._is_refused:
            self._is_refused = True
            self._logger.warning("the Prefect server does not take %s, retrying: %s", name, error)
        with self._wake:
            if self._closing:
                return
            self._waiting.setdefault(name, send)
            self._wake.wait_for(lambda: self._closing, RETRY_S)

    def _artifact(
        self, name: str, create: Callable[..., Any], content: Any, description: str
    ) -> None:
        self._submit(name, lambda: self._put(name, create, content, description))

    def _put(self, name: str, create: Callable[..., Any], content: Any, description: str) -> None:
        """Create an artifact, or change it in place: versions would be thousands in a run."""
        artifact_id = self._artifact_ids.get(name)
        if artifact_id is None:
            key = f"{self._run_id}-{name}"
            self._artifact_ids[name] = create(content, key=key, description=description)
            return
        data = json.dumps(content) if isinstance(content, list) else content
        with get_client(sync_client=True) as client:
            client.update_artifact(artifact_id, ArtifactUpdate(data=data, description=description))


def _headline(fault: Fault, answer: str) -> str:
    """What happened and what is done; cards of the UI cut off what comes late."""
    step = f", step {fault.step}" if fault.step is not None else ""
    return f"{fault.fault_class} -> {answer}: {fault.where}{step}"


def _important_first(row: dict[str, Any]) -> dict[str, Any]:
    """The same, with what is read first where a narrow page shows it."""
    first = ("placement", "attempt", "generation", "outcome", "rung", "fault")
    return {name: row[name] for name in first} | row


def labels_of(payload: Mapping[str, Any]) -> dict[str, str]:
    """What of an event's payload automations can ask for; triggers do not see the payload."""
    return {
        f"perdure.{name}": str(payload[name]) for name in LABELS if payload.get(name) is not None
    }


def _inline(name: str, png: bytes) -> str:
    return f"![{name}](data:image/png;base64,{base64.b64encode(png).decode()})"
