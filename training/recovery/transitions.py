"""How an attempt answers each stimulus in each state, as data that `Attempt` goes by.

`REACTIONS` has a row for each stimulus and in it one reaction for each state, as rungs.py has a row
for each rung. `LEADS_TO` has the states that a reaction may end in; both are checked after every
stimulus where invariants are (invariants.py), and docs/architecture.md shows both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum

from perdure.training.recovery import stimuli
from perdure.training.recovery.stages import State
from perdure.training.recovery.stimuli import STIMULI, AnyStimulus


class Reaction(StrEnum):
    """How a stimulus is answered; the value is the cell of the printed table."""

    IGNORE = "ignored"  # it may come, and changes nothing
    REFUSE = "impossible"  # it cannot come from members that do as they are asked

    RESUME = "resume"
    PLACE_RANKS = "place ranks"
    MARK_ABSENT = "mark absent"
    GREET = "greet"
    DISMISS = "dismiss"
    MARK_DISCONNECTED = "mark disconnected"
    START_TRAINING = "start training"
    FINISH_REPAIR = "finish repair"
    NOTE_TRAINING = "note training"
    NOTE_PAUSE = "note pause"
    NOTE_STEP = "note step"
    NOTE_COMMIT = "note commit"
    KEEP_FAULT = "keep fault"
    JUDGE_FAULT = "judge fault"
    END_OVER_FAULT = "give up over fault"
    ANSWER_FAULT = "answer fault"
    ANSWER_FAULT_AFRESH = "answer fault afresh"
    COUNT_CONNECTIONS = "count connections"
    GATHER = "gather"
    GATHER_TO_SAVE = "gather to save"
    COLLECT_SAVE = "collect save"
    FINISH_TRAINING = "finish training"
    ABANDON_RECOVERY = "abandon recovery"
    NOTE_END_OF_LOOP = "note end of loop"
    ANSWER_DEATH = "answer death"
    RECOUNT_SURVIVORS = "recount survivors"
    CHECK_SAVE = "check save"
    END_OVER_DEATH = "give up over death"
    NOTE_DEATH = "note death"
    FAIL_REPLACEMENT = "fail replacement"
    DROP_NODE = "drop node"
    ANSWER_CHIP = "answer chip"
    END_OVER_CHIP = "give up over chip"
    REQUEST_PAUSE = "request pause"
    LOOK_AT_CLOCK = "look at clock"
    ANSWER_SILENT_NODE = "answer silent node"
    END_OVER_NODE = "give up over node"
    MISS_REPORTS = "fail without reports"
    MISS_REPAIR = "fail repair"
    MISS_CONNECTIONS = "fail reconnecting"
    PLAN_WITH_SURVIVORS = "plan with reports"
    MISS_SAVE = "fail save"


ALL = frozenset(State)
RECOVERING = frozenset({State.GATHERING, State.REPAIRING, State.RECONNECTING})
RECOVERABLE = RECOVERING | {State.TRAINING}
AT_THE_END = frozenset({State.GATHERING_TO_SAVE, State.SAVING, State.GIVEN_UP})

Row = Mapping[State, Reaction]


def _row(reactions: Mapping[Reaction, Collection[State]], otherwise: Reaction | None = None) -> Row:
    """One reaction for each state: the one that names it, else `otherwise`."""
    named = {state: reaction for reaction, states in reactions.items() for state in states}
    if otherwise is None:
        return {state: named[state] for state in State}
    return {state: named.get(state, otherwise) for state in State}


REACTIONS: Mapping[type[AnyStimulus], Row] = {
    stimuli.RecoveryResumed: _row({Reaction.RESUME: [State.STARTING]}, Reaction.REFUSE),
    stimuli.AgentConnected: _row({Reaction.PLACE_RANKS: ALL}),
    stimuli.AgentDisconnected: _row({Reaction.MARK_ABSENT: ALL}),
    stimuli.RankConnected: _row({Reaction.DISMISS: [State.GIVEN_UP]}, Reaction.GREET),
    stimuli.RankDisconnected: _row({Reaction.MARK_DISCONNECTED: ALL}),
    stimuli.RankTrains: _row(
        {
            Reaction.START_TRAINING: [State.STARTING],
            Reaction.FINISH_REPAIR: [State.REPAIRING],
            Reaction.NOTE_TRAINING: [State.TRAINING, State.RECONNECTING, State.ENDING],
        },
        Reaction.IGNORE,  # there is no plan to train by
    ),
    stimuli.RankPaused: _row({Reaction.NOTE_PAUSE: ALL}),
    stimuli.StepRecorded: _row({Reaction.NOTE_STEP: ALL}),
    stimuli.StepCommitted: _row({Reaction.NOTE_COMMIT: ALL}),
    stimuli.FaultReported: _row(
        {
            Reaction.KEEP_FAULT: [State.STARTING],
            Reaction.JUDGE_FAULT: RECOVERABLE,
            Reaction.END_OVER_FAULT: [State.ENDING],
            Reaction.IGNORE: AT_THE_END,
        }
    ),
    stimuli.ConnectionsRestored: _row(
        {Reaction.COUNT_CONNECTIONS: [State.RECONNECTING], Reaction.REFUSE: [State.STARTING]},
        Reaction.IGNORE,
    ),
    stimuli.StateReported: _row(
        {
            Reaction.GATHER: [State.GATHERING],
            Reaction.GATHER_TO_SAVE: [State.GATHERING_TO_SAVE],
        },
        Reaction.IGNORE,
    ),
    stimuli.LastSaveReported: _row(
        {Reaction.COLLECT_SAVE: [State.SAVING], Reaction.IGNORE: [State.GIVEN_UP]},
        Reaction.REFUSE,
    ),
    stimuli.LoopEnded: _row(
        {Reaction.FINISH_TRAINING: [State.TRAINING], Reaction.ABANDON_RECOVERY: RECOVERING},
        Reaction.NOTE_END_OF_LOOP,
    ),
    stimuli.ProcessEnded: _row(
        {
            Reaction.ANSWER_DEATH: RECOVERABLE,
            Reaction.RECOUNT_SURVIVORS: [State.GATHERING_TO_SAVE],
            Reaction.CHECK_SAVE: [State.SAVING],
            Reaction.END_OVER_DEATH: [State.STARTING, State.ENDING],
            Reaction.NOTE_DEATH: [State.GIVEN_UP],
        }
    ),
    stimuli.ReplacementFailed: _row({Reaction.FAIL_REPLACEMENT: RECOVERING}, Reaction.NOTE_DEATH),
    stimuli.NodeLost: _row({Reaction.DROP_NODE: ALL}),
    # It lives: there is time, and none that a last save would be broken off for.
    stimuli.NodeSlow: _row({Reaction.DROP_NODE: [State.TRAINING]}, Reaction.IGNORE),
    # While ranks recover, the supervisor reports it again: they may recover from this very fault.
    stimuli.ChipFailed: _row(
        {Reaction.ANSWER_CHIP: [State.TRAINING], Reaction.END_OVER_CHIP: [State.STARTING]},
        Reaction.IGNORE,
    ),
    stimuli.PauseWanted: _row({Reaction.REQUEST_PAUSE: ALL}),
    stimuli.TimePassed: _row({Reaction.LOOK_AT_CLOCK: ALL}),
    stimuli.FaultSettled: _row(
        {
            # Before there is a plan, reports of the present generation are on their way.
            Reaction.ANSWER_FAULT_AFRESH: [State.GATHERING],
            Reaction.ANSWER_FAULT: RECOVERABLE - {State.GATHERING},
        },
        Reaction.REFUSE,
    ),
    stimuli.NodeSilent: _row({Reaction.ANSWER_SILENT_NODE: RECOVERABLE}, Reaction.END_OVER_NODE),
    stimuli.DeadlinePassed: _row(
        {
            Reaction.MISS_REPORTS: [State.GATHERING],
            Reaction.MISS_REPAIR: [State.REPAIRING],
            Reaction.MISS_CONNECTIONS: [State.RECONNECTING],
            Reaction.PLAN_WITH_SURVIVORS: [State.GATHERING_TO_SAVE],
            Reaction.MISS_SAVE: [State.SAVING],
        },
        Reaction.REFUSE,
    ),
}

# A rung inside the processes, a rung above them with a last save, or without.
_ANSWERS = frozenset({State.GATHERING, State.GATHERING_TO_SAVE, State.GIVEN_UP})
_END = frozenset({State.GIVEN_UP})
_END_OR_SAVE = _END | {State.SAVING}

# States that a reaction may end in besides the one that it began in; none: it never leaves it.
LEADS_TO: Mapping[Reaction, frozenset[State]] = {
    Reaction.RESUME: frozenset({State.GATHERING}),
    Reaction.START_TRAINING: frozenset({State.TRAINING}),
    Reaction.FINISH_REPAIR: frozenset({State.TRAINING}),
    Reaction.END_OVER_FAULT: _END,
    Reaction.ANSWER_FAULT: _ANSWERS | {State.RECONNECTING},
    Reaction.ANSWER_FAULT_AFRESH: _ANSWERS,
    Reaction.COUNT_CONNECTIONS: _ANSWERS | {State.TRAINING, State.REPAIRING},
    Reaction.GATHER: _ANSWERS | {State.REPAIRING},
    Reaction.GATHER_TO_SAVE: _END_OR_SAVE,
    Reaction.COLLECT_SAVE: _END,
    Reaction.FINISH_TRAINING: _END | {State.ENDING},
    Reaction.ABANDON_RECOVERY: _END,
    Reaction.ANSWER_DEATH: _ANSWERS,
    Reaction.RECOUNT_SURVIVORS: _END_OR_SAVE,
    Reaction.CHECK_SAVE: _END,
    Reaction.END_OVER_DEATH: _END,
    Reaction.ANSWER_CHIP: _ANSWERS,
    Reaction.END_OVER_CHIP: _END,
    Reaction.FAIL_REPLACEMENT: _ANSWERS,
    Reaction.ANSWER_SILENT_NODE: _END | {State.GATHERING_TO_SAVE},
    Reaction.END_OVER_NODE: _END,
    Reaction.MISS_REPORTS: _ANSWERS,
    Reaction.MISS_REPAIR: _ANSWERS,
    Reaction.MISS_CONNECTIONS: _ANSWERS,
    Reaction.PLAN_WITH_SURVIVORS: _END_OR_SAVE,
    Reaction.MISS_SAVE: _END,
}
# Stimuli that a reaction turns into, in the state that it leads to.
BECOMES: Mapping[Reaction, tuple[type[AnyStimulus], ...]] = {
    Reaction.START_TRAINING: (stimuli.FaultReported,),
    Reaction.JUDGE_FAULT: (stimuli.FaultSettled,),
    Reaction.DROP_NODE: (stimuli.ProcessEnded,),
    Reaction.LOOK_AT_CLOCK: (
        stimuli.FaultSettled,
        stimuli.ProcessEnded,
        stimuli.NodeSilent,
        stimuli.DeadlinePassed,
    ),
}


def reaction_to(stimulus: type[AnyStimulus], state: State) -> Reaction:
    """How a stimulus is answered in a state."""
    return REACTIONS[stimulus][state]


def states_after(stimulus: type[AnyStimulus], state: State) -> frozenset[State]:
    """Every state that an attempt may be in once a stimulus has been handled."""
    reaction = reaction_to(stimulus, state)
    states = {state, *LEADS_TO.get(reaction, ())}
    consequences, num_states = BECOMES.get(reaction, ()), 0
    while len(states) > num_states:  # a consequence may come for several ranks
        num_states = len(states)
        for consequence in consequences:
            for begin in tuple(states):
                if reaction_to(consequence, begin) is not Reaction.REFUSE:
                    states |= states_after(consequence, begin)
    return frozenset(states)


def name_of(stimulus: type[AnyStimulus]) -> str:
    """The `kind` of a stimulus."""
    return str(stimulus.__dataclass_fields__["kind"].default)


def transitions_markdown() -> str:
    """The diagram of the states and the table of reactions, as docs/architecture.md has them."""
    return "\n".join(["```mermaid", *_diagram(), "```", "", *_table(), "", *_footnotes()])


def _diagram() -> Iterator[str]:
    yield "stateDiagram-v2"
    yield f"    [*] --> {State.STARTING}"
    for state in State:
        for target in State:
            names = [name_of(stimulus) for stimulus in STIMULI if _goes(stimulus, state, target)]
            if names:
                yield f"    {state} --> {target}: {', '.join(names)}"
    yield f"    {State.GIVEN_UP} --> [*]"
    yield f"    {State.ENDING} --> [*]"


def _goes(stimulus: type[AnyStimulus], state: State, target: State) -> bool:
    """Whether the stimulus itself, not another one that it becomes, leads to a state."""
    is_given_up = state is State.GIVEN_UP
    return not is_given_up and target in LEADS_TO.get(reaction_to(stimulus, state), ())


def _table() -> Iterator[str]:
    yield f"| stimulus | {' | '.join(f'`{state}`' for state in State)} |"
    yield f"|---{'|---' * len(State)}|"
    for stimulus in STIMULI:
        cells = [str(reaction_to(stimulus, state)) for state in State]
        if len(set(cells)) > 1:
            yield f"| `{name_of(stimulus)}` | {' | '.join(cells)} |"


def _footnotes() -> Iterator[str]:
    rows = {stimulus: set(REACTIONS[stimulus].values()) for stimulus in STIMULI}
    alike = [
        f"`{name_of(stimulus)}`: {min(row)}" for stimulus, row in rows.items() if len(row) == 1
    ]
    yield f"In every state alike: {'; '.join(alike)}."
    for reaction, consequences in BECOMES.items():
        names = ", ".join(f"`{name_of(stimulus)}`" for stimulus in consequences)
        yield f"What follows *{reaction}* is handled as {names}."
