"""Errors raised inside a worker.

WorkerError
  + NumericAnomaly    the loss is not a number
  + NotApplied        a step was left without step.apply()
  + RecipeEndedEarly  the program returned before the target step
  + Interrupted       a newer generation of the process groups is announced
  + GivenUp           the attempt is not saved inside its processes
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


class Interrupted(WorkerError):  # noqa: N818 a state of affairs, named as it is shown
    """A newer generation of the process groups is announced."""


class GivenUp(WorkerError):  # noqa: N818 a state of affairs, named as it is shown
    """The coordinator has given the attempt up."""
