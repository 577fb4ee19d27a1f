"""How the ranks of an attempt get back to one step: a pure plan from what each of them reports.

A step is RUN (forward, backward, reduction), then PREPARED (this rank holds the reduced
gradient), then one all-reduce makes it VOTED (every rank holds it), then APPLYING. A gradient
that every rank was known to hold is applied by those that have not done so yet; every other step
in flight is done again. A rank whose state is not to be trusted gets it from a replica. Steps are
completed optimizer steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum, StrEnum
from itertools import groupby
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from perdure.storage.frozen_model import FrozenModel


def ranges_text(ranks: Sequence[int]) -> str:
    """Ranks in their order as text, neighbours as a range: "0-7,16-8191"."""
    # Those of one range are equally far ahead of their index.
    groups = groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])
    runs = ([rank for _, rank in group] for _, group in groups)
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _from_ranges(ranks: Any) -> Any:
    if not isinstance(ranks, str):
        return ranks
    ends = [part.split("-", 1) for part in ranks.split(",") if part]
    return tuple(rank for end in ends for rank in range(int(end[0]), int(end[-1]) + 1))


# As JSON ranges: every rank gets the plan, and as numbers 8,192 ranks would make 48 KB of each.
CompactRanks = Annotated[
    tuple[int, ...],
    BeforeValidator(_from_ranges),
    PlainSerializer(ranges_text, return_type=str, when_used="json"),
]


class StepPhase(IntEnum):
    """How far a rank is in the step after its completed ones."""

    RUN = 0
    PREPARED = 1
    VOTED = 2
    APPLYING = 3


class RepairMode(StrEnum):
    """What a new generation is for."""

    TRAIN = "train"
    ROLL_BACK = "roll_back"  # to the newest snapshot that all ranks have
    ACCEPT = "accept"  # the gradient that was found abnormal is applied
    LAST_SAVE = "last_save"  # the survivors save and end


class Vote(FrozenModel):
    """What all ranks learned at a step boundary.

    Attributes:
        step: that it was about.
        loss: mean over the global batch.
        grad_norm: before clipping.
        stop: some rank was asked to end.
        save: the first rank wants a checkpoint.
        pause: some rank was asked to pause.
        culprit: the one rank whose own loss is abnormal, None where none is or several are.
        lr: learning rate that the optimizer has for the step.
    """

    step: int
    loss: float
    grad_norm: float
    stop: bool = False
    save: bool = False
    pause: bool = False
    culprit: int | None = None
    lr: float = 0.0


class SkippedBatch(FrozenModel):
    """A global batch that was passed over, because the step that it made was abnormal.

    Attributes:
        step: that it was to become; the batch after it became that step, or was skipped as well.
        start: global samples handed out before it.
        stop: the same, after it.
        loss: mean over it, None when it is not a number.
        grad_norm: before clipping, of that step.
    """

    step: int
    start: int
    stop: int
    loss: float | None
    grad_norm: float | None


class RankReport(FrozenModel):
    """State of a rank when a generation begins.

    Attributes:
        step: completed steps in its state.
        phase: of the step after.
        is_dirty: its state is not to be trusted: damaged memory, half an optimizer step.
        is_fresh: a new process that has no state yet.
        snapshot_step: of its newest snapshot, None without one.
        votes: about `step` and the one after, as far as it took part in them.
        pending: what it had still to do after `step`, by name.
        skipped: batches that it has passed over since `step`, oldest first.
    """

    rank: int
    step: int
    phase: StepPhase = StepPhase.RUN
    is_dirty: bool = False
    is_fresh: bool = False
    snapshot_step: int | None = None
    votes: tuple[Vote, ...] = ()
    pending: tuple[str, ...] = ()
    skipped: tuple[SkippedBatch, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether its state is a completed step."""
        return not (self.is_dirty or self.is_fresh)

    @property
    def reachable_step(self) -> int:
        """The furthest step that it is known to belong to."""
        return self.step + (self.phase >= StepPhase.VOTED)

    def can_be_at(self, step: int) -> bool:
        """Whether it has, or can make by itself, the state of a step."""
        ready = self.step == step - 1 and self.phase >= StepPhase.PREPARED
        return self.is_clean and (self.step == step or ready)


class Move(FrozenModel):
    """One rank's state goes to another."""

    source: int
    target: int


class RepairPlan(FrozenModel):
    """What every rank does to go on together.

    Attributes:
        step: completed steps that all of them have afterwards.
        applies: ranks that apply the gradient they hold.
        moves: states that are copied.
        rolls_back: every rank that no state is copied to takes its snapshot of `step`; only
            then are states copied.
        vote: of `step`, for the record of it, None when no rank knows it.
        pending: what is to be done before the next step, by name.
        savers: LAST_SAVE: who saves, one rank per replica group.
        skipped: batches after `step` that no rank trains on, oldest first.
    """

    mode: RepairMode
    step: int
    applies: CompactRanks = ()
    moves: tuple[Move, ...] = ()
    rolls_back: bool = False
    vote: Vote | None = None
    pending: tuple[str, ...] = ()
    savers: CompactRanks = ()
    skipped: tuple[SkippedBatch, ...] = ()


