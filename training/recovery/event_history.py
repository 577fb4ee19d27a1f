"""What a coordinator writes down of its attempt, so that the attempt can be played again.

A history is JSON lines: first a `Snapshot`, then a `HandledStimulus` for each stimulus, all without
secrets. Nothing here touches a file. Times are seconds since the epoch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from perdure.training.recovery.actions import AbnormalNorm, Action, LogEvent, ToAgent, ToRank
from perdure.training.recovery.attempt import Attempt
from perdure.training.recovery.ladder import InProcessDecider
from perdure.training.recovery.memory import AttemptSettings, Memory
from perdure.training.recovery.repair import ranges_text
from perdure.training.recovery.stages import State
from perdure.training.recovery.stimuli import (
    RankDisconnected,
    RankTrains,
    StateReported,
    StepCommitted,
    StepRecorded,
    Stimulus,
)

# Nothing to be masked; most of what a coordinator of many ranks handles is among them.
_OF_NUMBERS = (RankTrains, RankDisconnected, StateReported, StepRecorded, StepCommitted)

Mask = Callable[[str], str]
Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An attempt between two stimuli.

    Attributes:
        version: of the program that wrote it; another one may decide otherwise.
        number: of the stimulus that comes next.
    """

    version: str
    number: int
    memory: Memory
    settings: AttemptSettings
    decider: InProcessDecider
    kind: Literal["snapshot"] = "snapshot"


@dataclass(frozen=True, slots=True)
class ActionNote:
    """An action, or one message to many ranks.

    Attributes:
        to: "ranks", "agent of rank", "all agents", "attempt log" or "abnormal steps".
        content: the message, the event or the step with its norms.
        ranks: that it is for, as ranges; empty where it is for none in particular.
    """

    to: str
    content: Document
    ranks: str = ""


@dataclass(frozen=True, slots=True)
class HandledStimulus:
    """One stimulus, and what it led to.

    Attributes:
        number: of the stimulus in the attempt, from 1.
        at_s: when it was handled.
        state_before: of the attempt.
        state_after: of the attempt.
        actions: in their order.
        error: what was raised, empty where nothing was.
    """

    number: int
    at_s: float
    state_before: State
    stimulus: Annotated[Stimulus, Field(discriminator="kind")]
    state_after: State
    actions: tuple[ActionNote, ...] = ()
    error: str = ""
    kind: Literal["handled"] = "handled"


@dataclass(frozen=True, slots=True)
class History:
    """A snapshot, and what was handled after it."""

    snapshot: Snapshot
    handled: Sequence[HandledStimulus]


class HistoryError(ValueError):
    """A text that is no history; names the line."""


_Line = TypeVar("_Line")
_SNAPSHOT = TypeAdapter(Snapshot)
_HANDLED = TypeAdapter(HandledStimulus)
_NORM = TypeAdapter(AbnormalNorm)


def snapshot_line(attempt: Attempt, *, number: int, version: str, mask: Mask) -> str:
    """An attempt as it is now, as a line.

    Args:
        attempt: between two stimuli.
        number: of the stimulus that comes next.
        version: of this program.
        mask: takes secrets out of a text.
    """
    snapshot = Snapshot(version, number, attempt.memory, attempt.settings, attempt.decider)
    return _masked_line(json.dumps(_SNAPSHOT.dump_python(snapshot, mode="json")), mask)


def handled_line(handled: HandledStimulus, *, mask: Mask) -> str:
    """A stimulus with what it led to, as a line.

    Args:
        handled: the stimulus.
        mask: takes secrets out of a text.
    """
    # Neither dump_json, nor this for actions: a loss that is no number would be missing.
    document = _HANDLED.dump_python(handled, mode="json", exclude={"actions"})
    document["actions"] = [
        {"to": note.to, "content": note.content, "ranks": note.ranks} for note in handled.actions
    ]
    line = json.dumps(document)
    has_texts = handled.actions or handled.error or not isinstance(handled.stimulus, _OF_NUMBERS)
    return _masked_line(line, mask) if has_texts else f"{line}\n"


def action_notes(actions: Iterable[Action]) -> tuple[ActionNote, ...]:
    """Actions as a history has them: a message that goes to many ranks is one note."""
    return tuple(_note(list(group)) for _, group in groupby(actions, key=_group_of))


def _group_of(action: Action) -> tuple[str, int]:
    # The same message to many ranks is the same object.
    return type(action).__name__, id(action.message if isinstance(action, ToRank) else action)


def _note(actions: Sequence[Action]) -> ActionNote:
    match actions[0]:
        case ToRank(message=message):
            ranks = sorted(action.rank for action in actions if isinstance(action, ToRank))
            return ActionNote("ranks", message.model_dump(mode="json"), ranges_text(ranks))
        case ToAgent(rank=None, message=message):
            return ActionNote("all agents", message.model_dump(mode="json"))
        case ToAgent(rank=rank, message=message):
            return ActionNote("agent of rank", message.model_dump(mode="json"), str(rank))
        case LogEvent(event=event):
            return ActionNote("attempt log", event.model_dump(mode="json"))
        case AbnormalNorm() as norm:
            return ActionNote("abnormal steps", _NORM.dump_python(norm, mode="json"))
        case _:
            raise AssertionError(f"{actions[0]} is no action")


def masked_texts(value: Any, mask: Mask) -> Any:
    """A JSON value with every text in it masked."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, dict):
        return {key: masked_texts(item, mask) for key, item in value.items()}
    return [masked_texts(item, mask) for item in value] if isinstance(value, list) else value


def _masked_line(line: str, mask: Mask) -> str:
    # Text by text only where it must be: most lines have no secret, and a mask over a whole line
    # may take its quotes away.
    if mask(line) != line:
        line = json.dumps(masked_texts(json.loads(line), mask))
    return f"{line}\n"


def parse_history(lines: Iterable[str]) -> History:
    """A history from its lines; the last one may have been cut by the end of its writer.

    Raises:
        HistoryError: names the line that does not belong to one.
    """
    whole = [line for line in lines if line.endswith("\n")]
    if not whole:
        raise HistoryError("line 1 is missing: a history begins with a snapshot")
    snapshot = _parse(_SNAPSHOT, whole[0], 1)
    handled = [_parse(_HANDLED, line, number) for number, line in enumerate(whole[1:], 2)]
    return History(snapshot, handled)


def _parse(adapter: TypeAdapter[_Line], line: str, number: int) -> _Line:
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise HistoryError(f"line {number}: {place}: {problem['msg']}") from error
