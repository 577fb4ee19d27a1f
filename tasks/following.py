"""Following a run to its end, in a flow run that was started while another one supervises it.

While it follows, its state is `AlreadySupervised`, of the type Running. It supervises nothing and
writes nothing to the ledger; it ends as the run ends. Cancelling it ends it alone. Once nobody has
supervised the run for a while, it takes the run as any next supervisor does. One that crashed and
is started again goes on following: it begins no run again that has ended in the meantime.
Times are seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, PrefectException
from prefect.settings import PREFECT_UI_URL
from prefect.states import Cancelled, Running

from perdure.storage.errors import StorageError
from perdure.tasks.entry import ALREADY_SUPERVISED, supervised_by
from perdure.tasks.prefect_client import client_without_retries
from perdure.tasks.relaunch import is_of_keeper
from perdure.tasks.reporting import Log
from perdure.tasks.runs import run_of
from perdure.tasks.states import FINAL_STATES
from perdure.training.config.job import Job
from perdure.training.journal.history import RunHistory
from perdure.training.reporting.ettr import Accountant
from perdure.training.reporting.fault_report import ReportPlace, fault_reports
from perdure.training.reporting.summary import final_message
from perdure.training.supervisor.run_handle import RunHandle

POLL_S = 5.0
# The flow run that supervised has the first turn: it is back 30 s after its crash, and the time
# that a worker needs to start it. So the two change places only where it does not come.
ALONE_S = 90.0
HANDED_OVER = "another process of this flow run is started, or it is suspended"


def may_follow() -> bool:
    """Whether this flow run waits beside a supervisor.

    Not that of a terminal, where Ctrl-C must not end a run that it has taken meanwhile; not a
    tick, since the next ones train; not one that was started to supervise, and is not needed.
    """
    flow_run = _current_flow_run()
    return (
        flow_run is not None
        and flow_run.deployment_id is not None
        and not flow_run.auto_scheduled
        and not is_of_keeper(flow_run)
    )


def goes_on_following() -> bool:
    """Whether this flow run, which begins to run, followed before and has not ended since."""
    flow_run = _current_flow_run()
    if flow_run is None or flow_run.deployment_id is None:
        return False
    with get_client(sync_client=True) as client:
        return followed(client.read_flow_run_states(flow_run.id)[:-1])  # the last one is this start


def is_follower(flow_run_id: UUID) -> bool:
    """Whether a flow run that is over only followed a run when it last ran.

    Raises:
        Exception: the server does not answer.
    """
    with get_client(sync_client=True) as client:
        return _last_ran(client.read_flow_run_states(flow_run_id)) == ALREADY_SUPERVISED


def followed(states: Sequence[State[object]]) -> bool:
    """Whether a flow run followed when it last ran, and nothing but a crash has ended it.

    Args:
        states: states of the flow run, oldest first.
    """
    ends = [number for number, state in enumerate(states) if state.is_final()]
    if ends and not states[ends[-1]].is_crashed():
        return False  # a user starts it once more, and means the run
    return _last_ran(states) == ALREADY_SUPERVISED


def _last_ran(states: Sequence[State[object]]) -> str | None:
    return next((state.name for state in reversed(states) if state.is_running()), None)


def _current_flow_run() -> FlowRun | None:
    context = FlowRunContext.get()
    return context.flow_run if context is not None else None


def follow(job: Job) -> State[object] | None:
    """Wait beside the supervisor of a run.

    Returns:
        The state to end in; None when nobody supervises the run: it is to be taken.

    Raises:
        Abort: this process is to end, and the state of its flow run is another's.
    """
    flow_run = _current_flow_run()
    assert flow_run is not None  # noqa: S101 whoever follows is in a flow run
    follower = Follower(run_of(job), flow_run.id, get_run_logger())
    while True:
        end = follower.look()
        if end is not None or follower.has_taken_over:
            return end
        time.sleep(POLL_S)


class Follower:
    """A flow run that follows the supervisor of a run.

    Args:
        run: run that is followed; it is only read.
        flow_run_id: id of the flow run that follows.
        logger: logger of the flow run.
        clock: monotonic time in seconds.

    Attributes:
        has_taken_over: whether the flow run shows that it supervises from now on.
    """

    def __init__(
        self,
        run: RunHandle,
        flow_run_id: UUID,
        logger: Log,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.has_taken_over = False
        self._run = run
        self._flow_run_id = flow_run_id
        self._logger = logger
        self._clock = clock
        self._supervised_s = clock()
        self._is_held_up = False

    def look(self) -> State[object] | None:
        """Look once. The state to end in, None while there is none.

        Raises:
            Abort: the flow run is another process's by now.
        """
        try:
            history = self._run.refresh()
            if is_over(self._run, history):
                return end_of(self._run, history)
            # Right after an outage the lease is old, though its holder lives.
            if self._is_held_up or self._run.ledger.is_supervised():
                self._supervised_s = self._clock()
            with client_without_retries() as client:
                end = self._keep_state(client, history)
        except (httpx.HTTPError, PrefectException, OSError, StorageError) as error:
            # Store or server are away: what cannot be read is read later, also after days.
            if not self._is_held_up:
                self._logger.warning("cannot be followed now, tried again: %s", error)
            self._is_held_up = True
            return None
        self._is_held_up = False
        return end

    def _keep_state(self, client: SyncPrefectClient, history: RunHistory) -> State[object] | None:
        """Follow a request to cancel; else show what this flow run does."""
        state = client.read_flow_run(self._flow_run_id).state
        if state is not None and (state.is_cancelling() or state.is_cancelled()):
            return Cancelled(message="it only followed: the run goes on without it")
        if state is not None and (state.is_paused() or state.is_scheduled() or state.is_pending()):
            raise Abort(HANDED_OVER)
        if self._clock() - self._supervised_s > ALONE_S:
            # Shown before the run is taken: from then on, to cancel this one is to cancel the run.
            self._show(client, Running(message="nobody supervised the run: takes it over"))
            self.has_taken_over = True
            return None
        wanted: State[object] = Running(name=ALREADY_SUPERVISED, message=text_of(history))
        # Other final states are a report of its end, and it lives.
        shown = (state.type, state.name, state.message) if state is not None else None
        if shown != (wanted.type, wanted.name, wanted.message):
            self._show(client, wanted)
        return None

    def _show(self, client: SyncPrefectClient, state: State[object]) -> None:
        client.set_flow_run_state(self._flow_run_id, state, force=True)
        self._logger.log(logging.INFO, state.message or state.name)


def text_of(history: RunHistory) -> str:
    """Message that a flow run shows while it follows; it changes with the supervisor only."""
    name = (history.job or {}).get("run_id", "")
    return f"follows run {name} to its end, which is {supervised_by(history)}; supervises nothing"


def is_over(run: RunHandle, history: RunHistory) -> bool:
    """Whether a run is over for who follows it, and no supervisor has begun to take it further.

    One that was completed is not when the job of the follower has a larger target.
    """
    if history.ended is None or history.ended.epoch < history.epoch:
        return False
    return run.is_complete or not history.ended_well


def end_of(run: RunHandle, history: RunHistory) -> State[object]:
    """The end of a run, as the flow run that supervised has it, and where to read more."""
    ended = history.ended
    assert ended is not None  # noqa: S101 the caller looked
    account = Accountant(run.store, run.job.run_id).account(history, now_s=ended.at_s)
    parts = [final_message(ended.message, history, ettr=account.ettr or None)]
    place = ReportPlace(run.job.run_id, run.store.url)
    reports = fault_reports(history, place, recent=len(history.attempts))
    if reports:
        parts.append(f"fault report: {_address_of(f'{run.job.run_id}-{reports[-1].name}')}")
    parts.append(f"was {supervised_by(history)}")
    return FINAL_STATES[ended.outcome](message="; ".join(parts))


def _address_of(key: str) -> str:
    """The page of an artifact, which `url_for` does not know (3.8.8); its key without a UI."""
    base = PREFECT_UI_URL.value()
    return f"{base.rstrip('/')}/artifacts/key/{key}" if base else key
