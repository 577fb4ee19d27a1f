"""Plays the history of an attempt again: `python -m perdure.training.recovery.replay FILE`.

FILE is the coordinator-events.jsonl of an attempt, or the older one beside it. Prints every
stimulus with the states around it and the actions that it led to. Exit codes: 0 everything
happened as it is on record, 1 the attempt did something else, or an invariant broke, at the
stimulus that is named; 2 the file is no history.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from perdure.training.masking import make_mask
from perdure.training.recovery.attempt import Attempt
from perdure.training.recovery.event_history import (
    ActionNote,
    HandledStimulus,
    History,
    action_notes,
    masked_texts,
    parse_history,
)

USAGE = "usage: python -m perdure.training.recovery.replay FILE"
_MASK = make_mask(())  # what is on record is masked


class ReplayFailed(Exception):  # noqa: N818 a result, named as it is shown
    """An attempt does not do once more what is on record; names the stimulus."""


def replay(history: History) -> Iterator[str]:
    """Play an attempt from its snapshot on. Yields lines that show what happens.

    Raises:
        ReplayFailed: at the first difference, or broken invariant.
    """
    first = history.snapshot
    attempt = Attempt(first.memory, first.settings, first.decider, checks_invariants=True)
    yield f"{attempt.memory.state} before stimulus {first.number}, written by {first.version}"
    for handled in history.handled:
        yield from _handle(attempt, handled)


def _handle(attempt: Attempt, handled: HandledStimulus) -> Iterator[str]:
    title = f"stimulus {handled.number} at {handled.at_s:.3f}"
    if attempt.memory.state is not handled.state_before:
        raise ReplayFailed(f"{title}: {attempt.memory.state} before it, not {handled.state_before}")
    try:
        actions = attempt.handle(handled.stimulus, now_s=handled.at_s)
    except Exception as error:
        raise ReplayFailed(f"{title}: {type(error).__name__}: {error}") from error
    yield f"{title}: {handled.state_before} -> {attempt.memory.state}: {handled.stimulus}"
    texts = [_text(_masked(note)) for note in action_notes(actions)]
    yield from (f"    {text}" for text in texts)
    if attempt.memory.state is not handled.state_after:
        raise ReplayFailed(f"{title}: {attempt.memory.state} after it, not {handled.state_after}")
    if handled.error:
        raise ReplayFailed(f"{title}: ended in no error, on record is {handled.error}")
    recorded = [_text(note) for note in handled.actions]
    if texts != recorded:  # as texts: a number that is none equals nothing
        raise ReplayFailed(f"{title}: other actions than on record: {recorded or 'none'}")


def _masked(note: ActionNote) -> ActionNote:
    return ActionNote(note.to, masked_texts(note.content, _MASK), note.ranks)


def _text(note: ActionNote) -> str:
    return " ".join(filter(None, (note.to, note.ranks, json.dumps(note.content))))


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay the file that is the only argument. Returns the exit code."""
    paths = sys.argv[1:] if arguments is None else arguments
    if len(paths) != 1:
        print(USAGE, file=sys.stderr)
        return 2
    try:
        with Path(paths[0]).open(encoding="utf-8") as file:
            history = parse_history(file)
    except (OSError, ValueError) as error:
        print(f"replay: {paths[0]}: {error}", file=sys.stderr)
        return 2
    try:
        for line in replay(history):
            print(line)
    except ReplayFailed as difference:
        print(f"replay: {difference}", file=sys.stderr)
        return 1
    print(f"{len(history.handled)} stimuli, everything as on record")
    return 0


if __name__ == "__main__":
    sys.exit(main())