class Unrepairable(Exception):  # noqa: N818 a state of affairs, named as it is shown
    """The ranks that live cannot get back to one step by themselves."""


def plan_repair(
    reports: Sequence[RankReport],
    groups: Sequence[Sequence[int]],
    *,
    mode: RepairMode = RepairMode.TRAIN,
    accepted: int | None = None,
) -> RepairPlan:
    """Decide what every rank does.

    Args:
        reports: of every living rank; of all ranks unless the mode is LAST_SAVE.
        groups: ranks that hold the same state, every rank in one of them.
        mode: what the generation is for.
        accepted: ACCEPT: the step whose gradient is applied. Some ranks may have done so
            already, in a generation that was cut short.

    Raises:
        Unrepairable: names what is missing.
    """
    if mode is RepairMode.ROLL_BACK:
        return _roll_back(reports, groups)
    if not reports:
        raise Unrepairable("no rank lives any more")
    clean = [report for report in reports if report.is_clean]
    if not clean:
        raise Unrepairable("no rank has a state that can be trusted")
    step = max(report.reachable_step for report in clean)
    if mode is RepairMode.ACCEPT:
        assert accepted is not None  # noqa: S101 the decision is about a step
        step = max(step, accepted)
    return _plan_step(reports, groups, clean, mode=mode, step=step)


def _plan_step(
    reports: Sequence[RankReport],
    groups: Sequence[Sequence[int]],
    clean: Sequence[RankReport],
    *,
    mode: RepairMode,
    step: int,
) -> RepairPlan:
    """Every rank comes to this step, or the survivors save it."""
    able = {report.rank for report in clean if report.can_be_at(step)}
    applies = tuple(sorted(r.rank for r in clean if r.rank in able and r.step < step))
    vote = next((vote for r in clean for vote in r.votes if vote.step == step), None)
    if vote is not None and any(report.is_fresh for report in reports):
        # Those that asked for it may be gone; the others ask again with the next step.
        vote = vote.model_copy(update={"stop": False})
    skipped = _skipped(clean, step)
    if mode is RepairMode.LAST_SAVE:
        if step == 0:  # what every start makes anew; without wrappers each rank has its own
            raise Unrepairable("nothing was trained yet")
        savers = _savers(able, groups)
        return RepairPlan(
            mode=mode, step=step, applies=applies, vote=vote, savers=savers, skipped=skipped
        )
    return RepairPlan(
        mode=mode,
        step=step,
        applies=applies,
        moves=_moves([r.rank for r in reports if r.rank not in able], able, groups),
        vote=vote,
        pending=_pending(reports, step),
        skipped=skipped,
    )


def _roll_back(reports: Sequence[RankReport], groups: Sequence[Sequence[int]]) -> RepairPlan:
    """To the newest snapshot that some rank of every group has; the others get it from there."""
    holders: dict[int, set[int]] = {}
    for report in reports:
        if report.is_clean and report.snapshot_step is not None:
            holders.setdefault(report.snapshot_step, set()).add(report.rank)
    whole = [step for step, ranks in holders.items() if all(ranks & set(group) for group in groups)]
    if not whole:
        raise Unrepairable("the ranks have no snapshot of one step")
    step = max(whole)
    return RepairPlan(
        mode=RepairMode.ROLL_BACK,
        step=step,
        moves=_moves(
            [r.rank for r in reports if r.rank not in holders[step]], holders[step], groups
        ),
        rolls_back=True,
    )


def _moves(
    wanting: Sequence[int], able: set[int], groups: Sequence[Sequence[int]]
) -> tuple[Move, ...]:
    """A source for every rank in want, the work spread over the sources."""
    num_copies: dict[int, int] = dict.fromkeys(able, 0)
    moves: list[Move] = []
    for rank in sorted(wanting):
        sources = [member for member in _group_of(rank, groups) if member in able]
        if not sources:
            raise Unrepairable(f"no rank that lives has the state of rank {rank}")
        source = min(sources, key=lambda member: (num_copies[member], member))
        num_copies[source] += 1
        moves.append(Move(source=source, target=rank))
    return tuple(moves)


def _savers(able: set[int], groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    chosen: list[int] = []
    for group in groups:
        living = [rank for rank in group if rank in able]
        if not living:
            raise Unrepairable(f"no rank of {list(group)} lives: their state is lost")
        chosen.append(living[0])
    return tuple(chosen)


def _group_of(rank: int, groups: Sequence[Sequence[int]]) -> Sequence[int]:
    return next((group for group in groups if rank in group), ())


def _pending(reports: Sequence[RankReport], step: int) -> tuple[str, ...]:
    """What some rank at this step has not done yet; all of them do it, for it needs all."""
    pending = (name for report in reports if report.step == step for name in report.pending)
    return tuple(dict.fromkeys(pending))


def _skipped(clean: Sequence[RankReport], step: int) -> tuple[SkippedBatch, ...]:
    """What the furthest rank has passed over: the others were about to, each in the same order."""
    return max((r.skipped for r in clean if r.step == step), key=len, default=())


def steps_lost(reports: Mapping[int, RankReport], plan: RepairPlan) -> int:
    """Completed steps that are done again."""
    return max(0, max((r.step for r in reports.values() if r.is_clean), default=0) - plan.step)
