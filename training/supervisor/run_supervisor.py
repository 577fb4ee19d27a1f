"""A run under supervision: the actions of its supervisor, in an order the ledger can resume from.

Every record is appended before the action it announces, and every action is idempotent, so the
next supervisor goes on wherever this one is killed. The module knows nothing of Prefect: tasks
call these methods in turn. Times are seconds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import SecretStr

from perdure.storage.address import Credentials
from perdure.storage.errors import StorageError
from perdure.training.agent.log_collection import await_collected
from perdure.training.config.job import Job
from perdure.training.diagnosis.compiled import start_compiler
from perdure.training.engines.base import Placement
from perdure.training.engines.fleet import Fleet
from perdure.training.errors import AgentUnreachable, EngineError
from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.history import RunHistory
from perdure.training.journal.ledger import Identity
from perdure.training.journal.records import DataReady, RunCreated, RunEnded
from perdure.training.journal.waits import Wait
from perdure.training.node_checks.verdict import CheckVerdict
from perdure.training.reporting.action_items import spares_of
from perdure.training.supervisor.attempt_recorder import AttemptRecorder
from perdure.training.supervisor.attempt_watch import AttemptWatch
from perdure.training.supervisor.cancelling import CancelPoll, forget_cancel
from perdure.training.supervisor.chip_watch import ChipWatch
from perdure.training.supervisor.exit_zero import RunSoFar
from perdure.training.supervisor.finishing import (
    AttemptFinisher,
    AttemptResult,
    Decider,
    Healer,
)
from perdure.training.supervisor.health_watch import AttemptHealth, PeriodicRestart
from perdure.training.supervisor.job_registry import job_path, remember_job
from perdure.training.supervisor.ledger_writer import LedgerWriter
from perdure.training.supervisor.node_replacing import NodeReplacer, SlowNodeCheck
from perdure.training.supervisor.observing import placement_of
from perdure.training.supervisor.placement_checks import PlacementChecks
from perdure.training.supervisor.placing import Placer
from perdure.training.supervisor.preparing import Preparer
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.supervisor.run_identity import begin_store, check_takeover
from perdure.training.supervisor.stall_check import StallCheck
from perdure.training.supervisor.starting import AttemptStarter
from perdure.training.supervisor.store_outage import StoreOutage, forget_outage
from perdure.training.supervisor.termination import Termination
from perdure.training.supervisor.waiting import AgentSilence
from perdure.training.supervisor.warm_spares import WarmSpares
from perdure.training.supervisor.watch import AttemptEnd, AttemptStart, EndKind, Progress
from perdure.training.trainer.data.prepare import DataOutcome
from perdure.training.wire.requests import clear_requests
from perdure.training.wire.store_wait import Waiter, write_wait

_log = logging.getLogger("perdure.supervisor")
LAST_ENDS = (EndKind.COMPLETED, EndKind.ENDED_FROM_OUTSIDE)  # which a request to end does not cut
LOGS_WAIT_S = 30.0  # at the end of a run, for the upload of the last attempt's logs


class RunSupervisor(RunHandle):
    """One run, supervised by this process.

    Args:
        job: to be run.
        home: Perdure's folder on this machine.
        credentials: keys of the job's store; None: boto3's default chain.
        secrets: reads the values of the job's env_from that are in Prefect blocks; called when an
            attempt starts, may raise EngineError.
        cwd: folder the workers start in when the job names none; default: the caller's.
        flow_run: id of the flow run that this process belongs to; None without Prefect.
        outage: has ledger and checkpoints wait for a store that cannot be used; None: they raise.

    Attributes:
        on_wait: called with what this supervisor waits for, and with None when that is over.
    """

    def __init__(
        self,
        job: Job,
        *,
        home: Path,
        credentials: Credentials | None = None,
        secrets: Callable[[], Mapping[str, SecretStr]] = dict,
        cwd: Path | None = None,
        flow_run: str | None = None,
        outage: StoreOutage | None = None,
    ) -> None:
        retry = outage.retry() if outage is not None else None
        super().__init__(job, home=home, credentials=credentials, retry=retry)
        self._secrets = secrets
        self._writer = LedgerWriter(self.ledger, self.checkpoints)
        self._cwd = _folder_of_workers(job, cwd or Path.cwd())
        self._identity = Identity.of_this_process(flow_run=flow_run)
        self._outage = outage
        self.on_wait: Callable[[Wait | None], None] = lambda _wait: None
        self._fleet: Fleet | None = None
        self._warm_spares: WarmSpares | None = None
        self._cancel_poll: CancelPoll | None = None
        self._watched: tuple[AttemptWatch, AttemptView, AttemptEnd] | None = None
        self.termination = Termination()

    @property
    def history(self) -> RunHistory:
        """The ledger's content when it was last read."""
        return self._writer.history

    def refresh(self) -> RunHistory:
        """Re-read the ledger."""
        return self._writer.refresh()

    def take(self) -> RunHistory:
        """Become the run's supervisor, creating the run when it is new.

        Raises:
            RunConflict: another supervisor lives, or the run belongs to a different job, or its
                containers are another machine's or another home folder's, or its ledger is gone.
            InputError: the folder of its store holds none, and did before.
        """
        begin_store(self.job, self.home)
        previous = self.ledger.read()
        check_takeover(self.job, previous, self._identity, self.home)
        history = self.ledger.take(self._identity)
        if history.job is None:
            document = self.job.model_dump(mode="json")
            self.ledger.append(RunCreated, job=document, cwd=self._cwd)
        self._cwd = history.cwd or self._cwd
        remember_job(self.home, self.job)
        forget_outage(self.home, self.job.run_id)
        forget_cancel(self.home, self.job.run_id)
        write_wait(job_path(self.home, self.job.run_id).parent, None)
        history = self.refresh()
        self._fleet = self._make_fleet(self.ledger.epoch)
        return history

    @property
    def fleet(self) -> Fleet:
        """The containers and their agents; take() comes first."""
        assert self._fleet is not None, "take() first"  # noqa: S101 our own bug
        return self._fleet

    def spares(self) -> list[str] | None:
        """List healthy nodes that the run does not use now; None: not known here."""
        if self._fleet is None:
            return None
        with suppress(EngineError):
            nodes = self._fleet.nodes()
            return spares_of(nodes, self.history) if nodes is not None else None
        return None

    @property
    def warm_spares(self) -> Sequence[str]:
        """Nodes with a warm spare that is ready to take a member."""
        return self._warm_spares.ready if self._warm_spares is not None else ()

    @property
    def _decider(self) -> Decider:
        return Decider(self.job, self.fleet, self._writer)

    @property
    def _healer(self) -> Healer:
        return Healer(self._decider, self._cwd)

    @property
    def _placer(self) -> Placer:
        return Placer(self._healer, identity=self._identity, home=self.home, on_wait=self.note_wait)

    def note_wait(self, wait: Wait | None, *, by: Waiter = Waiter.SUPERVISOR) -> None:
        """Show a wait of this process, here and to readers of its lease or on this machine."""
        self.ledger.wait = wait
        write_wait(job_path(self.home, self.job.run_id).parent, wait, by=by)
        self.on_wait(wait)

    @property
    def _finisher(self) -> AttemptFinisher:
        return AttemptFinisher(self._healer, self.store)

    def record_data(self, outcome: DataOutcome) -> None:
        """Put the outcome of data preparation on record."""
        self.ledger.append(
            DataReady,
            manifest_key=outcome.manifest_key,
            num_tokens=outcome.num_tokens,
            skipped=outcome.skipped,
            written_shards=outcome.written_shards,
            damaged_shards=outcome.damaged_shards,
            duration_s=outcome.duration_s,
        )

    def pending_end(self) -> AttemptResult | None:
        """Return the result of the attempt that ended the run, whose end is not on record yet."""
        view = self.refresh().unclosed_attempt
        if view is None or view.ended is None:
            return None
        end = view.ended
        return AttemptResult(EndKind(end.outcome), *view.key, end.to_step, notes=end.notes)

    def place(self, *, stop_wanted: Callable[[], bool] = lambda: False) -> Placement:
        """Find the placement of the next attempt: the living placement, or a new one.

        Raises:
            EngineError: no placement is possible, and the ladder stops the run.
        """
        return self._placer.place(stop_wanted=self._or_cancelled(stop_wanted))

    def _or_cancelled(self, stop_wanted: Callable[[], bool]) -> Callable[[], bool]:
        """Return a predicate: the caller wants a stop, or the run's store has a request."""
        poll = self._cancel_poll = self._cancel_poll or CancelPoll(
            self.job, self.home, self._credentials
        )
        return lambda: poll.is_wanted or stop_wanted()

    def wants_checks(self, placement: Placement) -> bool:
        """Whether a placement is checked: nothing has been started on it yet."""
        return self.job.preflight.nodes and not self.refresh().attempts_in(placement.number)

    def check(self, placement: Placement) -> CheckVerdict:
        """Check the nodes before a first step.

        Nodes that fail are refused: place() again finds others.

        Raises:
            EngineError: before the first attempt, something is wrong that no node is to blame for.
        """
        return PlacementChecks(self.job, self.fleet, self._writer).run(placement)

    def preparer(self, placement: Placement) -> Preparer:
        """Build what has data prepared on the nodes of a placement, by the job's command."""
        return Preparer(
            self.job,
            self.fleet,
            self.store,
            placement,
            epoch=self.ledger.epoch,
            cwd=self._cwd,
            is_cancelled=self._or_cancelled(lambda: False),
        )

    def attempt(
        self,
        placement: Placement,
        *,
        data_manifest_key: str | None,
        stop_wanted: Callable[[], bool],
        on_progress: Callable[[Progress], None],
    ) -> AttemptResult:
        """Start the next attempt, or adopt the living attempt, and conclude it at its end."""
        with self.termination.deferred():
            self.watch(
                placement,
                data_manifest_key=data_manifest_key,
                stop_wanted=stop_wanted,
                on_progress=on_progress,
            )
            result = self.conclude(stop_wanted)
        self.leave_where_asked(result)
        return result

    def watch(
        self,
        placement: Placement,
        *,
        data_manifest_key: str | None,
        stop_wanted: Callable[[], bool],
        on_progress: Callable[[Progress], None],
    ) -> AttemptResult:
        """Start the next attempt, or adopt the living attempt, and watch it to its end.

        Returns:
            How it ended; of a failure neither the fault nor a decision: conclude() has both.
        """
        start_compiler()  # or the recovery from the first fault would wait for it
        stop_wanted = self._or_cancelled(stop_wanted)
        view = self.refresh().open_attempt
        if view is None:
            view = self._writer.begin_attempt(placement.number)
        starter = self._starter(view, placement, data_manifest_key)
        watch = self._watch(starter, stop_wanted, on_progress)
        with self._stopping_meanwhile(watch):
            end = self._end_of(starter, placement, watch)
            end = self._finisher.complete_if_done(view, end)
        self._watched = (watch, view, end)
        return AttemptResult(end.kind, *view.key, end.last_step, notes=end.notes)

    def conclude(self, stop_wanted: Callable[[], bool]) -> AttemptResult:
        """Put the end of the attempt that was watched on record, with the decision about it.

        A second call, or a call after one that was cut off, does what is not on record yet.
        """
        assert self._watched is not None, "watch() first"  # noqa: S101 our own bug
        watch, view, end = self._watched
        with self._stopping_meanwhile(watch):
            return self._finisher.conclude(view, end, self._or_cancelled(stop_wanted))

    def leave_where_asked(self, result: AttemptResult) -> None:
        """End this process where the platform has asked for it while an attempt was under way."""
        if self.termination.is_wanted and result.kind not in LAST_ENDS:
            self.termination.leave_now()

    @contextmanager
    def _stopping_meanwhile(self, watch: AttemptWatch) -> Iterator[None]:
        """Have a request to stop end the processes also while this thread waits for the store."""
        if self._outage is None:
            yield
            return
        thread = threading.current_thread()

        def stop() -> None:
            if threading.current_thread() is thread:
                if self.termination.is_alone() and not self.termination.owns_machine:
                    self.termination.leave_now()
                watch.stop_where_wanted()

        self._outage.meanwhile = stop
        try:
            yield
        finally:
            self._outage.meanwhile = lambda: None

    def _end_of(
        self, starter: AttemptStarter, placement: Placement, watch: AttemptWatch
    ) -> AttemptEnd:
        if starter.has_started():
            return watch.run()
        # First: a process of an earlier attempt that lives on can commit nothing from here on.
        self._writer.fence(placement, starter.view.key)
        try:
            starter.start()
        except (EngineError, AgentUnreachable) as error:
            return watch.wind_up(refusal=str(error))
        return watch.run()

    def _starter(
        self, view: AttemptView, placement: Placement, data_manifest_key: str | None
    ) -> AttemptStarter:
        return AttemptStarter(
            self.job,
            self.fleet,
            self._writer,
            self.store,
            view,
            placement,
            cwd=self._cwd,
            secrets=self._secrets,
            data_manifest_key=data_manifest_key,
        )

    def _watch(
        self,
        starter: AttemptStarter,
        stop_wanted: Callable[[], bool],
        on_progress: Callable[[Progress], None],
    ) -> AttemptWatch:
        """Put the watchers of an attempt together."""
        job, view = self.job, starter.view
        patience = starter.patience
        stall = StallCheck(job, view.started.at_s, patience)
        health = AttemptHealth(job.watch, view, stall)
        replacer = NodeReplacer(self._decider, self._placer, starter, health)
        self._warm_spares = self._warm_spares or WarmSpares(
            job, self.fleet, self._placer, history=lambda: self.history, clock=time.monotonic
        )
        spares, writer = self._warm_spares, self._writer
        recorder = AttemptRecorder(
            writer, view, health, self.fleet, self.store, job.run_id, spares, on_progress
        )
        watch = AttemptWatch(
            self.fleet,
            job,
            AttemptStart(view.key, view.started.at_s, patience.factor),
            stop_wanted=stop_wanted,
            on_progress=recorder.record,
            watchers=(
                # First: the replacer may take new checkpoints out of the progress.
                PeriodicRestart(job.restart.every_s, view.started.at_s),
                replacer,
                ChipWatch(starter, self._placer),
                stall,
                SlowNodeCheck(replacer),
                AgentSilence(self.note_wait),
            ),
            termination=self.termination,
        )
        watch.know(RunSoFar.of(self.history))
        return watch

    def end(self, outcome: str, message: str) -> None:
        """Put the end of the run on record and take its containers down.

        The end is on record also where the platform refuses: it then names what is left over.

        Raises:
            RunConflict: another supervisor has taken the run; nothing was done.
        """
        self.ledger.renew()  # fails where another has the run, before its containers are touched
        self.termination = Termination()  # a signal leaves the run to another process: it ends here
        self._end_open_attempt()
        leftovers = self._take_down()
        view = self.refresh().open_attempt
        if self.history.attempts:  # saves in memory may be committed until the containers end
            self._writer.missed_checkpoints(self.history.attempts[-1])
        if view is not None:
            self._writer.end_attempt(view, "stopped", to_step=self.checkpoints.latest())
        # Not before the processes are gone, or they would train on for a moment.
        clear_requests(self.checkpoints.store, self.job.run_id)
        # Last: where a supervisor dies above, the next does all of it again.
        self.ledger.append(
            RunEnded,
            outcome=outcome,
            message=message,
            leftovers=leftovers,
            target_step=self.job.target_step,
            command=self.job.worker.command,
        )
        self.ledger.release()

    def _take_down(self) -> str:
        """Take the containers down. Returns what is left over, and why; "": nothing."""
        try:
            self._await_logs()
            self.fleet.cancel(self.job.engine.grace_s)
        except (EngineError, AgentUnreachable) as error:
            self.stop_processes()
            _log.warning("the containers cannot be taken down: %s", error)
            try:
                names = ", ".join(self.fleet.leftovers())
            except EngineError:
                names = ""
            return f"{names or 'containers'}: {error}"
        return ""

    def stop_processes(self) -> None:
        """Stop the processes of a run whose end cannot be recorded; their saves are kept."""
        with suppress(EngineError, AgentUnreachable):  # gone, or another supervisor has the run
            self.fleet.stop(self.job.engine.grace_s)

    def leave(self) -> None:
        """Give the run up without an end: the next supervisor goes on with it."""
        with suppress(StorageError):  # else it waits for the lease to run out
            self.ledger.release()

    def withdraw(self) -> None:
        """Take the containers down where nothing was ever started in them."""
        if self._fleet is None or self.refresh().placement is None or self.history.attempts:
            return
        with suppress(EngineError, AgentUnreachable):  # the next supervisor takes them over
            self._fleet.cancel(0.0)

    def _end_open_attempt(self) -> None:
        """Record the end of an attempt: its fault, or the last save that a request leaves it."""
        view, placement = self.refresh().open_attempt, placement_of(self.history)
        if view is None or placement is None:
            return
        starter = self._starter(view, placement, None)
        watch = self._watch(starter, lambda: True, lambda _progress: None)
        try:
            end = watch.run() if starter.has_started() else watch.end_of_failure()
            if end is not None:
                self._finisher.record_end(view, end)
        except (EngineError, AgentUnreachable):
            return  # its containers are gone, and the evidence with them

    def _await_logs(self) -> None:
        """Give the nodes the time to put the logs of the last attempt into the store."""
        attempts = self.refresh().attempts
        if attempts and attempts[-1].ended is not None:
            last = attempts[-1]
            await_collected(lambda: self.fleet.collect_logs(*last.key), timeout_s=LOGS_WAIT_S)

    def wait_to_restart(self, placement: Placement, stop_wanted: Callable[[], bool]) -> None:
        """Wait before a restart in place, as the policy has it; a request to stop ends the wait."""
        history = self.refresh()
        if history.open_attempt is not None or not history.attempts_in(placement.number):
            return
        until_s = time.monotonic() + self.job.restart.delay_s
        while time.monotonic() < until_s and not stop_wanted():
            time.sleep(min(1.0, until_s - time.monotonic()))

    def stopped(self) -> AttemptResult:
        """Return the result where a stop was requested between two attempts."""
        view = self.history.attempts[-1]
        assert view.ended is not None  # noqa: S101 the caller saw it end
        return AttemptResult(EndKind.STOPPED, *view.key, view.ended.to_step)


def _folder_of_workers(job: Job, caller: Path) -> str:
    """Return the folder that workers start in; "." elsewhere: the folder of their image."""
    if not job.engine.on_this_machine:
        return job.worker.cwd or "."
    return str((Path(job.worker.cwd) if job.worker.cwd else caller).resolve())
