"""Everything of Perdure that lives without Prefect.

`training.join()` is the door for training programs. It is imported on first use, so that a
command line that only reads a job does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from training.recovery.replicas import ParallelLayout
    from training.runtime.session import Session

__all__ = ["join"]


def join(*, layout: ParallelLayout | None = None) -> Session:
    """Take this process's place in its run; see `training.runtime.session`."""
    from training.runtime.session import join as join_session  # noqa: PLC0415 loads torch

    return join_session(layout=layout)
