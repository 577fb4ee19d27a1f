"""Artifacts and events, told to the Prefect server from a thread of their own.

With the server down one artifact call blocks for over a minute (3.8.8: five client retries
with back-off), so nothing here may run in the flow's thread, and nothing here may fail a run:
what cannot be told waits and is tried again. Of updates to the same thing only the newest waits.
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
    update_progress_artifact,
)
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.events import emit_event

from tasks.patient_client import without_retries
from training.journal.history import AttemptView, InProcessRecovery, RunHistory
from training.recovery.decision import Decision
from training.recovery.events import LastSave
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

Tell = Callable[[], None]
Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


class Reporter:
    """Tells the Prefect server about a run.

    Start it inside the flow: artifacts are linked to the flow run of the starting context.
    """

    def __init__(self, run_id: str, flow_run_id: UUID | None, logger: Log) -> None:
        self._run_id = run_id
        self._flow_run_id = flow_run_id
        self._logger = logger
        self._waiting: dict[str, Tell] = {}
        self._wake = threading.Condition()
        self._closing = False
        self._is_deaf = False
        self._artifact_ids: dict[str, UUID] = {}
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._loop,), name="perdure-reporter", daemon=True
        )

    def start(self) -> None:
        """Begin to tell."""
        self._thread.start()

    def close(self) -> None:
        """Tell what is waiting, for a bounded time, and end."""
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
            self._submit("progress", lambda: self._tell_progress(percent, text))

    def attempts(self, rows: Sequence[AttemptRow]) -> None:
        """The table of attempts."""
        table = [_story_first(asdict(row)) for row in rows]
        whole = [row for row in rows if row.generation is None]
        title = (
            f"{len(whole)} attempts, the last {whole[-1].outcome}" if whole else "No attempt yet"
        )
        self._submit("attempts", lambda: self._tell_table("attempts", table, title))

    def checkpoints(self, history: RunHistory) -> None:
        """The table of committed checkpoints."""
        table = [
            {"step": seen.step, "placement": seen.placement, "attempt": seen.attempt}
            for seen in history.checkpoints
        ]
        title = f"{len(table)} committed, the newest of step {history.committed_step}"
        self._submit("checkpoints", lambda: self._tell_table("checkpoints", table, title))

    def account(self, build: Callable[[], AccountReport]) -> None:
        """Where the run's time went: a table, and a picture of the attempts.

        Args:
            build: called in the thread of the reporter: reading and drawing take their time.
        """
        self._submit("account", lambda: self._tell_account(build()))

    def alerts(self, rows: Sequence[AlertRow]) -> None:
        """The table of alerts."""
        table = [asdict(row) for row in rows]
        num_open = sum(row.state == OPEN for row in rows)
        title = f"Alerts: {num_open} open, {len(rows) - num_open} past"
        self._submit("alerts", lambda: self._tell_table("alerts", table, title))

    def fault(
        self,
        placement: int,
        attempt: int,
        fault: Fault,
        decision: Decision,
        *,
        runners_up: Sequence[Fault] = (),
        last_save: LastSave | None = None,
    ) -> None:
        """The report and the events of a fault that ended an attempt, and what is done about it."""
        name = f"fault-p{placement}-a{attempt}"
        text = fault_report(
            placement, attempt, fault, decision, runners_up=runners_up, last_save=last_save
        )
        title = _headline(fault, decision.rung)
        self._submit(name, lambda: self._tell_markdown(name, text, title))
        self._fault_event(fault)
        self.event("recovery", {"rung": decision.rung, "reason": decision.reason,
                                "isolate": decision.isolate, "placement": placement,
                                "attempt": attempt})  # fmt: skip

    def recovery_began(self, view: AttemptView, recovery: InProcessRecovery) -> None:
        """The report and the event of a fault that processes of the attempt outlived."""
        self._recovery_report(view, recovery)
        self._fault_event(recovery.began.fault)

    def recovery_over(self, view: AttemptView, recovery: InProcessRecovery) -> None:
        """The report and the event of a recovery inside the processes that came to its end."""
        self._recovery_report(view, recovery)
        self.event("recovery", recovery_facts(view, recovery))

    def _recovery_report(self, view: AttemptView, recovery: InProcessRecovery) -> None:
        placement, attempt = view.key
        name = f"fault-p{placement}-a{attempt}-r{recovery.began.number}"
        text, began = recovery_report(view, recovery), recovery.began
        title = _headline(began.fault, f"{began.decision.rung} ({outcome_of(view, recovery)})")
        self._submit(name, lambda: self._tell_markdown(name, text, title))

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
        self._submit("loss", lambda: self._tell_markdown("loss", text, "Loss, faults marked"))

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
        document = json.loads(json.dumps(payload))

        def tell() -> None:
            emit_event(f"perdure.{kind}", resource=resource, related=related, payload=document)

        self._submit(f"event-{kind}-{id(tell)}", tell)

    def _submit(self, name: str, tell: Tell) -> None:
        with self._wake:
            self._waiting[name] = tell
            self._wake.notify()

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                name = next(iter(self._waiting))
                tell = self._waiting.pop(name)
            try:
                # Tried again here: a server that is back is to be noticed before the run ends.
                with without_retries():
                    tell()
                self._is_deaf = False
            except Exception as error:  # noqa: BLE001 a dead server must never end a run
                self._retry_later(name, tell, error)

    def _retry_later(self, name: str, tell: Tell, error: Exception) -> None:
        """Keep what could not be told, unless something newer of its name is waiting."""
        if not self._is_deaf:
            self._is_deaf = True
            self._logger.warning("the Prefect server does not take %s, retrying: %s", name, error)
        with self._wake:
            if self._closing:
                return
            self._waiting.setdefault(name, tell)
            self._wake.wait_for(lambda: self._closing, RETRY_S)

    def _key(self, name: str) -> str:
        return f"{self._run_id}-{name}"

    def _tell_progress(self, percent: float, text: str) -> None:
        known = self._artifact_ids.get("progress")
        if known is None:
            created: Any = create_progress_artifact(
                percent, key=self._key("progress"), description=text
            )
            self._artifact_ids["progress"] = created
        else:
            update_progress_artifact(known, percent, description=text)

    def _tell_table(self, name: str, table: list[dict[str, Any]], description: str) -> None:
        if not self._update(name, json.dumps(table), description):
            created: Any = create_table_artifact(
                table, key=self._key(name), description=description
            )
            self._artifact_ids[name] = created

    def _tell_markdown(self, name: str, text: str, description: str) -> None:
        if not self._update(name, text, description):
            created: Any = create_markdown_artifact(
                text, key=self._key(name), description=description
            )
            self._artifact_ids[name] = created

    def _tell_account(self, told: AccountReport) -> None:
        self._tell_table("ettr", told.rows, told.text)
        picture = _inline("where the time of every attempt went", told.png)
        self._tell_markdown("timeline", f"{told.text}.\n\n{picture}", "Timeline of the attempts")

    def _update(self, name: str, data: str, description: str) -> bool:
        """Change an artifact in place; a new version each time would be thousands in a run."""
        known = self._artifact_ids.get(name)
        if known is None:
            return False
        with get_client(sync_client=True) as client:
            client.update_artifact(known, ArtifactUpdate(data=data, description=description))
        return True


def _headline(fault: Fault, answer: str) -> str:
    """What happened and what is done; cards of the UI cut off what comes late."""
    step = f", step {fault.step}" if fault.step is not None else ""
    return f"{fault.fault_class} -> {answer}: {fault.where}{step}"


def _story_first(row: dict[str, Any]) -> dict[str, Any]:
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
