"""The name of a state on the server, where a hook has found it after the state was sent.

The hook of a task runs when the server is being told of the task's state, and changes to that state
reach nobody (3.8.8). A second state takes its place: `Undecided`, then `RestartInPlace`. Times are
seconds.
"""

from __future__ import annotations

import time
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound

from perdure.tasks.reporting import NotYet, Reporter
from perdure.tasks.states import UNDECIDED

# The server learns of task runs from events, which an outage may have lost.
KNOWN_AFTER_S = 60.0


def name_state(reporter: Reporter, task_run_id: UUID, named: State[Any]) -> None:
    """Have a state take the place of `Undecided` on the server, once the server has that."""
    state: State[Any] = State(type=named.type, name=named.name, message=named.message)
    asked_s = time.monotonic()

    def send() -> None:
        with get_client(sync_client=True) as client:
            try:
                shown = client.read_task_run(task_run_id).state
            except ObjectNotFound:
                shown = None
            is_known = shown is not None and shown.name == UNDECIDED
            if not is_known and time.monotonic() - asked_s < KNOWN_AFTER_S:
                raise NotYet(f"task run {task_run_id} has not ended on the server")
            client.set_task_run_state(task_run_id, state, force=True)

    reporter.submit(f"state of {task_run_id}", send)
