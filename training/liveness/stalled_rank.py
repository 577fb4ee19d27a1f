"""The rank that stalls on the way to a first step or into a recovery, measured by its peers. Pure.

A step has a limit that is learned from steps. The start has no limit that holds for four ranks and
for thousands, whose connections take minutes: the measure is what the other ranks have done
meanwhile. Times are seconds since the epoch, or of processors where a name says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from perdure.training.liveness.heartbeat import Phase
from perdure.training.wire.rank_snapshot import RankSnapshot

FACTOR = 3.0
IDLE_CORES = 0.01

_ON_THE_WAY = frozenset({Phase.START, Phase.RESTORE, Phase.RECOVER})
_STAGES = {Phase.START: 0, Phase.RESTORE: 1, Phase.RECOVER: 1}
_IN_A_STEP = 2

_Position = tuple[int, int, int, int]


def _phase(rank: RankSnapshot) -> Phase:
    return Phase[rank.phase.upper()]


def _is_under_way(rank: RankSnapshot) -> bool:
    """Whether a rank has no step yet from which a limit could be learned."""
    phase = _phase(rank)
    is_first = phase in (Phase.DATA, Phase.STEP) and not rank.has_stepped
    return phase in _ON_THE_WAY or is_first


def _position(rank: RankSnapshot) -> _Position:
    """Return how far a rank is: positions of ranks compare."""
    stage = _STAGES.get(_phase(rank), _IN_A_STEP)
    return rank.generation, stage, rank.step if stage == _IN_A_STEP else -1, rank.entered


@dataclass(frozen=True, slots=True)
class StalledRank:
    """A rank that most others have passed, and that has done nothing since for the limit.

    Attributes:
        late_s: time since most others passed it.
        limit_s: how late it may be.
        peers_s: how long the others took to get there.
    """

    rank: int
    phase: Phase
    late_s: float
    limit_s: float
    peers_s: float


@dataclass(slots=True)
class _OvertakenRank:
    """A rank that most others have passed where it stands.

    Attributes:
        at_s: when most others had passed it.
        idle_since_s: start of the time in which it may have done nothing.
        cpu_s: processor time that it had used by then.
        io_bytes: bytes that it had read and written by then.
    """

    position: _Position
    pid: int
    at_s: float
    idle_since_s: float
    cpu_s: float
    io_bytes: int

    def note_activity(self, rank: RankSnapshot, *, now_s: float) -> None:
        """Count its idle time from now on: it has done something."""
        self.idle_since_s, self.cpu_s, self.io_bytes = now_s, rank.cpu_s, rank.io_bytes


@dataclass(slots=True)
class StalledRankDetector:
    """Detector of a stalled rank, which compares the ranks of one attempt at every poll.

    Attributes:
        least_s: how late a rank may always be.
        began_s: when the processes of the attempt were started.
        phases_s: how late a rank may be in a phase for which the job sets it.
    """

    least_s: float
    began_s: float
    phases_s: Mapping[Phase, float] = field(default_factory=dict)
    _way_began_s: float | None = None  # when some rank began to start or recover; None: all train
    _start_s: float | None = None  # how long most ranks took from their start to a first step
    _first_pids: dict[int, int] = field(default_factory=dict)
    _overtaken: dict[int, _OvertakenRank] = field(default_factory=dict)

    def judge(self, ranks: Sequence[RankSnapshot], *, now_s: float) -> StalledRank | None:
        """Take in all living ranks. Returns the rank that is latest beyond its limit."""
        for rank in ranks:
            self._first_pids.setdefault(rank.rank, rank.pid)
        under_way = [rank for rank in ranks if _is_under_way(rank)]
        if not under_way:
            self._way_began_s = None
            self._overtaken.clear()
            return None
        if self._way_began_s is None:
            is_first = self._start_s is None and not any(rank.has_stepped for rank in ranks)
            self._way_began_s = self.began_s if is_first else now_s
        if self._start_s is None and 2 * len(under_way) < len(ranks):
            self._start_s = now_s - self.began_s
        began_s = self._way_began_s
        self._note_overtaken(ranks, under_way, now_s=now_s)
        judged = (self._judge_rank(rank, began_s, now_s=now_s) for rank in under_way)
        stalled = [late for late in judged if late is not None]
        return max(stalled, key=lambda late: late.late_s - late.limit_s, default=None)

    def _note_overtaken(
        self,
        ranks: Sequence[RankSnapshot],
        under_way: Sequence[RankSnapshot],
        *,
        now_s: float,
    ) -> None:
        positions = sorted(_position(rank) for rank in ranks)
        middle = positions[len(positions) // 2]
        previous, self._overtaken = self._overtaken, {}
        for rank in under_way:
            position, pid = _position(rank), rank.pid
            if position >= middle or rank.is_waiting:
                continue  # at least half of all ranks are no further
            overtaken = previous.get(rank.rank)
            if overtaken is None or (overtaken.position, overtaken.pid) != (position, pid):
                overtaken = _OvertakenRank(position, pid, now_s, now_s, rank.cpu_s, rank.io_bytes)
            elif rank.io_bytes != overtaken.io_bytes:
                overtaken.note_activity(rank, now_s=now_s)
            self._overtaken[rank.rank] = overtaken

    def _judge_rank(
        self, rank: RankSnapshot, began_s: float, *, now_s: float
    ) -> StalledRank | None:
        overtaken = self._overtaken.get(rank.rank)
        if overtaken is None:
            return None
        idle_s, peers_s = now_s - overtaken.idle_since_s, overtaken.at_s - began_s
        if rank.pid != self._first_pids[rank.rank]:
            # The others were there already: a new process takes what theirs took to start.
            peers_s = max(peers_s, self._start_s or 0.0)
        limit_s = max(self.phases_s.get(_phase(rank), self.least_s), FACTOR * peers_s)
        if min(idle_s, rank.silent_s) <= limit_s:
            return None
        if rank.cpu_s - overtaken.cpu_s > IDLE_CORES * idle_s:
            overtaken.note_activity(rank, now_s=now_s)
            return None
        return StalledRank(rank.rank, _phase(rank), now_s - overtaken.at_s, limit_s, peers_s)
