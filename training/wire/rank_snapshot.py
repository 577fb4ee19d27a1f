"""A rank of any node at one moment, for alerts, stalls and evidence; not a wire format itself.

Times are seconds, steps completed optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from perdure.training.wire.agent_status import AgentStatus

STARTING = "start"


@dataclass(frozen=True, slots=True)
class RankSnapshot:
    """A rank whose process lives, from the status of its node.

    Attributes:
        device: local index; None where a command's launcher does not name it.
        step: -1 before its state was restored.
        phase: phase of its heartbeat; empty for a command that writes none.
        entered: collectives of the step that it has entered; all ranks go through the same.
        left: those of them that have come to their end.
        operation: newest collective or transfer.
        silent_s: time since its heartbeat was last written.
        has_stepped: whether its process has completed a step.
        waited_s: time in collectives, in its whole life.
        data_s: time that it waited for data, in its whole life.
        latency_s: duration of its newest vote.
        cpu_s: processor time of its session.
        io_bytes: bytes that its session has read and written.
        process_state: the kernel's letter.
        has_heartbeat: whether it has written one.
        counts_collectives: whether its program records them; a command's need not.
        is_recovering: whether its process has ended and may be replaced.
    """

    rank: int
    node: str
    device: int | None
    pid: int
    step: int = -1
    phase: str = STARTING
    generation: int = 0
    entered: int = 0
    left: int = 0
    operation: str = ""
    silent_s: float = 0.0
    has_stepped: bool = False
    waited_s: float = 0.0
    data_s: float = 0.0
    latency_s: float = 0.0
    cpu_s: float = 0.0
    io_bytes: int = 0
    process_state: str = ""
    has_heartbeat: bool = True
    counts_collectives: bool = True
    is_recovering: bool = False

    @property
    def is_waiting(self) -> bool:
        """Whether it is in a collective."""
        return self.left < self.entered

    @classmethod
    def all_of(cls, status: AgentStatus) -> Iterator[Self]:
        """Describe the ranks of a node that have not ended, as far as they are known."""
        for worker in status.known_ranks:
            pulse = worker.pulse
            if worker.rank is None or pulse is None or worker.exit_code is not None:
                continue
            yield cls(
                rank=worker.rank,
                node=status.node,
                device=worker.local_rank,
                pid=worker.pid,
                step=worker.step if worker.step is not None else -1,
                phase=worker.phase or ("" if status.is_command else STARTING),
                generation=worker.generation or 0,
                entered=pulse.entered,
                left=pulse.left,
                operation=pulse.operation,
                silent_s=pulse.beat_s,
                has_stepped=pulse.step_age_s is not None,
                waited_s=pulse.waited_s,
                data_s=pulse.data_s,
                latency_s=pulse.latency_s,
                cpu_s=pulse.cpu_s,
                io_bytes=pulse.io_bytes,
                process_state=pulse.process_state,
                has_heartbeat=worker.phase is not None,
                counts_collectives=not status.is_command,
                is_recovering=worker.is_recovering,
            )
