"""A run under supervision: what happens next, done in the order the ledger can resume from.

Every record is appended before the action it announces, and every action is idempotent, so a
supervisor that is killed anywhere is followed by one that goes on at the same place. Knows
nothing of Prefect: tasks call these methods one by one. Times are seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import SecretStr

from perdure.storage.address import Credentials, open_store, worker_environment
from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.errors import StorageError
from perdure.training.agent.log_collection import await_collected
from perdure.training.config.job import Job
from perdure.training.diagnosis.compiled import start_compiler
from perdure.training.engines.base import Placement, Snapshot
from perdure.training.engines.fleet import Fleet
from perdure.training.engines.registry import make_fleet
from perdure.training.environment import variables_of
from perdure.training.errors import AgentUnreachable, EngineError
from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.events import AlertKind, AlertRaised
from perdure.training.journal.history import RunHistory
from perdure.training.journal.ledger import Identity, Ledger
from perdure.training.journal.records import DataReady, RunCreated, RunEnded
from perdure.training.node_checks.verdict import CheckVerdict
from perdure.training.reporting.action_items import spares_of
from perdure.training.reporting.fault_report import save_hang_report
from perdure.training.supervisor.checkpoints import NewestSave, resumption
from perdure.training.supervisor.evidence import progress_of
from perdure.training.supervisor.exit_zero import CommandExitCheck
from perdure.training.supervisor.finishing import (
    AttemptFinisher,
    AttemptResult,
    Decider,
    Healer,
    recoveries_of,
)
from perdure.training.supervisor.health_watch import AttemptHealth, PeriodicRestart
from perdure.training.supervisor.job_registry import remember_job
from perdure.training.supervisor.ledger_writer import LedgerWriter
from perdure.training.supervisor.node_replacing import NodeReplacer, replaces_nodes
from perdure.training.supervisor.observing import AttemptObserver
from perdure.training.supervisor.placing import Placer, placement_of
from perdure.training.supervisor.run_identity import (
    begin_store,
    is_complete,
    refuse_elsewhere,
    refuse_lost_ledger,
    refuse_other_job,
)
from perdure.training.supervisor.stall_check import StallCheck
from perdure.training.supervisor.store_outage import StoreOutage, forget_outage
from perdure.training.supervisor.warm_spares import WarmSpares
from perdure.training.supervisor.watch import (
    AttemptWatch,
    EndKind,
    Grace,
    HeldUpBy,
    Progress,
    Statuses,
    has_failure,
)
from perdure.training.trainer.data.prepare import DataOutcome
from perdure.training.wire.agent import AgentState, SavedCheckpoint, StartOrder
from perdure.training.wire.requests import clear_requests, is_cancel_wanted

_log = logging.getLogger("perdure.supervisor")
REJOIN_S = 120.0  # of ranks without a coordinator: until its node is seen to be lost, and after
CANCEL_POLL_S = 2.0
LOGS_WAIT_S = 30.0  # at the end of a run, for the upload of the last attempt's logs
# Recoveries in a start order. Those without progress are few in a row, and a window of a day
# holds no more of one code that matter.
MAX_PAST = 50


class Run:
    """One run, supervised by this process.

    Args:
        job: what is run.
        home: Perdure's folder on this machine.
        credentials: keys of the job's store; None: boto3's default chain.
        secrets: reads the values of the job's env_from that are in Prefect blocks; called when an
            attempt starts, may raise EngineError.
        cwd: folder the workers start in when the job names none; default: the caller's.
        flow_run: id of the flow run that this process is one of; None without Prefect.
        outage: has ledger and checkpoints wait for a store that cannot be used; None: they raise.
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
        self.job = job
        self._credentials = credentials
        self._secrets = secrets
        self.store = open_store(job.storage, credentials)
        self.outage = outage
        waiting = self.store
        if outage is not None:
            waiting = open_store(job.storage, credentials, retry=outage.retry())
        self.checkpoints = CheckpointStore(waiting, job.run_id)
        self.ledger = Ledger(waiting, job.run_id)
        self._writer = LedgerWriter(self.ledger, self.checkpoints)
        self._home = home
        self._cwd = _folder_of_workers(job, cwd or Path.cwd())
        self._identity = Identity.of_this_process(flow_run=flow_run)
        self._fleet: Fleet | None = None
        self._warm_spares: WarmSpares | None = None

    @property
    def history(self) -> RunHistory:
        """The ledger's content when it was last read."""
        return self._writer.history

    def take(self) -> RunHistory:
        """Become the run's supervisor, creating the run when it is new.

        Raises:
            RunConflict: another supervisor lives, or the run belongs to a different job, or its
                containers are another machine's or another home folder's, or its ledger is gone.
            InputError: the folder of its store holds none, and did before.
        """
        begin_store(self.job, self._home)
        before = self.ledger.read()
        if before.job is None:
            refuse_lost_ledger(self.job, self._home)
        refuse_other_job(self.job, before)
        if self.job.engine.on_this_machine:
            refuse_elsewhere(before, self._identity, self._home)
        history = self.ledger.take(self._identity)
        if history.job is None:
            document = self.job.model_dump(mode="json")
            self.ledger.append(RunCreated, job=document, cwd=self._cwd)
        self._cwd = history.cwd or self._cwd
        remember_job(self._home, self.job)
        forget_outage(self._home, self.job.run_id)
        history = self.refresh()
        self._fleet = self._make_fleet(self.ledger.epoch)
        return history

    def refresh(self) -> RunHistory:
        """Re-read the ledger."""
        return self._writer.refresh()

    def left_over(self) -> Sequence[str]:
        """Names of what the run still has where its containers were; nothing is taken down."""
        return self._make_fleet(self.refresh().epoch).left_over()

    def _make_fleet(self, epoch: int) -> Fleet:
        return make_fleet(
            self.job,
            home=self._home,
            epoch=epoch,
            secrets_env=worker_environment(self.job.storage, self._credentials),
            created_s=self.history.created_s,
        )

    @property
    def fleet(self) -> Fleet:
        """The containers and their agents; take() comes first."""
        assert self._fleet is not None, "take() first"  # noqa: S101 our own bug
        return self._fleet

    @property
    def home(self) -> Path:
        """Perdure's folder on this machine."""
        return self._home

    def spares(self) -> list[str] | None:
        """Healthy nodes that the run does not use now; None: not known here."""
        if self._fleet is None:
            return None
        try:
            nodes = self._fleet.nodes()
        except EngineError:
            return None
        return spares_of(nodes, self.history) if nodes is not None else None

    @property
    def warm_spares(self) -> Sequence[str]:
        """Nodes on which a container stands by, ready to take a member."""
        return self._warm_spares.ready if self._warm_spares is not None else ()

    @property
    def is_complete(self) -> bool:
        """Whether the run reached its target; a larger target than before is not reached yet."""
        return is_complete(self.job, self.history)

    @property
    def _decider(self) -> Decider:
        return Decider(self.job, self.fleet, self._writer)

    @property
    def _healer(self) -> Healer:
        return Healer(self._decider, self._cwd)

    @property
    def _placer(self) -> Placer:
        return Placer(self._healer, identity=self._identity, home=self._home)

    @property
    def _concluder(self) -> AttemptFinisher:
        return AttemptFinisher(self.job, self.fleet, self._writer, self._healer, self.store)

    def observer(self) -> AttemptObserver | None:
        """Observes the open attempt without taking the run; None when there is none."""
        history = self.refresh()
        placement = placement_of(history)
        if placement is None or history.open_attempt is None or history.ended is not None:
            return None
        return AttemptObserver(self._make_fleet(history.epoch), placement)

    def newest_observer(self) -> AttemptObserver | None:
        """Observes what the agents still know, also of an attempt that has ended; None: no agents.

        The history is as it was last read.
        """
        placement = placement_of(self.history)
        if placement is None or self.history.ended is not None:
            return None
        return AttemptObserver(self._make_fleet(self.history.epoch), placement)

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
        """The verdict of an attempt that ended the run, when its end is not on record yet."""
        view = self.refresh().unclosed_attempt
        if view is None or view.ended is None:
            return None
        ended = view.ended
        return AttemptResult(EndKind(ended.outcome), *view.key, ended.to_step, notes=ended.notes)

    def place(self, *, stop_wanted: Callable[[], bool] = lambda: False) -> Placement:
        """The placement of the next attempt: the living one, or a new one.

        Raises:
            EngineError: no placement is possible, and the ladder stops the run.
        """
        return self._placer.place(stop_wanted=self._or_cancelled(stop_wanted))

    def _or_cancelled(self, stop_wanted: Callable[[], bool]) -> Callable[[], bool]:
        """Whether a stop is wanted by the caller, or requested in the run's store."""
        looked_s, is_cancelled = float("-inf"), False

        def is_wanted() -> bool:
            nonlocal looked_s, is_cancelled
            if not is_cancelled and time.monotonic() - looked_s > CANCEL_POLL_S:
                looked_s = time.monotonic()
                with suppress(StorageError):  # looked for again soon
                    is_cancelled = is_cancel_wanted(self.store, self.job.run_id)
            return is_cancelled or stop_wanted()

        return is_wanted

    def wants_checks(self, placement: Placement) -> bool:
        """Whether a placement is checked: nothing has been started on it yet."""
        return self.job.preflight.nodes and not self.refresh().attempts_in(placement.number)

    def check(self, placement: Placement) -> CheckVerdict:
        """Check the nodes before a first step.

        Nodes that fail are refused: place() again finds others.

        Raises:
            EngineError: before the first attempt, something is wrong that no node is to blame for.
        """
        return self._placer.check(placement)

    def attempt(
        self,
        placement: Placement,
        *,
        data_manifest_key: str | None,
        stop_wanted: Callable[[], bool],
        on_progress: Callable[[Progress], None],
    ) -> AttemptResult:
        """Start the next attempt, or adopt the living one, and watch it to its end."""
        start_compiler()  # or the recovery from the first fault would wait for it
        stop_wanted = self._or_cancelled(stop_wanted)
        view = self.refresh().open_attempt
        if view is None:
            view = self._writer.begin_attempt(placement.number)
        gang = StallCheck(self.job, view.started.at_s)
        health = AttemptHealth(self.job.watch, gang.hang_of)
        health.adopt(view)
        periodic = PeriodicRestart(self.job.restart.every_s, view.started.at_s)

        spares = self._warm_spares = self._warm_spares or WarmSpares(
            self.job,
            self.fleet,
            self._placer,
            history=lambda: self.history,
            clock=time.monotonic,
        )

        def seen(progress: Progress) -> None:
            periodic.look(progress.checkpoints, now_s=time.time())
            spares.look(trains=progress.trains)
            on_progress(progress)

        replacer = NodeReplacer(
            self._decider,
            self._placer,
            view,
            lambda: self._order(view, placement, data_manifest_key),
            lambda: health.slow_node(self.history),
        )

        def held_up_by(agents: Statuses) -> HeldUpBy | None:
            slow = health.saved_slow_node(view, self.history)
            return gang.look(agents) or (None if replacer.leaves(slow) else slow)

        watch = self._watch(
            started_s=view.started.at_s,
            stop_wanted=stop_wanted,
            moving=replacer.look,
            restart_wanted=lambda: periodic.is_due,
            on_progress=lambda progress: self._on_progress(view, health, progress, seen),
            held_up_by=held_up_by,
        )
        if not self._already_started(view):
            # First: a process of an earlier attempt that lives on can commit nothing from here on.
            self._writer.fence(placement, view.key)
            try:
                self.fleet.start(self._order(view, placement, data_manifest_key, self._saved()))
            except (EngineError, AgentUnreachable) as error:
                return self._concluder.conclude(
                    view, watch.wind_up(refusal=str(error)), stop_wanted
                )
        return self._concluder.conclude(view, watch.run(), stop_wanted)

    def _watch(
        self,
        *,
        started_s: float,
        stop_wanted: Callable[[], bool],
        on_progress: Callable[[Progress], None],
        restart_wanted: Callable[[], bool] = lambda: False,
        held_up_by: Callable[[Statuses], HeldUpBy | None] = lambda _statuses: None,
        moving: Callable[[Snapshot, Progress], frozenset[str]] = lambda _look, _seen: frozenset(),
    ) -> AttemptWatch:
        job = self.job
        return AttemptWatch(
            self.fleet,
            grace=Grace(
                request_s=job.engine.grace_s,
                failover_s=job.restart.failover_grace_s,
                hang_limit_s=job.watch.command_quiet_s,
            ),
            started_s=started_s,
            start_timeout_s=job.restart.start_timeout_s,
            stop_wanted=stop_wanted,
            on_progress=on_progress,
            restart_wanted=restart_wanted,
            held_up_by=held_up_by,
            moving=moving,
            command_ends=CommandExitCheck(job.target_step) if job.worker.is_command else None,
        )

    def end(self, outcome: str, message: str) -> None:
        """Put the end of the run on record and take its containers down.

        Raises:
            RunConflict: another supervisor has taken the run; nothing was done.
            EngineError: the containers cannot be taken down; its text begins with `message`.
        """
        self.ledger.renew()  # fails where another has the run, before its containers are touched
        self._keep_fault()
        try:
            self._await_logs()
            self.fleet.cancel(self.job.engine.grace_s)
        except (EngineError, AgentUnreachable) as error:
            text = f"{message}; the containers cannot be taken down: {error}"
            raise EngineError(text) from error
        view = self.refresh().open_attempt
        if view is not None:
            self._writer.missed_checkpoints(view)
            self._writer.end_attempt(view, "stopped", to_step=self.checkpoints.latest())
        # Not before the processes are gone, or they would train on for a moment.
        clear_requests(self.checkpoints.store, self.job.run_id)
        # Last: a supervisor that dies above is followed by one that does all of it again.
        self.ledger.append(
            RunEnded,
            outcome=outcome,
            message=message,
            target_step=self.job.target_step,
            command=self.job.worker.command,
        )
        self.ledger.release()

    def _keep_fault(self) -> None:
        """Record the fault of an attempt that has failed already, and was not concluded yet."""
        view = self.refresh().open_attempt
        if view is None:
            return
        try:
            if not has_failure(self.fleet.poll()):
                return
            watch = self._watch(
                started_s=view.started.at_s,
                stop_wanted=lambda: True,
                on_progress=lambda _progress: None,
            )
            self._concluder.record_end(view, watch.wind_up())
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
        """The verdict where a stop was requested between two attempts: none is started."""
        view = self.history.attempts[-1]
        assert view.ended is not None  # noqa: S101 the caller saw it end
        return AttemptResult(EndKind.STOPPED, *view.key, view.ended.to_step)

    def _already_started(self, view: AttemptView) -> bool:
        """Whether every agent has begun this attempt: it is adopted, not started again."""
        if any(one.ended is None and one.began.moved for one in view.recoveries):
            return True  # a node that is new to it may not have begun yet
        agents = self.fleet.poll().agents.values()
        return bool(agents) and all(
            (status.placement, status.attempt) == view.key and status.state is not AgentState.IDLE
            for status in agents
        )

    def _saved(self) -> SavedCheckpoint | None:
        """What a command is started again from; never on its first start."""
        if len(self.history.attempts) < 2:
            return None
        variables, before = variables_of(self.job), self.history.attempts[-2]
        ask = NewestSave(self.job, self.fleet, self.store)
        saved = ask.newest(self.history, cwd=self._cwd, variables=variables)
        if saved is not None and saved.step > self.history.committed_step:
            self._writer.checkpoint(before, saved.step, saved)  # its node was lost before it told
        return saved

    def _order(
        self,
        view: AttemptView,
        placement: Placement,
        data_manifest_key: str | None,
        saved: SavedCheckpoint | None = None,
    ) -> StartOrder:
        job, resumed = self.job, resumption(self.job, saved)
        return StartOrder(
            placement=view.started.placement,
            attempt=view.started.attempt,
            num_nodes=len(placement.members),
            slots_per_node=job.engine.slots_per_node,
            hosts=(),  # this and the rendezvous are filled in by the fleet
            master_addr="",
            master_port=0,
            # None: a session, which the node agent forks.
            command=(*(job.worker.command or ()), *resumed.args),
            is_command=job.worker.is_command,
            is_launcher=job.worker.is_launcher,
            cwd=self._cwd,
            grace_s=job.engine.grace_s,
            failover_grace_s=job.restart.failover_grace_s,
            log_path=job.log_path,
            variables={**variables_of(job), **dict(resumed.variables)},
            job=self._job_of_workers().model_dump_json(),
            data_manifest_key=data_manifest_key,
            past=tuple(recoveries_of(job, self.history)[-MAX_PAST:]),
            rejoin_s=REJOIN_S if replaces_nodes(job, self.fleet) else 0.0,
            secrets=dict(self._secrets()),
            resume_step=saved.step if saved is not None else None,
            resume_attempt=saved.saved_in if saved is not None else None,
            created_s=self.history.created_s,
        )

    def _job_of_workers(self) -> Job:
        """The job with the failure rate that this run has shown."""
        job = self.job
        if job.checkpoint.mtbf_s is None:
            return job
        measured = {"mtbf_s": self.history.mtbf_s(job.checkpoint.mtbf_s)}
        return job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update=measured)})

    def _on_progress(
        self,
        view: AttemptView,
        health: AttemptHealth,
        progress: Progress,
        then: Callable[[Progress], None],
    ) -> None:
        # A supervisor that adopts an attempt reads its log from the beginning.
        recorded = self._writer.progress(view, progress)
        alerts = health.look(progress, view, self.history)
        if any(isinstance(one, AlertRaised) and one.point is AlertKind.HANG for one in alerts):
            self._report_hang(view, progress)
        progress.events = [*recorded, *self._writer.record_events(view, alerts)]
        then(progress)

    def _report_hang(self, view: AttemptView, progress: Progress) -> None:
        """Save the stacks of a hang that ends nothing; when it is over they are gone."""
        statuses = progress.snapshot.agents.values()
        stacks, ranks = self.fleet.stacks(), tuple(progress_of(statuses))
        try:
            _log.info(save_hang_report(self.store, self.job.run_id, view.key, stacks, ranks))
        except StorageError as error:
            _log.warning("the stacks of the ranks in the hang could not be saved: %s", error)


def _folder_of_workers(job: Job, caller: Path) -> str:
    """Where workers start: elsewhere than on this machine, "." is what their image says."""
    if not job.engine.on_this_machine:
        return job.worker.cwd or "."
    return str((Path(job.worker.cwd) if job.worker.cwd else caller).resolve())
