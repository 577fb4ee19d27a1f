"""The keep-supervised flow: each minute, runs that nobody supervises are found and taken up."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from tasks.keep_supervised import QUIET, apply, forget_quiet, look
from tasks.states import data_of
from tasks.unsupervised import Remedy


@flow(name="keep-supervised", persist_result=False)
def keep_supervised() -> State[Any]:
    """Have every living attempt of this machine supervised, whatever its flow run shows."""
    cases = look()
    due = [case for case in cases if case.remedy is not Remedy.NOTHING]
    done = [data_of(apply(case, return_state=True)) for case in due]
    forget_quiet(datetime.now(UTC))
    if done:
        return Completed(message="; ".join(done))
    waiting = ", ".join(case.name for case in cases)
    text = f"not supervised, and left alone: {waiting}" if waiting else "every run is supervised"
    return Completed(name=QUIET, message=text)
