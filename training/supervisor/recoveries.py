"""Recoveries inside the processes, seen from outside: for the next attempt, and for onlookers.

Times are seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterable

from training.engines.base import Engine, Placement
from training.errors import AgentUnreachable, EngineError
from training.policy.history import AttemptView, record_of
from training.policy.ladder import Recovery
from training.policy.mending import Pause, pauses_in
from training.policy.notes import AnyNote, PastRecovery
from training.runtime.metrics import parse_live

# Rows without progress are short, and a window of a day holds no more of one code that matter.
NUM_PAST = 50


def past_recoveries(recoveries: Iterable[Recovery]) -> list[PastRecovery]:
    """The newest recoveries as a start order carries them, oldest first."""
    return [
        PastRecovery(
            fault=record_of(one.fault),
            rung=one.rung,
            progressed=one.progressed,
            failed=one.failed,
        )
        for one in list(recoveries)[-NUM_PAST:]
    ]


class Onlooker:
    """Reads the live file of an attempt that somebody else supervises, or nobody.

    Args:
        engine: of the run; it is asked, and told nothing.
        placement: that the attempt stands on.
    """

    def __init__(self, engine: Engine, placement: Placement) -> None:
        self._engine = engine
        self._placement = placement
        self._notes: list[AnyNote] = []
        self._offset = 0

    def pause(self, view: AttemptView) -> Pause | None:
        """The pause that the attempt is in by now.

        Args:
            view: the attempt as it is on record; its live file may be out of reach.
        """
        self._read_on()
        pauses = pauses_in((*view.notes, *self._notes))
        return pauses[-1] if pauses and pauses[-1].ended is None else None

    def _read_on(self) -> None:
        try:
            if not self._engine.adopt(self._placement):
                return
            while True:
                text, offset = self._engine.metrics(self._offset)
                self._notes += parse_live(text).notes
                if offset == self._offset:
                    return
                self._offset = offset
        except (EngineError, AgentUnreachable):
            return  # its containers are just going away
