"""Errors raised inside a worker.

WorkerError
  + NumericAnomaly    the loss is not a number
  + AbnormalStretch   too many batches in a row are abnormal
  + RanksDiffer       the program trains another model on each rank
  + SilentCorruption  values of a rank have changed that were equal to those of others
  + NotApplied        a step was left without step.apply()
  + RecipeEndedEarly  the program returned before the target step
  + Interrupted       a newer generation of the process groups is announced
  + GivenUp           the attempt is not saved inside its processes
"""

from __future__ import annotations

import sys

from perdure.training.errors import PerdureError


class WorkerError(PerdureError):
    """Root of the errors of a worker process."""


class NumericAnomaly(WorkerError):  # noqa: N818 a state of affairs, named as it is shown
    """The loss is nan or infinite."""


class AbnormalStretch(WorkerError):  # noqa: N818 a state of affairs, named as it is shown
    """As many batches in a row were skipped as the job allows."""


class RanksDiffer(WorkerError):  # noqa: N818 a state of affairs, named as it is shown
    """The ranks hold different weights or gradients where they should be equal."""


class SilentCorruption(WorkerError):  # noqa: N818 a state of affairs, named as it is shown
    """A rank does not hold any more what the others do.

    Attributes:
        culprits: ranks that differ from most; empty where it cannot be known who is right.
    """

    def __init__(self, text: str, *, culprits: tuple[int, ...]) -> None:
        super().__init__(text)
        self.culprits = culprits


class NotApplied(WorkerError):  # noqa: N818 a state of affairs, named as it is shown
    """The body of `with step:` ended without step.apply()."""


class RecipeEndedEarly(WorkerError):  # noqa: N818 a state of affairs, named as it is shown
    """The recipe returned before the job's target step."""


class Interrupted(WorkerError):  # noqa: N818 a state of affairs, named as it is shown
    """A newer generation of the process groups is announced."""


class GivenUp(WorkerError):  # noqa: N818 a state of affairs, named as it is shown
    """The coordinator has given the attempt up."""


GIVEN_UP = sys.maxsize  # as a generation: there will be none
