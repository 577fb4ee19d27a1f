"""The states of flow runs: what a second process of one leaves behind."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import State
from prefect.states import (
    AwaitingRetry,
    Cancelled,
    Completed,
    Crashed,
    Failed,
    Pending,
    Running,
    Scheduled,
)

from perdure.tasks.states import give_back_end


class Server:
    """A server with the states of one flow run."""

    def __init__(self, *states: State[object]) -> None:
        self.states = list(states)

    def read_flow_run_states(self, _flow_run_id: UUID) -> list[State[object]]:
        return self.states

    def set_flow_run_state(self, _id: UUID, state: State[object], *, force: bool) -> None:
        assert force
        self.states.append(state)


@pytest.mark.parametrize(
    ("states", "end"),
    [
        ([Running(), Failed(message="no"), Running()], "Failed"),
        ([Running(), Completed(message="no"), Pending(), Running()], "Completed"),
        ([Running(), Cancelled(message="no"), Pending()], "Cancelled"),
        ([Running(), Failed(name="Undecided", message="no"), Running()], "Undecided"),
        ([Running(), Crashed(), Running()], None),
        ([Running(), Failed(), AwaitingRetry(), Running()], None),
        ([Running(), Failed(), Scheduled(), Pending(), Running()], None),
        ([Pending(), Running()], None),
        ([Running(), Failed()], None),
        ([], None),
    ],
)
def test_an_ended_flow_run_is_not_left_running_by_its_second_process(states, end):
    server = Server(*states)
    give_back_end(server, uuid4())  # type: ignore[arg-type]  # it has what is called
    if end is None:
        assert len(server.states) == len(states)
    else:
        last = server.states[-1]
        assert (last.name, last.message) == (end, "no")
        assert len(server.states) == len(states) + 1
