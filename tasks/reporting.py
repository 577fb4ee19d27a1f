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

from training.policy.faults import Fault
from training.policy.history import RunHistory
from training.policy.ladder import Decision
from training.runtime.metrics import StepRecord
from training.supervisor.report import AttemptRow

CLOSE_TIMEOUT_S = 15.0
RETRY_S = 5.0
PROGRESS_PERIOD_S = 2.0

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
        table = [asdict(row) for row in rows]
        self._submit("attempts", lambda: self._tell_table("attempts", table, "Attempts of the run"))

    def checkpoints(self, history: RunHistory) -> None:
        """The table of committed checkpoints."""
        table = [
            {"step": seen.step, "placement": seen.placement, "attempt": seen.attempt}
            for seen in history.checkpoints
        ]
        self._submit(
            "checkpoints", lambda: self._tell_table("checkpoints", table, "Committed checkpoints")
        )

    def fault(
        self,
        placement: int,
        attempt: int,
        fault: Fault,
        decision: Decision,
        runners_up: Sequence[Fault] = (),
    ) -> None:
        """The report and the events of one fault and what is done about it."""
        name = f"fault-p{placement}-a{attempt}"
        text = fault_report(placement, attempt, fault, decision, runners_up)
        self._submit(name, lambda: self._tell_markdown(name, text, f"Fault: {fault.fault_class}"))
        self.event("fault", {"fault_class": fault.fault_class, "evidence": fault.evidence,
                             "node": fault.node, "rank": fault.rank, "code": fault.code,
                             "step": fault.step, "device": fault.device,
                             "recoverable_by": fault.recoverable_by,
                             "user_fault": fault.user_fault,
                             "hardware_fault": fault.hardware_fault})  # fmt: skip
        self.event("recovery", {"rung": decision.rung, "reason": decision.reason,
                                "isolate": decision.isolate, "placement": placement,
                                "attempt": attempt})  # fmt: skip

    def picture(self, png: bytes) -> None:
        """The loss picture; inline, so that the UI needs no file server."""
        uri = "data:image/png;base64," + base64.b64encode(png).decode()
        text = f"![loss with faults marked]({uri})"
        self._submit("loss", lambda: self._tell_markdown("loss", text, "Loss, faults marked"))

    def event(self, kind: str, payload: Mapping[str, Any]) -> None:
        """An event `perdure.<kind>` about this run, for automations."""
        resource = {
            "prefect.resource.id": f"perdure.run.{self._run_id}",
            "prefect.resource.name": self._run_id,
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
        if not self._update(name, json.dumps(table)):
            created: Any = create_table_artifact(
                table, key=self._key(name), description=description
            )
            self._artifact_ids[name] = created

    def _tell_markdown(self, name: str, text: str, description: str) -> None:
        if not self._update(name, text):
            created: Any = create_markdown_artifact(
                text, key=self._key(name), description=description
            )
            self._artifact_ids[name] = created

    def _update(self, name: str, data: str) -> bool:
        """Change an artifact in place; a new version each time would be thousands in a run."""
        known = self._artifact_ids.get(name)
        if known is None:
            return False
        with get_client(sync_client=True) as client:
            client.update_artifact(known, ArtifactUpdate(data=data))
        return True


def fault_report(
    placement: int,
    attempt: int,
    fault: Fault,
    decision: Decision,
    runners_up: Sequence[Fault] = (),
) -> str:
    """What a person reads about a fault, as Markdown."""
    skipped = "".join(f"\n- not `{text}`" for text in decision.skipped)
    isolate = f"\n\nNode **{decision.isolate}** is isolated." if decision.isolate else ""
    return (
        f"## {fault.fault_class} at {fault.where}\n\n"
        f"Attempt {placement}.{attempt}, after step {fault.step}.\n\n"
        f"```\n{fault.evidence}\n```\n\n{fault.explanation}\n\n"
        f"{_facts(fault)}"
        f"**Decision: `{decision.rung}`.** {decision.reason}{isolate}\n{skipped}\n"
        f"{_less_likely(runners_up)}"
    )


def _facts(fault: Fault) -> str:
    blame = (("the program", fault.user_fault), ("hardware", fault.hardware_fault))
    rows = (
        ("code", fault.code),
        ("device", fault.device),
        ("cause lies in", " and ".join(who for who, holds in blame if holds)),
        ("mended by", fault.recoverable_by),
        ("you should", fault.action),
    )
    told = "".join(f"| {name} | {value} |\n" for name, value in rows if value not in {None, ""})
    return f"| | |\n|---|---|\n{told}\n" if told else ""


def _less_likely(runners_up: Sequence[Fault]) -> str:
    if not runners_up:
        return ""
    rows = "".join(f"- {fault.fault_class}: `{fault.evidence[:200]}`\n" for fault in runners_up)
    return f"\nLess likely:\n\n{rows}"


def progress_text(last: StepRecord | None, target: int | None, activity: str) -> str:
    """One line under the progress bar."""
    if last is None:
        return activity
    return (
        f"step {last.step} / {target or '?'}, loss {last.loss:.4f}, "
        f"{last.tokens_per_s:,.0f} tokens/s: {activity}"
    )
