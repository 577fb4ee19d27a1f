"""Checks before a run starts: of the job, of every node, and of the gang of nodes.

The job is checked where it is submitted, nodes and gang where they are: an agent starts
`python -m training.health.preflight.node` on each. Nothing here decides which node is refused for
good; `judging` says whose fault a failed check is.
"""

from __future__ import annotations

from training.supervisor.job_checks import Note, check_job, recovery_notes

__all__ = ["Note", "check_job", "recovery_notes"]
