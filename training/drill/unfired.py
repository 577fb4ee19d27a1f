"""Faults of a campaign that did not happen: for a reason, or a campaign that proves too little.

Of a fault that may come several times the first is asked for: the next comes only when its step
is done again. Pure; steps are completed optimizer steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from training.drill.campaign import Campaign
from training.injection.outside import Kill
from training.journal.history import RunHistory
from training.recovery.rungs import Rung
from training.specs.drill import DrillFault, DrillPoint

# A process that is not there at one look may be on its way; at the next it is.
ENOUGH_LOOKS = 2


@dataclass(frozen=True, slots=True)
class Missed:
    """A fault that did not happen.

    Attributes:
        what: for a person.
        reason: why it could not, None when there is none.
    """

    what: str
    reason: str | None


def missed(
    campaign: Campaign,
    history: RunHistory,
    *,
    fired: Collection[int],
    killed: Collection[int],
    looks: Mapping[int, int],
) -> list[Missed]:
    """What of a campaign did not happen.

    Args:
        campaign: that was played.
        history: of its run.
        fired: faults that happened, by their index.
        killed: kills that hit, likewise.
        looks: how often each other kill was due in a run that was at work, likewise.
    """
    went_on_from = set(_went_on_from(history))
    mended_at = max(_mended_at(history), default=-1)
    found = [
        Missed(_told(fault), _fault_reason(fault, went_on_from, mended_at))
        for number, fault in enumerate(campaign.faults)
        if number not in fired
    ]
    for number, kill in enumerate(campaign.kills):
        if number not in killed:
            is_over = looks.get(number, 0) < ENOUGH_LOOKS
            reason = "the run was over before somebody could look again" if is_over else None
            found.append(Missed(_told(kill), reason))
    return found


def _fault_reason(fault: DrillFault, went_on_from: set[int], mended_at: int) -> str | None:
    if fault.point is DrillPoint.RECOVERY:
        if mended_at + 1 < fault.step:
            return "no recovery inside the processes came so late"
        return None
    if fault.step in went_on_from:
        return "a recovery went on from its step, which the rank may not have done itself"
    return None


def _went_on_from(history: RunHistory) -> Iterator[int]:
    """Steps after which a recovery had training go on; some ranks took their state from others."""
    for view in history.attempts[1:]:
        yield view.from_step
    yield from _mended_at(history)


def _mended_at(history: RunHistory) -> Iterator[int]:
    for view in history.attempts:
        for one in view.recoveries:
            # New links under the operations are no recovery that a rank takes part in by itself.
            if one.ended is not None and one.began.decision.rung is not Rung.OPERATOR_RETRY:
                step = one.ended.step
                if one.succeeded and step is not None:
                    yield step


def _told(one: DrillFault | Kill) -> str:
    if isinstance(one, Kill):
        return str(one)
    return f"{one.kind} of rank {one.rank} at {one.point} of step {one.step}"
