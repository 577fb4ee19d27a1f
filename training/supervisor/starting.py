"""The start of an attempt's processes, and the checkpoint that a command goes on from.

That checkpoint is chosen here once for all nodes, so that no node begins anew beside others that
resume. The remains of saves that were cut short, and checkpoints that could not be loaded, are set
aside before the start. Times are seconds, steps completed optimizer steps.
"""

from __future__ import annotations

import logging
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import SecretStr

from perdure.storage.errors import StorageError
from perdure.storage.file_sets import read_set
from perdure.storage.objects import ObjectStore
from perdure.storage.partner_copies import gives_all_partners
from perdure.training.commands.checkpoint_store import (
    Save,
    Stored,
    list_stored_saves,
    needs_other_parts,
    save_prefix,
)
from perdure.training.config.job import Job
from perdure.training.diagnosis.obstacles import find_files
from perdure.training.engines.base import Placement
from perdure.training.engines.fleet import Fleet
from perdure.training.environment import variables_of
from perdure.training.errors import EngineError
from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.history import RunHistory
from perdure.training.journal.records import ResumeChosen, SetAsideCheckpoint
from perdure.training.liveness.start_patience import StartPatience, patience_of
from perdure.training.recovery.faults import FaultClass
from perdure.training.recovery.rungs import Rung
from perdure.training.supervisor.finishing import recoveries_of
from perdure.training.supervisor.ledger_writer import LedgerWriter
from perdure.training.wire.agent import SavedQuery, StartOrder
from perdure.training.wire.agent_status import AgentState, SavedCheckpoint

PATH_ENV = "PERDURE_CHECKPOINT"
STEP_ENV = "PERDURE_CHECKPOINT_STEP"

REJOIN_S = 120.0  # of ranks without a coordinator: until its node is seen to be lost, and after
# Recoveries in a start order. Recoveries without progress are few in a row, and no more with the
# same code matter within a day.
MAX_PAST = 50
_CUT_SHORT = "its save was cut short"
_UNREADABLE = "attempt {} could not load it"
_log = logging.getLogger("perdure.supervisor")


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

    @property
    def patience(self) -> StartPatience:
        """Limits of this start, by the starts before it."""
        return patience_of(recoveries_of(self.job, self.writer.history))

    @property
    def replaces_nodes(self) -> bool:
        """Whether a node can be replaced while the processes of the others live on."""
        is_on = self.job.restart.node_replace and not self.job.worker.is_command
        return is_on and Rung.NODE_REPLACE in self.fleet.capabilities

    def has_started(self) -> bool:
        """Whether every agent has begun the attempt: it is adopted, not started again."""
        if any(span.ended is None and span.began.moved for span in self.view.recoveries):
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
        self.fleet.start(self.order(self._choose_save()))

    def _choose_save(self) -> SavedCheckpoint | None:
        """Choose the checkpoint that a command is started again from; never on its first start."""
        history = self.writer.history
        if len(history.attempts) < 2 or self.job.worker.checkpoints is None:
            return None
        variables = variables_of(self.job)
        finder = CheckpointFinder(self.job, self.fleet, self.store, history, self.cwd, variables)
        choice = finder.choose()
        saved = choice.saved
        if saved is not None and saved.step > history.committed_step:
            # Its node was lost before it could report the checkpoint.
            self.writer.checkpoint(history.attempts[-2], saved.step, saved)
        if saved is not None or choice.set_aside:
            columns = {"step": saved.step, "path": saved.path} if saved is not None else {}
            self.writer.append(self.view, ResumeChosen, **columns, set_aside=choice.set_aside)
            self.writer.refresh()
        for checkpoint in choice.set_aside:
            _log.warning(f"{checkpoint.path} is set aside and kept: {checkpoint.why}")
        if choice.set_aside:
            finder.rename(choice.set_aside)
        return saved

    def order(self, saved: SavedCheckpoint | None = None) -> StartOrder:
        """Build the order to start, also for a member that joins later.

        Args:
            saved: the checkpoint that a command goes on from.
        """
        job, history, patience = self.job, self.writer.history, self.patience
        resumed = Resumption.of(job, saved)
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
            job=self._job_of_workers(),
            data_manifest_key=self.data_manifest_key,
            past=tuple(recoveries_of(job, history)[-MAX_PAST:]),
            rejoin_s=REJOIN_S if self.replaces_nodes else 0.0,
            secrets=dict(self.secrets()),
            resume_step=saved.step if saved is not None else None,
            resume_attempt=saved.saved_in if saved is not None else None,
            created_s=history.created_s,
            leftovers=tuple(dict.fromkeys(_leftovers_of(history))),
            start_factor=patience.factor,
            ends_slow_start=patience.ends_slow_start,
        )

    def _job_of_workers(self) -> Job:
        """Return the job with what is known of its nodes: failure rate and failure domains."""
        job, checkpoint = self.job, self.job.checkpoint
        facts: dict[str, object] = {}
        if checkpoint.mtbf_s is not None:
            facts["mtbf_s"] = self.writer.history.mtbf_s(checkpoint.mtbf_s)
        if checkpoint.partner_copies and not checkpoint.failure_domains:
            domains = self.fleet.failure_domains()
            # Otherwise the super pods are the domains, or a partner in the same rack is accepted.
            if gives_all_partners(domains, self.placement.nodes):
                facts["failure_domains"] = dict(domains)
        if not facts:
            return job
        return job.model_copy(update={"checkpoint": checkpoint.model_copy(update=facts)})


