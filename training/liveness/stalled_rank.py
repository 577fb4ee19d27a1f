"""Which rank is left behind on the way to a first step, or into a recovery: by its peers.

A step has a limit that is learned from steps. The way there has none that holds for four ranks and
for thousands, whose connections take minutes: the measure is what the other ranks have done
meanwhile. Pure. Times are seconds since the epoch, or of processors where a name says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from perdure.training.liveness.heartbeat import Phase

FACTOR = 3.0
IDLE_CORES = 0.01

_ON_THE_WAY = frozenset({Phase.START, Phase.RESTORE, Phase.RECOVER})
_STAGES = {Phase.START: 0, Phase.RESTORE: 1, Phase.RECOVER: 1}
_IN_A_STEP = 2

_Position = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class StartingRank:
    """One look at one rank.

    Attributes:
        pid: of its process.
        step: completed steps, -1 before its state was restored.
        entered: collectives entered since then; every rank goes through the same ones.
        waits: whether it is in a collective.
        has_stepped: whether its process has completed a step.
        silent_s: since its heartbeat was last written.
        cpu_s: processor time of its processes so far.
        io_bytes: read and written by them so far.
    """

    rank: int
    pid: int
    phase: Phase
    generation: int
    step: int
    entered: int
    waits: bool
    has_stepped: bool
    silent_s: float
    cpu_s: float
    io_bytes: int

    @property
    def is_under_way(self) -> bool:
        """Whether it has no step yet that a limit could be learned from."""
        is_first = self.phase in (Phase.DATA, Phase.STEP) and not self.has_stepped
        return self.phase in _ON_THE_WAY or is_first

    @property
    def position(self) -> _Position:
        """How far it is: positions of ranks compare."""
        stage = _STAGES.get(self.phase, _IN_A_STEP)
        return self.generation, stage, self.step if stage == _IN_A_STEP else -1, self.entered


@dataclass(frozen=True, slots=True)
class StalledRank:
    """A verdict: the others went on without the rank, and it has done nothing for the limit.

    Attributes:
        late_s: since most of them had.
        limit_s: how late it might have been.
        others_s: how long they took to get there.
    """

    rank: int
    phase: Phase
    late_s: float
    limit_s: float
    others_s: float


@dataclass(slots=True)
class _Overtaken:
    """A rank that most others have passed where it stands.

    Attributes:
        at_s: when they had.
        idle_since_s: from when on it may have done nothing; what it had used up by then follows.
    """

    position: _Position
    pid: int
    at_s: float
    idle_since_s: float
    cpu_s: float
    io_bytes: int

    def note_activity(self, rank: StartingRank, *, now_s: float) -> None:
        """Count from now on: it has done something."""
        self.idle_since_s, self.cpu_s, self.io_bytes = now_s, rank.cpu_s, rank.io_bytes


@dataclass(slots=True)
class StalledRankDetector:
    """Compares the ranks of one attempt, look by look.

    Attributes:
        least_s: how late a rank may always be.
        phases_s: the same by phase, where somebody has set it.
        began_s: when the processes of the attempt were started.
    """

    least_s: float
    began_s: float
    phases_s: Mapping[Phase, float] = field(default_factory=dict)
    _way_began_s: float | None = None  # of the way that some rank is on; None: all train
    _start_s: float | None = None  # how long most ranks took from their start to a first step
    _first_pids: dict[int, int] = field(default_factory=dict)
    _overtaken: dict[int, _Overtaken] = field(default_factory=dict)

    def judge(self, ranks: Sequence[StartingRank], *, now_s: float) -> StalledRank | None:
        """Take in a look at all ranks that live; the one that is latest beyond its limit."""
        for rank in ranks:
            self._first_pids.setdefault(rank.rank, rank.pid)
        under_way = [rank for rank in ranks if rank.is_under_way]
        if not under_way:
            self._way_began_s = None
            self._overtaken.clear()
            return None
        if self._way_began_s is None:
            is_first = self._start_s is None and not any(rank.has_stepped for rank in ranks)
            self._way_began_s = self.began_s if is_first else now_s
        if self._start_s is None and 2 * len(under_way) < len(ranks):
            self._start_s = now_s - self.began_s
        self._note_overtaken(ranks, under_way, now_s=now_s)
        verdicts = [
            late for rank in under_way if (late := self._late(rank, now_s=now_s)) is not None
        ]
        return max(verdicts, key=lambda late: late.late_s - late.limit_s, default=None)

    def _note_overtaken(
        self,
        ranks: Sequence[StartingRank],
        under_way: Sequence[StartingRank],
        *,
        now_s: float,
    ) -> None:
        positions = sorted(rank.position for rank in ranks)
        middle = positions[len(positions) // 2]
        previous, self._overtaken = self._overtaken, {}
        for rank in under_way:
            if rank.position >= middle or rank.waits:
                continue  # at least half of all are no further
            overtaken = previous.get(rank.rank)
            if overtaken is None or (overtaken.position, overtaken.pid) != (
                rank.position,
                rank.pid,
            ):
                overtaken = _Overtaken(
                    rank.position, rank.pid, now_s, now_s, rank.cpu_s, rank.io_bytes
                )
            elif rank.io_bytes != overtaken.io_bytes:
                overtaken.note_activity(rank, now_s=now_s)
            self._overtaken[rank.rank] = overtaken

    def _late(self, rank: StartingRank, *, now_s: float) -> StalledRank | None:
        overtaken = self._overtaken.get(rank.rank)
        if overtaken is None:
            return None
        assert self._way_began_s is not None  # noqa: S101 some rank is on its way
        idle_s, others_s = now_s - overtaken.idle_since_s, overtaken.at_s - self._way_began_s
        if rank.pid != self._first_pids[rank.rank]:
            # The others were there already: a new process takes what theirs took to start.
            others_s = max(others_s, self._start_s or 0.0)
        limit_s = max(self.phases_s.get(rank.phase, self.least_s), FACTOR * others_s)
        if min(idle_s, rank.silent_s) <= limit_s:
            return None
        if rank.cpu_s - overtaken.cpu_s > IDLE_CORES * idle_s:
            overtaken.note_activity(rank, now_s=now_s)
            return None
        return StalledRank(rank.rank, rank.phase, now_s - overtaken.at_s, limit_s, others_s)
