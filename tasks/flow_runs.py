"""Which flow runs of a server are those of a run: those that its ledger names.

A name is not enough. Machines that share a server have stores of their own and count `{n}` each
for itself, so two runs of one name may train at once.
"""

from __future__ import annotations

from uuid import UUID

from perdure.training.journal.history import RunHistory


def flow_runs_of(history: RunHistory, own: UUID | None = None) -> list[UUID]:
    """The flow runs that have supervised a run, the newest last.

    Args:
        history: of the run.
        own: the flow run that asks; it is one of them before the ledger says so.
    """
    named = list(map(UUID, history.flow_runs))
    return named if own is None or own in named else [*named, own]
