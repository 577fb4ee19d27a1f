"""What an attempt remembers from one stimulus to the next: plain data, and questions to it.

An attempt is this, its settings and its decider; written down as they are (replay.py), they make
the same attempt again. Times are seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from perdure.training.recovery.actions import Outbox, Recoveries
from perdure.training.recovery.healing import HealPlan
from perdure.training.recovery.protocol import LastSaved, WorkerFault
from perdure.training.recovery.ranks import Pauses, Ranks
from perdure.training.recovery.repair import RankReport, RepairMode, RepairPlan
from perdure.training.recovery.stages import State
from perdure.training.recovery.stimuli import FaultReported


@dataclass(frozen=True, slots=True)
class AttemptSettings:
    """What stays as it is for the whole attempt.

    Attributes:
        repair_limit_s: for all ranks to report, and to carry a plan out.
        save_limit_s: for the end-of-life checkpoint.
        reconnect_limit_s: for new connections in the same generation.
        checks_chips: whether a chip that had a fault is checked before a process starts on it.
    """

    repair_limit_s: float
    save_limit_s: float
    reconnect_limit_s: float = 30.0
    checks_chips: bool = True


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A fault that the end of some process may explain yet.

    Attributes:
        settles_at_s: from when on no such end is waited for.
        rank: that reported it.
    """

    settles_at_s: float
    rank: int
    report: WorkerFault


@dataclass(slots=True)
class Round:
    """Everything that lasts one generation: the next one begins with a new round.

    Attributes:
        generation: its number.
        mode: what it is for, until all ranks train in it; from then on TRAIN.
        deadline_s: for what ranks are to do now, None while nothing is asked of them.
        reports: of the ranks' states, by rank.
        plan: that is carried out, None before there is one and once it is done.
        training: ranks that train in it.
        connection: how often connections were re-established in it.
        restored: ranks that have done so for the newest time.
        suspicion: a fault that may be explained yet.
        saved: what survivors report of their part in the end-of-life checkpoint, by rank.
        unsaved: savers that have not reported.
    """

    generation: int = 1
    mode: RepairMode = RepairMode.TRAIN
    deadline_s: float | None = None
    reports: dict[int, RankReport] = field(default_factory=dict)
    plan: RepairPlan | None = None
    training: set[int] = field(default_factory=set)
    connection: int = 0
    restored: set[int] = field(default_factory=set)
    suspicion: Suspicion | None = None
    saved: dict[int, LastSaved] = field(default_factory=dict)
    unsaved: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Memory:
    """Facts about an attempt.

    Attributes:
        world_size: number of ranks.
        groups: ranks that hold the same state.
        nodes: by rank, the node it runs on, as the agents report.
        absent: nodes whose agents were connected, and are no more.
        step: newest completed step that is known.
        early_faults: reported before all ranks trained.
        accepted: newest abnormal step that is taken as it is.
        norms: of abnormal steps, in the order in which they were reported.
        checks: of chips, before ranks start again on them.
        why: nothing inside the processes goes on; empty while it may.
    """

    world_size: int
    groups: tuple[tuple[int, ...], ...]
    nodes: dict[int, str] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    state: State = State.STARTING
    step: int = 0
    round: Round = field(default_factory=Round)
    ranks: Ranks = field(default_factory=Ranks)
    recoveries: Recoveries = field(default_factory=Recoveries)
    pauses: Pauses = field(default_factory=Pauses)
    outbox: Outbox = field(default_factory=Outbox)
    early_faults: list[FaultReported] = field(default_factory=list)
    accepted: int | None = None
    norms: dict[int, list[float]] = field(default_factory=dict)
    checks: dict[int, HealPlan] = field(default_factory=dict)
    why: str = ""

    def is_late(self, now_s: float) -> bool:
        """Whether ranks have had their time for what they are to do."""
        return self.round.deadline_s is not None and now_s > self.round.deadline_s

    def is_settled(self, now_s: float) -> bool:
        """Whether a fault that the end of a process might have explained is one by itself."""
        suspicion = self.round.suspicion
        is_old = suspicion is not None and now_s >= suspicion.settles_at_s
        return is_old and self.ranks.are_all_explained

    def unexplained(self, now_s: float) -> list[int]:
        """Ranks that are disconnected for so long that a report of their end is overdue."""
        if self.ranks.are_all_explained:
            return []
        without_agent = {rank for rank, node in self.nodes.items() if node in self.absent}
        return self.ranks.unexplained(now_s=now_s, without_agent=without_agent)