@dataclass(frozen=True, slots=True)
class Resumption:
    """The additions to a command that goes on from a checkpoint.

    Attributes:
        args: behind its own.
        variables: beside its own.
    """

    args: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, job: Job, saved: SavedCheckpoint | None) -> Self:
        """Fill the checkpoint into the job's section `resume`; None: the command starts anew."""
        if saved is None:
            return cls()
        variables = {PATH_ENV: saved.path, STEP_ENV: str(saved.step)}
        spec = job.worker.resume
        if spec is None:
            return cls(variables=tuple(variables.items()))
        added = {
            name: string.Template(text).safe_substitute(variables)
            for name, text in spec.env.items()
        }
        return cls(spec.args, tuple({**added, **variables}.items()))


@dataclass(frozen=True, slots=True)
class ResumeChoice:
    """The checkpoint that a command goes on from, and those that are set aside first.

    Attributes:
        saved: None: the command starts anew.
    """

    saved: SavedCheckpoint | None = None
    set_aside: tuple[SetAsideCheckpoint, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointFinder:
    """Finds the checkpoint that a command goes on from, on its nodes and in the run's store.

    Attributes:
        cwd: folder of the command.
        variables: of the command, for the path.
    """

    job: Job
    fleet: Fleet
    store: ObjectStore
    history: RunHistory
    cwd: str
    variables: dict[str, str]

    def choose(self) -> ResumeChoice:
        """Choose the newest complete checkpoint that every node can have and that can be loaded.

        A checkpoint that was written before the run was created is not the run's. Without uploads
        the nodes share their storage and all see the same. Each node must have, or get, its own
        part of a checkpoint in parts, and all parts must be of the same save.

        Raises:
            EngineError: nodes or store do not say what they have.
        """
        spec = self.job.worker.checkpoints
        if spec is None:
            return ResumeChoice()
        listed = self.fleet.list_saved(self._query())
        whole = {node: [save for save in saved if save.is_whole] for node, saved in listed.items()}
        # On storage that all share, a node may not see yet that a save is whole.
        shown = set() if spec.upload else {save.path for save in _all_of(whole)}
        torn = [c for c in _all_of(listed) if not c.is_whole and c.path not in shown]
        try:
            stored = [] if self.job.saves_in_parts or not spec.upload else self._stored()
            newest = self._newest(whole, stored)
        except StorageError as error:
            raise EngineError(f"the checkpoints of the command in the store: {error}") from error
        set_aside = {save.path: _to_set_aside(save, _CUT_SHORT) for save in torn}
        unreadable = self._unreadable(whole)
        if newest is None and unreadable and self.history.saved_steps:
            # The one before is gone: a program that has trained for long does not start anew.
            newest = max((s for s in _all_of(whole) if s.path in unreadable), key=_age)
        else:
            set_aside |= unreadable
        return ResumeChoice(newest, tuple(set_aside.values()))

    def rename(self, checkpoints: Sequence[SetAsideCheckpoint]) -> None:
        """Have the nodes rename checkpoints, so that no program finds them.

        Raises:
            EngineError: a node cannot do it.
        """
        torn = tuple(c.path for c in checkpoints if c.why == _CUT_SHORT)
        unreadable = tuple(c.path for c in checkpoints if c.why != _CUT_SHORT)
        update = {"torn": torn, "unreadable": unreadable}
        self.fleet.list_saved(self._query().model_copy(update=update))

    def _query(self) -> SavedQuery:
        history, spec = self.history, self.job.program_checkpoints
        assert spec is not None  # noqa: S101 the callers have checked
        is_over = self.job.engine.on_this_machine or not _may_write_on(history)
        return SavedQuery(
            spec=spec,
            cwd=self.cwd,
            variables=self.variables,
            run_id=self.job.run_id,
            since_s=history.created_s,
            until_s=_ended_s(history, is_over=is_over),
            is_over=is_over,
            is_in_parts=self.job.saves_in_parts,
        )

    def _newest(
        self, by_node: Mapping[str, Sequence[SavedCheckpoint]], stored: Sequence[SavedCheckpoint]
    ) -> SavedCheckpoint | None:
        spec = self.job.worker.checkpoints
        candidates = [save for save in _all_of(by_node) if not self._is_unreadable(save)]
        if self.job.saves_in_parts:
            return self._newest_in_parts(candidates)
        if spec is not None and spec.upload:
            readable = [save for save in stored if not self._is_unreadable(save)]
            steps = {save.step for save in readable}
            on_all = [c for c in candidates if c.step in steps or _is_on_all(by_node, c.step)]
            candidates = [*on_all, *readable]
        return max(candidates, key=_age, default=None)

    def _is_unreadable(self, saved: SavedCheckpoint) -> bool:
        return any(_is_same(view, saved) for view in self.history.attempts)

    def _unreadable(
        self, by_node: Mapping[str, Sequence[SavedCheckpoint]]
    ) -> dict[str, SetAsideCheckpoint]:
        """List by path the checkpoints on the nodes that could not be loaded.

        Parts stay where they are: the record beside them says which save they are of.
        """
        views = [] if self.job.saves_in_parts else self.history.attempts
        return {
            save.path: _to_set_aside(save, _UNREADABLE.format(f"{view.key[0]}.{view.key[1]}"))
            for view in views
            for save in _all_of(by_node)
            if _is_same(view, save)
        }

    def _stored(self) -> list[SavedCheckpoint]:
        """List the checkpoints of the store; the path is that on the node that uploaded it."""
        saves = list_stored_saves(self.store, self.job.run_id)
        checkpoints = (self._read_stored(save, members[0]) for save, members in saves.items())
        return [checkpoint for checkpoint in checkpoints if checkpoint is not None]

    def _read_stored(self, save: Save, member: int) -> SavedCheckpoint | None:
        file_set = read_set(self.store, save_prefix(self.job.run_id, save, member))
        if file_set is None:
            return None
        return SavedCheckpoint(
            step=save.step,
            path=file_set.path,
            size_bytes=file_set.size_bytes,
            written_s=file_set.written_s,
            saved_in=save.attempt,
        )

    def _newest_in_parts(self, on_nodes: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
        """Find the newest save whose parts all nodes have or can get; return member 0's part."""
        num_members, run_id = self.job.engine.nodes, self.job.run_id
        unreadable = [view for view in self.history.attempts if view.unreadable_step is not None]
        stored = {
            save: by
            for save, by in list_stored_saves(self.store, run_id).items()
            if not any(_is_before(view, save) for view in unreadable)
        }
        for save in reversed(_within_reach(on_nodes, stored, num_members)):
            by = stored.get(save, [])
            parts = (read_set(self.store, save_prefix(run_id, save, member)) for member in by)
            lacks = set(range(num_members)) - set(by)
            # Where members read the parts of others, too, a part on its node alone is no use.
            if lacks and any(part is None or needs_other_parts(part) for part in parts):
                continue
            first_parts = (part for part in on_nodes if _save_of(part) == save and part.member == 0)
            first_part = next(first_parts, None) or self._read_stored(save, 0)
            if first_part is not None:
                return first_part
        return None


def _within_reach(
    on_nodes: Iterable[SavedCheckpoint], stored: Stored, num_members: int
) -> list[Save]:
    """List saves whose part every member has on its node or in the store; the oldest first."""
    members = {save: set(by) for save, by in stored.items()}
    for part in on_nodes:
        save = _save_of(part)
        if save is not None and part.member is not None:
            members.setdefault(save, set()).add(part.member)
    return sorted(save for save, by in members.items() if by >= set(range(num_members)))


def _save_of(part: SavedCheckpoint) -> Save | None:
    return Save(part.step, part.saved_in) if part.saved_in is not None else None


def _is_on_all(by_node: Mapping[str, Sequence[SavedCheckpoint]], step: int) -> bool:
    return all(any(checkpoint.step == step for checkpoint in saved) for saved in by_node.values())


def _leftovers_of(history: RunHistory) -> Iterator[str]:
    """List the files that were in the way of earlier attempts."""
    for view in history.attempts:
        if view.fault is not None and view.fault.fault_class is FaultClass.LEFTOVER:
            yield from find_files(view.fault.evidence)


def _all_of(by_node: Mapping[str, Sequence[SavedCheckpoint]]) -> list[SavedCheckpoint]:
    return [save for saved in by_node.values() for save in saved]


def _age(saved: SavedCheckpoint) -> tuple[int, float]:
    return saved.step, saved.written_s


def _to_set_aside(saved: SavedCheckpoint, why: str) -> SetAsideCheckpoint:
    return SetAsideCheckpoint(step=saved.step, path=saved.path, why=why)


def _is_same(view: AttemptView, saved: SavedCheckpoint) -> bool:
    """Whether it is the checkpoint that an attempt could not load, and not a later save."""
    if view.unreadable_step is None or view.ended is None:
        return False
    save = _save_of(saved)
    if save is not None:
        return _is_before(view, save)
    return saved.step == view.unreadable_step and saved.written_s <= view.ended.at_s


def _is_before(view: AttemptView, save: Save) -> bool:
    return save.step == view.unreadable_step and save.attempt < view.key


def _may_write_on(history: RunHistory) -> bool:
    """Whether processes of a node that is lost may still live, cut off from everybody."""
    ended = [view.ended for view in history.attempts if view.ended is not None]
    fault = ended[-1].fault if ended else None
    return fault is not None and fault.fault_class is FaultClass.NODE_LOST


def _ended_s(history: RunHistory, *, is_over: bool) -> float:
    """Return when the last attempt that is over ended; if in doubt, the earliest sign of it."""
    ended = [view.ended for view in history.attempts if view.ended is not None]
    if not ended:
        return history.created_s
    last = ended[-1]
    if is_over:
        return last.lived_s or last.at_s
    fault_s = last.fault.at_s if last.fault is not None else None
    signs = (last.at_s, last.noticed_s, last.lived_s, fault_s)
    return min(sign for sign in signs if sign is not None)
