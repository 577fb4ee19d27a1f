"""What goes into a decision beside the fault, and what comes out of it.

Frozen records that messages and the ledger embed as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from training.recovery.faults import Fault
from training.recovery.rungs import Rung


@dataclass(frozen=True, slots=True)
class Recovery:
    """One past recovery of the run; a start order carries it as it is.

    Attributes:
        fault: what it answered.
        rung: what was done.
        progressed: whether a new step was committed after it.
        failed: whether the rung itself could not be carried out (no spare, no container, no
            replica to repair from).
        cut_short: whether another fault came before the rung was carried out, and the processes
            ended over it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    fault: Fault
    rung: Rung
    progressed: bool
    failed: bool = False
    cut_short: bool = False


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many nodes there are for the job.

    Attributes:
        healthy: nodes that may take part, the one at fault counted.
        needed: nodes that the job runs on.
    """

    healthy: int
    needed: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do about a fault; records embed it as it is.

    Attributes:
        rung: the recovery action.
        isolate: node to keep out of further placements, None for no node.
        reason: stable text, shown in the UI and asserted in tests.
        skipped: rungs passed over, each with why.
        end_of_life_checkpoint: whether the survivors commit the last completed step before the
            rung starts (TTP), as far as they hold a complete set of replicas.
        accept_abnormal: the step that is abnormal again is taken as it is and recorded, instead
            of being executed once more; only with step_retry.
        sub_healthy: whether the job is marked sub-healthy once the rung has succeeded.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    rung: Rung
    isolate: str | None
    reason: str
    skipped: tuple[str, ...] = ()
    end_of_life_checkpoint: bool = False
    accept_abnormal: bool = False
    sub_healthy: bool = False
