"""TensorBoard's event files, for those who look at runs with it: optional, and never a fault.

One folder per run. A later attempt goes on in it; what was told of steps that are done again is
void, as TensorBoard understands `purge_step`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from training.journal.events import StepRecord

_log = logging.getLogger("perdure.runtime")

FLUSH_S = 10
SCALARS: Sequence[tuple[str, Callable[[StepRecord], float | None]]] = (
    ("loss", lambda record: record.loss),
    ("grad_norm", lambda record: record.grad_norm),
    ("learning_rate", lambda record: record.lr),
    ("tokens_per_second", lambda record: record.tokens_per_s),
    ("mfu", lambda record: record.mfu),
    ("step_time_s", lambda record: record.step_s),
)


class EventFiles:
    """Writes step records as scalars.

    Args:
        folder: of the run.
        open_writer: `torch.utils.tensorboard.SummaryWriter`.
    """

    def __init__(self, folder: Path, open_writer: Callable[..., Any]) -> None:
        self._folder = folder
        self._open_writer = open_writer
        self._writer: Any = None
        self._failed = False

    @classmethod
    def of(cls, folder: str | None, run_id: str) -> Self | None:
        """Event files below a folder; None where none are wanted, or nobody can write them."""
        if folder is None:
            return None
        try:
            module = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            _log.warning(
                f"watch.tensorboard={folder}: no event files, install perdure[tensorboard]: {error}"
            )
            return None
        return cls(Path(folder) / run_id, module.SummaryWriter)

    def step(self, record: StepRecord) -> None:
        """Record a completed step."""
        if self._failed:
            return
        try:
            if self._writer is None:
                self._writer = self._open_writer(
                    str(self._folder), purge_step=record.step, flush_secs=FLUSH_S
                )
            for name, read in SCALARS:
                value = read(record)
                if value is not None:
                    self._writer.add_scalar(name, value, record.step, walltime=record.at_s)
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Write what is left."""
        try:
            if self._writer is not None and not self._failed:
                self._writer.close()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._failed = True
        _log.warning(f"no more event files in {self._folder}: {error}")
