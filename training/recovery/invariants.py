"""What holds of an attempt after every stimulus, as sentences with their conditions.

Nobody needs them in production. Tests, drills and chaos have them checked, so that a defect shows
at the stimulus which caused it, not at the rank that waits for ever because of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from perdure.training.recovery.memory import Memory
from perdure.training.recovery.repair import RepairMode
from perdure.training.recovery.stages import State
from perdure.training.recovery.stimuli import Stimulus
from perdure.training.recovery.transitions import (
    AT_THE_END,
    RECOVERABLE,
    RECOVERING,
    Reaction,
    reaction_to,
    states_after,
)

CHECK_INVARIANTS_ENV = "PERDURE_CHECK_INVARIANTS"  # set: a coordinator checks, and ends over one

_LAST_SAVE = frozenset({State.GATHERING_TO_SAVE, State.SAVING})
_WITHOUT_LOOP = _LAST_SAVE | {State.GATHERING}  # no rank trains before there is a plan
_BEFORE_A_PLAN = frozenset(
    {State.STARTING, State.TRAINING, State.GATHERING, State.GATHERING_TO_SAVE, State.ENDING}
)


class InvariantBroken(AssertionError):  # noqa: N818 named as the sentence that it carries
    """An attempt is in a condition that no stimulus should bring it into."""


INVARIANTS: Mapping[str, Callable[[Memory], bool]] = {
    "there is a deadline exactly while something is asked of ranks": lambda memory: (
        (memory.round.deadline_s is not None) == (memory.state in RECOVERING | _LAST_SAVE)
    ),
    "recoveries are open exactly while the ranks recover": lambda memory: (
        bool(memory.recoveries.open) == (memory.state in RECOVERING)
    ),
    "a fault waits for its explanation only while it can be recovered from": lambda memory: (
        memory.round.suspicion is None or memory.state in RECOVERABLE
    ),
    "faults are kept for later only until all ranks train": lambda memory: (
        not memory.early_faults or memory.state in (State.STARTING, State.GIVEN_UP)
    ),
    "there is no plan before the reports, and none once it is done": lambda memory: (
        memory.round.plan is None or memory.state not in _BEFORE_A_PLAN
    ),
    "a last save follows a plan": lambda memory: (
        memory.round.plan is not None or memory.state is not State.SAVING
    ),
    "the mode is a last save exactly while one is prepared or made": lambda memory: (
        (memory.round.mode is RepairMode.LAST_SAVE) == (memory.state in _LAST_SAVE)
        or memory.state is State.GIVEN_UP
    ),
    "there is a reason to end exactly from the last save on": lambda memory: (
        bool(memory.why) == (memory.state in AT_THE_END)
    ),
    "no rank trains in a generation that has no plan": lambda memory: (
        not memory.round.training or memory.state not in _WITHOUT_LOOP
    ),
    "no rank is paused before it trains": lambda memory: (
        not memory.pauses.paused or memory.state not in _WITHOUT_LOOP
    ),
    "a pause is on record only while some rank is paused": lambda memory: (
        memory.pauses.number is None or bool(memory.pauses.paused)
    ),
    "connections are restored only after they were to be": lambda memory: (
        not memory.round.restored or memory.round.connection > 0
    ),
    "savers are those of the plan, and have reported or not": lambda memory: (
        memory.round.unsaved <= set(memory.round.plan.savers)
        and memory.round.unsaved.isdisjoint(memory.round.saved)
        if memory.round.plan is not None
        else not memory.round.unsaved
    ),
    "a rank that is being started is neither connected nor dead": lambda memory: (
        memory.ranks.starting.isdisjoint(memory.ranks.living | memory.ranks.dead)
    ),
    "a rank that is awaited is neither connected nor dead": lambda memory: (
        memory.ranks.awaited.isdisjoint(memory.ranks.living | memory.ranks.dead)
    ),
    "a chip is checked only for a rank that is not connected again": lambda memory: (
        set(memory.checks) <= memory.ranks.starting | memory.ranks.dead
    ),
    "every rank that is known of is one of the attempt": lambda memory: all(
        0 <= rank < memory.world_size for rank in _ranks_of(memory)
    ),
    "every action has been handed out": lambda memory: not memory.outbox.actions,
}


def _ranks_of(memory: Memory) -> Iterator[int]:
    """Ranks in any collection."""
    ranks, round_ = memory.ranks, memory.round
    collections: Collection[Collection[int]] = (
        *(ranks.living, ranks.ending, ranks.dead, ranks.awaited, ranks.starting, ranks.building),
        *(ranks.stateless, ranks.disconnected_s, round_.training, round_.reports, round_.restored),
        *(round_.saved, round_.unsaved, memory.pauses.paused, memory.checks),
    )
    for collection in collections:
        yield from collection


def broken_invariants(memory: Memory) -> list[str]:
    """The sentences that do not hold."""
    return [sentence for sentence, holds in INVARIANTS.items() if not holds(memory)]


def check_invariants(memory: Memory, stimulus: Stimulus, state: State) -> None:
    """Check everything, after a stimulus.

    Args:
        memory: of the attempt.
        stimulus: that was handled.
        state: of the attempt before it.

    Raises:
        InvariantBroken: names the stimulus and what does not hold.
    """
    broken = broken_invariants(memory)
    kind = type(stimulus)
    if reaction_to(kind, state) is Reaction.REFUSE:
        broken.append(f"{stimulus.kind} is impossible while {state}")
    elif memory.state not in states_after(kind, state):
        broken.append(f"{stimulus.kind} never leads from {state} to {memory.state}")
    if broken:
        raise InvariantBroken(f"after {stimulus} while {state}: {'; '.join(broken)}")
