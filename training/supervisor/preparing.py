"""The preparation of data by a command of the job, on the nodes of a placement.

A node that stays silent is none of its business: the attempt meets the same node, and the ladder
answers. Times are seconds.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perdure.storage.errors import StorageError
from perdure.storage.objects import ObjectStore
from perdure.training.config.job import Job
from perdure.training.config.preparation import PrepareSpec
from perdure.training.diagnosis.classify import diagnose
from perdure.training.diagnosis.evidence import Evidence, WorkerEnd
from perdure.training.engines.base import Placement
from perdure.training.engines.fleet import Fleet
from perdure.training.environment import variables_of
from perdure.training.errors import AgentUnreachable, EngineError, PerdureError, StopRequested
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.rungs import LADDER, Rung
from perdure.training.wire.preparation import PrepareOrder, PrepareReply

POLL_S = 0.2
SILENT_S = 30.0  # a command runs for hours, and one lost reply is not its end
CALLS_PER_EPOCH = 1_000_000  # a later supervisor prepares again; no number comes twice
_calls = itertools.count(1)


class PreparationError(PerdureError):
    """The command that prepares data has failed on a node.

    Attributes:
        fault: as the diagnosis has it.
    """

    def __init__(self, fault: Fault) -> None:
        super().__init__(f"prepare on {fault.node}: {fault.fault_class}: {fault.evidence}")
        self.fault = fault

    @property
    def may_pass(self) -> bool:
        """Whether another try can help: not what the user must put right."""
        return not self.fault.user_fault and LADDER[self.fault.fault_class] != (Rung.STOP,)


@dataclass(frozen=True, slots=True)
class Preparer:
    """Has data prepared on the nodes of one placement.

    Attributes:
        epoch: the supervisor's.
        is_cancelled: whether the run's store has a request to cancel it.
        cwd: folder of the workers.
    """

    job: Job
    fleet: Fleet
    store: ObjectStore
    placement: Placement
    epoch: int
    cwd: str
    is_cancelled: Callable[[], bool]

    @property
    def nodes(self) -> Sequence[str]:
        """The nodes that prepare."""
        return self.placement.nodes if self._spec.per == "node" else self.placement.nodes[:1]

    def is_prepared(self) -> bool:
        """Whether the outputs are there and whole on every node, asked in milliseconds."""
        try:
            replies = [self._ask(node, number=0, starts=False) for node in self.nodes]
        except (AgentUnreachable, EngineError):
            return False
        return all(reply.is_prepared for reply in replies)

    def prepare(
        self, *, stop_wanted: Callable[[], bool], on_progress: Callable[[str], None]
    ) -> float:
        """Prepare on every node that needs it, on all at once. Returns the time that it took.

        Args:
            stop_wanted: polled meanwhile; the commands end with their containers.
            on_progress: called with the newest line of a command's output.

        Raises:
            PreparationError: on one of them.
            StopRequested: meanwhile.
        """
        number, began_s = self.epoch * CALLS_PER_EPOCH + next(_calls), time.monotonic()
        waiting, shown = list(self.nodes), ""
        answered_s = dict.fromkeys(waiting, began_s)
        while waiting:
            if stop_wanted() or self.is_cancelled():
                raise StopRequested
            for node in list(waiting):
                try:
                    reply = self._ask(node, number=number, starts=True)
                except (AgentUnreachable, EngineError):
                    if time.monotonic() - answered_s[node] > SILENT_S:
                        waiting.remove(node)
                    continue
                answered_s[node] = time.monotonic()
                if reply.is_running:
                    text = f"preparing data on {node}: {reply.last_line}".rstrip(": ")
                    if text != shown:
                        shown = text
                        on_progress(text)
                    continue
                self._keep_log(node, reply)
                if not reply.is_prepared:
                    raise PreparationError(fault_of(node, reply))
                waiting.remove(node)
            time.sleep(POLL_S if waiting else 0.0)
        return time.monotonic() - began_s

    @property
    def _spec(self) -> PrepareSpec:
        assert self.job.prepare is not None  # noqa: S101 the runbook asks for such jobs alone
        return self.job.prepare

    def _ask(self, node: str, *, number: int, starts: bool) -> PrepareReply:
        order = PrepareOrder(
            number=number,
            starts=starts,
            command=self._spec.command,
            inputs=self._spec.inputs,
            outputs=self._spec.outputs,
            variables=variables_of(self.job),
            cwd=self.cwd,
        )
        return self.fleet.order(node, order).preparation or PrepareReply()

    def _keep_log(self, node: str, reply: PrepareReply) -> None:
        """Keep the end of the output in the store, beside the logs of the attempts."""
        if reply.tail:
            try:
                key = f"runs/{self.job.run_id}/logs/prepare/{node}.log"
                self.store.put(key, reply.tail.encode())
            except StorageError:
                return  # the node has the whole of it


def fault_of(node: str, reply: PrepareReply) -> Fault:
    """Diagnose a command that has failed."""
    now_s = time.time()
    if reply.why:  # nothing is to be read out of its output
        return Fault(FaultClass.LAUNCH_MISCONFIGURED, now_s, reply.why, node=node)
    end = WorkerEnd(
        rank=None,
        node=node,
        device=None,
        exit_code=reply.exit_code or 1,
        ended_s=now_s,
        log=reply.tail,
        log_path=reply.log_path,
        is_command=True,
    )
    return diagnose(Evidence(at_s=now_s, step=None, workers=(end,))).fault
