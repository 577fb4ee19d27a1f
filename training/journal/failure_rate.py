"""How often a run fails, measured: what the job expects, corrected by what has happened. Pure."""

from __future__ import annotations

from training.journal.history import RunHistory


def measured_mtbf_s(expected_s: float, history: RunHistory) -> float:
    """Mean seconds between failures that cost steps.

    The expectation counts like one failure that has been seen after that time (the mean of a
    gamma prior of shape 1), so one early fault does not have a run save all the time, and after
    many the expectation does not matter.

    Args:
        expected_s: of the job.
        history: of the run.
    """
    ended = [view.ended for view in history.attempts if view.ended is not None]
    lived_s = sum(end.duration_s for end in ended)
    failures = sum(end.outcome == "failed" for end in ended)
    return (expected_s + lived_s) / (1 + failures)
