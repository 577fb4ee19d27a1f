"""States that tasks return, typed as the data they carry.

The UI shows a state's name and message, the caller wants its data: call the task with
`return_state=True` and take `data_of` what comes back. A state must be fresh each time; one
that came from another run loses name and data (Prefect 3.8.8).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, cast
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State, StateType
from prefect.states import Cancelled, Completed, Crashed, Failed

UNDECIDED = "Undecided"  # of an attempt that has failed, until the hook has its decision
BY_PLATFORM = "EndedByPlatform"  # of type Crashed: whoever has it is started again

T = TypeVar("T")

# State of a flow run, by the outcome of its run.
FINAL_STATES: Mapping[str, Callable[..., State[Any]]] = {
    "completed": Completed,
    "cancelled": Cancelled,
    "failed": Failed,
    "ended from outside": partial(Crashed, name=BY_PLATFORM),
}


def completed(data: T, message: str, *, name: str = "Completed") -> T:
    """A task that did its work."""
    return cast("T", Completed(name=name, message=message, data=data))


def failed(data: T, message: str, *, name: str) -> T:
    """A task whose failure the flow knows how to answer from `data`."""
    return cast("T", Failed(name=name, message=message, data=data))


def data_of(state: State[T]) -> T:
    """Result that a task put into its state.

    Raises:
        Exception: the task raised instead of returning a state.
    """
    data: T | BaseException = state.result(raise_on_failure=False)
    if isinstance(data, BaseException):
        raise data
    return data


def give_back_end(client: SyncPrefectClient, flow_run_id: UUID) -> None:
    """Give a flow run the end back over which its second process has set it Running.

    A cluster may start a second process for a flow run whose first one is just about to leave.
    """
    states = client.read_flow_run_states(flow_run_id)  # oldest first
    newest = states[-1] if states else None
    if newest is None or not (newest.is_running() or newest.is_pending()):
        return
    beginnings = (StateType.RUNNING, StateType.PENDING)
    former = next((state for state in reversed(states) if state.type not in beginnings), None)
    if former is None or not former.is_final() or former.is_crashed():
        return  # it crashed, or a user starts it once more
    end: State[Any] = State(type=former.type, name=former.name, message=former.message)
    client.set_flow_run_state(flow_run_id, end, force=True)
