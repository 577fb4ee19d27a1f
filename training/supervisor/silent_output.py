"""Whether a command has printed nothing on any node for too long. Times are seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from perdure.training.diagnosis.evidence import SilentRank
from perdure.training.health.silent_output import SilentOutputDetector
from perdure.training.job import Job
from perdure.training.wire.agent import AgentState, AgentStatus


@dataclass(slots=True)
class SilentOutputCheck:
    """Looks at the output of one attempt, if its job asks for that.

    Attributes:
        job: of the run.
    """

    job: Job
    _detector: SilentOutputDetector | None = field(init=False)

    def __post_init__(self) -> None:
        """Have a detector with the limit of the job."""
        limit_s = self.job.watch.output_quiet_s
        self._detector = SilentOutputDetector(limit_s) if limit_s is not None else None

    def look(self, statuses: Iterable[AgentStatus]) -> SilentRank | None:
        """The command, once it has been silent for too long."""
        running = [one for one in statuses if one.state is AgentState.RUNNING]
        if self._detector is None or not running:
            return None
        by_node = {one.node: one.output_bytes for one in running}
        silent_s = self._detector.judge(by_node, now_s=time.monotonic())
        if silent_s is None:
            return None
        why = f"no output on any of {len(running)} nodes"
        return SilentRank(None, None, silent_s, self._detector.limit_s, "command", why)
