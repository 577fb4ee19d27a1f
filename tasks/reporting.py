"""Artifacts and events, sent to the Prefect server from a thread of their own.

With the server down one call blocks for over a minute (3.8.8: five client retries with
back-off), so nothing here may run in the flow's thread, and nothing here may fail a run: what
the server did not take waits and is sent again, unless it refuses it for good. Only the newest
update of an artifact waits, and the newest `MAX_EVENTS` events. Times are seconds.
"""

from __future__ import annotations

import contextvars
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any
from uuid import UUID

import httpx
from prefect.events import emit_event
from prefect.exceptions import EventTooLarge, ObjectAlreadyExists, ObjectNotFound, PrefectException

from perdure.storage.errors import StorageError
from perdure.tasks.artifacts import Artifact, Artifacts
from perdure.tasks.prefect_client import without_retries

# A server that is started again on a busy machine is back after 20 to 40 s. Nothing is lost by the
# wait: the end of the flow run needs the server, too, and the run has ended already.
CLOSE_TIMEOUT_S = 60.0
RETRY_S = 5.0
NOT_YET_S = 0.5
LAST_RETRY_S = 0.5  # once the run has ended: what is not sent soon is never sent
MAX_EVENTS = 1000  # that wait: an outage of days must not fill the memory of the flow's process
EVENT = "event-"  # how the names of events begin
PASSING = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})
# Fields of a payload that become labels of the resource, `perdure.fault_class` and so on.
LABELS = ("fault_class", "rung", "point", "node", "recoverable_by", "need")

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


class NotYet(Exception):  # noqa: N818 no error: it is soon time
    """The report has to wait for something that is under way; nothing is wrong."""


class Reporter:
    """Sends what is reported of a run to the Prefect server.

    Args:
        run_id: run that is reported.
        flow_run_id: flow run that artifacts and events belong to.
        logger: learns once that the server is away.
        flow_runs: flow runs that have supervised the run, for the artifacts that they have left.
    """

    def __init__(
        self,
        run_id: str,
        flow_run_id: UUID | None,
        logger: Log,
        *,
        flow_runs: Callable[[], Sequence[UUID]] = tuple,
    ) -> None:
        self._run_id = run_id
        self._flow_run_id = flow_run_id
        self._logger = logger
        self._waiting: dict[str, Callable[[], None]] = {}
        self._wake = threading.Condition()
        self._closing = False
        self._give_up_s = float("inf")
        # An outage is one line of the log, or one for each name where some are taken meanwhile.
        self._refused: set[str] = set()
        self._why: str | None = None  # the last one was not sent
        self._num_dropped = 0  # events, not yet in the log
        self._artifacts = Artifacts(run_id, flow_run_id, flow_runs)
        # Settings and the flow run of the caller: events are related to both.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._loop,), name="perdure-reporter", daemon=True
        )

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Send what is waiting, for a bounded time, and end."""
        with self._wake:
            self._closing = True
            self._give_up_s = time.monotonic() + timeout_s - LAST_RETRY_S
            self._wake.notify()
        self._thread.join(timeout_s)
        self._log_dropped()
        if self._thread.is_alive():
            self._logger.warning("the Prefect server did not take the last artifacts in time")

    def artifact(self, artifact: Artifact) -> None:
        """Show it; what has not changed is not sent."""
        self.submit(artifact.name, lambda: self._artifacts.put(artifact))

    def artifacts(self, name: str, build: Callable[[], list[Artifact]]) -> None:
        """Show what `build` makes in the thread of the reporter: reading and drawing take time."""

        def send() -> None:
            for artifact in build():
                self._artifacts.put(artifact)

        self.submit(name, send)

    def event(self, kind: str, payload: Mapping[str, Any], *, at_s: float | None = None) -> None:
        """An event `perdure.<kind>` about this run, for automations.

        Args:
            kind: last part of the event's name.
            payload: all known facts.
            at_s: time of the event, which may be long before its report; None: now.
        """
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
        occurred = datetime.fromtimestamp(at_s, UTC) if at_s is not None else datetime.now(UTC)

        def send() -> None:
            emit_event(
                f"perdure.{kind}",
                resource=resource,
                occurred=occurred,
                related=related,
                payload=document,
            )

        # Unlike an artifact, an event is not replaced by the next: its name is its own.
        with self._wake:
            waiting = [name for name in self._waiting if name.startswith(EVENT)]
            for name in waiting[: max(0, len(waiting) - MAX_EVENTS + 1)]:
                del self._waiting[name]
                self._refused.discard(name)
                self._num_dropped += 1
        self.submit(f"{EVENT}{kind}-{id(send)}", send)

    def submit(self, name: str, send: Callable[[], None]) -> None:
        """Have something sent; of what has the same name only the newest."""
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
            except NotYet:
                self._keep(name, send, NOT_YET_S)
            except Exception as error:  # noqa: BLE001 a dead server must never end a run
                if is_final(error):
                    self._give_up(name, error)
                else:
                    self._retry_later(name, send, error)
            else:
                self._why = None
                self._refused.discard(name)
                if name.startswith(EVENT):
                    self._log_dropped()

    def _log_dropped(self) -> None:
        with self._wake:
            number, self._num_dropped = self._num_dropped, 0
        if number:
            text = "%d events were never sent: more than %d waited for the Prefect server"
            self._logger.warning(text, number, MAX_EVENTS)

    def _give_up(self, name: str, error: Exception) -> None:
        """Drop what the server never takes; what comes next of its name is tried again."""
        if name not in self._refused:
            self._logger.warning("the Prefect server refuses %s, not sent again: %s", name, error)
        if not name.startswith(EVENT):
            self._refused.add(name)

    def _retry_later(self, name: str, send: Callable[[], None], error: Exception) -> None:
        """Keep what was not sent, unless something newer of its name is waiting."""
        why = why_not_sent(error)
        if name not in self._refused and why != self._why:
            self._logger.warning(f"{why}, retrying: %s", name, error)
        self._refused.add(name)
        self._why = why
        # A busy SQLite refuses a call now and then (3.8.8), the last ones of a run as well.
        self._keep(name, send, RETRY_S)

    def _keep(self, name: str, send: Callable[[], None], wait_s: float) -> None:
        with self._wake:
            self._waiting.setdefault(name, send)
            if time.monotonic() > self._give_up_s:
                self._logger.warning("never sent: %s", ", ".join(self._waiting))
                self._waiting.clear()
                return
            self._wake.wait_for(lambda: self._closing, wait_s)
        if self._closing:
            time.sleep(LAST_RETRY_S)


def is_final(error: Exception) -> bool:
    """Whether the server would refuse the same again."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.is_client_error and error.response.status_code not in PASSING
    return isinstance(error, EventTooLarge | ObjectNotFound | ObjectAlreadyExists)


def why_not_sent(error: Exception) -> str:
    """Line of the log about a report that was not sent, with a place for the report's name."""
    if isinstance(error, StorageError):
        return "%s waits for the run's store"
    if isinstance(error, httpx.HTTPError | PrefectException | OSError):
        return "the Prefect server does not take %s"
    return "%s cannot be made"


def labels_of(payload: Mapping[str, Any]) -> dict[str, str]:
    """Labels of an event that automations can match; triggers do not see the payload."""
    return {
        f"perdure.{name}": str(payload[name]) for name in LABELS if payload.get(name) is not None
    }
