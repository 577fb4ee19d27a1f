"""Errors raised inside a worker.

WorkerError
  + NumericAnomaly    the loss is not a number
  + NotApplied        a step was left without step.apply()
  + RecipeEndedEarly  the program returned before the target step
"""

from __future__ import annotations

from training.errors import PerdureError


class WorkerError(PerdureError):
    """Root of the errors of a worker process."""


class NumericAnomaly(WorkerError):  # noqa: N818 a state of affairs, named as it is shown
    """The loss is nan or infinite."""


class NotApplied(WorkerError):  # noqa: N818 a state of affairs, named as it is shown
    """The body of `with step:` ended without step.apply()."""


class RecipeEndedEarly(WorkerError):  # noqa: N818 a state of affairs, named as it is shown
    """The recipe returned before the job's target step."""
