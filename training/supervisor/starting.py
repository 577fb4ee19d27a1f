"""The start of an attempt's processes, and of those that join it later. Times are seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import SecretStr

from perdure.storage.objects import ObjectStore
from perdure.training.config.job import Job
from perdure.training.engines.base import Placement
from perdure.training.engines.fleet import Fleet
from perdure.training.environment import variables_of
from perdure.training.journal.attempt_view import AttemptView
from perdure.training.recovery.rungs import Rung
from perdure.training.supervisor.checkpoints import NewestSave, resumption
from perdure.training.supervisor.finishing import recoveries_of
from perdure.training.supervisor.ledger_writer import LedgerWriter
from perdure.training.wire.agent import AgentState, SavedCheckpoint, StartOrder

REJOIN_S = 120.0  # of ranks without a coordinator: until its node is seen to be lost, and after
# Recoveries in a start order. Those without progress are few in a row, and a window of a day
# holds no more of one code that matter.
MAX_PAST = 50


def replaces_nodes(job: Job, fleet: Fleet) -> bool:
    """Whether nodes can be replaced under a job while the processes of the others live on."""
    is_on = job.restart.node_replace and not job.worker.is_command
    return is_on and Rung.NODE_REPLACE in fleet.capabilities


@dataclass(frozen=True, slots=True)
class AttemptStarter:
    """Starts the processes of one attempt.

    Attributes:
        cwd: folder that they start in.
        secrets: reads values of the job's env_from; may raise EngineError.
        data_manifest_key: of the token shards; None: the job has no data.
    """

    job: Job
    fleet: Fleet
    writer: LedgerWriter
    store: ObjectStore
    view: AttemptView
    placement: Placement
    cwd: str
    secrets: Callable[[], Mapping[str, SecretStr]]
    data_manifest_key: str | None

    def has_started(self) -> bool:
        """Whether every agent has begun the attempt: it is adopted, not started again."""
        if any(recovery.ended is None and recovery.began.moved for recovery in self.view.recoveries):
            return True  # a node that is new to it may not have begun yet
        agents = self.fleet.poll().agents.values()
        return bool(agents) and all(
            (status.placement, status.attempt) == self.view.key
            and status.state is not AgentState.IDLE
            for status in agents
        )

    def start(self) -> None:
        """Start the attempt on every node.

        Raises:
            EngineError: a command's checkpoints or secrets cannot be read, or a node refuses.
            AgentUnreachable: a node does not answer.
        """
        self.fleet.start(self.order(self._newest_save()))

    def _newest_save(self) -> SavedCheckpoint | None:
        """Find the checkpoint that a command is started again from; never on its first start."""
        history = self.writer.history
        if len(history.attempts) < 2:
            return None
        newest = NewestSave(self.job, self.fleet, self.store)
        saved = newest.newest(history, cwd=self.cwd, variables=variables_of(self.job))
        if saved is not None and saved.step > history.committed_step:
            # Its node was lost before it could report the checkpoint.
            self.writer.checkpoint(history.attempts[-2], saved.step, saved)
        return saved

    def order(self, saved: SavedCheckpoint | None = None) -> StartOrder:
        """Build the order to start, also for a member that joins later.

        Args:
            saved: the checkpoint that a command goes on from.
        """
        job, resumed, history = self.job, resumption(self.job, saved), self.writer.history
        return StartOrder(
            placement=self.view.started.placement,
            attempt=self.view.started.attempt,
            num_nodes=len(self.placement.members),
            slots_per_node=job.engine.slots_per_node,
            hosts=(),  # this and the rendezvous are filled in by the fleet
            master_addr="",
            master_port=0,
            # None: a session, which the node agent forks.
            command=(*(job.worker.command or ()), *resumed.args),
            is_command=job.worker.is_command,
            is_launcher=job.worker.is_launcher,
            cwd=self.cwd,
            grace_s=job.engine.grace_s,
            failover_grace_s=job.restart.failover_grace_s,
            log_path=job.log_path,
            variables={**variables_of(job), **dict(resumed.variables)},
            job=self._job_of_workers().model_dump_json(),
            data_manifest_key=self.data_manifest_key,
            past=tuple(recoveries_of(job, history)[-MAX_PAST:]),
            rejoin_s=REJOIN_S if replaces_nodes(job, self.fleet) else 0.0,
            secrets=dict(self.secrets()),
            resume_step=saved.step if saved is not None else None,
            resume_attempt=saved.saved_in if saved is not None else None,
            created_s=history.created_s,
        )

    def _job_of_workers(self) -> Job:
        """Return the job with the failure rate that this run has shown."""
        job = self.job
        if job.checkpoint.mtbf_s is None:
            return job
        measured = {"mtbf_s": self.writer.history.mtbf_s(job.checkpoint.mtbf_s)}
        return job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update=measured)})
