"""The history of an attempt, written beside the coordinator's log for a replay of it.

`coordinator-events.jsonl` begins with a snapshot of the attempt and gets a line for each stimulus;
once it is long enough it takes the place of the older file, and another one begins. So there are
always the last `MIN_STIMULI` stimuli, and whatever there is can be replayed
(training/recovery/replay.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TextIO

from perdure.training.coordinator.metrics import package_version
from perdure.training.masking import make_mask
from perdure.training.recovery.actions import Action
from perdure.training.recovery.attempt import Attempt
from perdure.training.recovery.event_history import (
    HandledStimulus,
    action_notes,
    handled_line,
    snapshot_line,
)
from perdure.training.recovery.stages import State
from perdure.training.recovery.stimuli import StepRecorded, Stimulus

HISTORY_FILE = "coordinator-events.jsonl"
OLDER_HISTORY_FILE = "coordinator-events.older.jsonl"
MIN_STIMULI = 2_000
STIMULI_PER_RANK = 8  # a recovery takes about five of each

_log = logging.getLogger("perdure.coordinator")


class HistoryWriter:
    """Writes down what an attempt handles; where that is not possible the attempt goes on without.

    Args:
        folder: of the attempt.
        attempt: that handles the stimuli.
        secrets: values that are masked wherever they are.
    """

    def __init__(self, folder: Path, attempt: Attempt, secrets: Collection[str] = ()) -> None:
        self._folder = folder
        self._attempt = attempt
        self._mask = make_mask(secrets)
        self._version = package_version("perdure")
        self._limit = max(MIN_STIMULI, STIMULI_PER_RANK * attempt.memory.world_size)
        self._number = 0
        self._num_lines = 0
        self._file: TextIO | None = None
        self._is_broken = False
        self._step_line = ""

    def handle(self, stimulus: Stimulus, *, now_s: float) -> Sequence[Action]:
        """Have the attempt handle a stimulus, and write both down."""
        self._keep(self._begin_file)
        state, self._number = self._attempt.memory.state, self._number + 1
        try:
            actions = self._attempt.handle(stimulus, now_s=now_s)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self._keep(lambda: self._write(stimulus, state, (), now_s=now_s, error=text))
            raise
        self._keep(lambda: self._write(stimulus, state, actions, now_s=now_s))
        return actions

    def _keep(self, write: Callable[[], None]) -> None:
        """Write; an error ends the history alone, never the actions of a recovery."""
        try:
            write()
        except Exception as error:  # noqa: BLE001 whatever it is, the attempt goes on
            _log.warning(f"{self._folder / HISTORY_FILE} is written no further: {error}")
            self._file, self._is_broken = None, True

    def _write(
        self,
        stimulus: Stimulus,
        state: State,
        actions: Sequence[Action],
        *,
        now_s: float,
        error: str = "",
    ) -> None:
        if self._file is None:
            return
        handled = HandledStimulus(
            self._number,
            now_s,
            state,
            stimulus,
            self._attempt.memory.state,
            action_notes(actions),
            error,
        )
        line = handled_line(handled, mask=self._mask)
        if isinstance(stimulus, StepRecorded) and not error:
            # The step after it makes it superfluous: a run of weeks records millions of them.
            self._step_line = line
            return
        self._append(self._step_line + line)
        self._step_line = ""
        self._num_lines += 1

    def _begin_file(self) -> None:
        """Open the first file, or the next one when this one is long enough."""
        if self._is_broken or (self._file is not None and self._num_lines < self._limit):
            return
        path = self._folder / HISTORY_FILE
        if self._file is not None:
            self._append(self._step_line)
            self._file.close()
            path.replace(self._folder / OLDER_HISTORY_FILE)
        path.touch(mode=0o600)
        self._file = path.open("w", encoding="utf-8", errors="backslashreplace")
        self._num_lines, self._step_line = 0, ""
        attempt, number = self._attempt, self._number + 1
        self._append(snapshot_line(attempt, number=number, version=self._version, mask=self._mask))

    def _append(self, text: str) -> None:
        if self._file is not None:
            self._file.write(text)
            self._file.flush()
