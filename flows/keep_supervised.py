"""The keep-supervised flow: each minute, runs that nobody supervises are found and taken up."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from perdure.tasks.entry import finish_with
from perdure.tasks.keep_supervised import (
    QUIET,
    Unseen,
    apply,
    end_stuck,
    forget_quiet,
    limits,
    look,
)
from perdure.tasks.states import data_of
from perdure.tasks.ticks import newer_tick
from perdure.tasks.unsupervised import Remedy


@flow(name="keep-supervised", persist_result=False)
def keep_supervised() -> State[Any]:
    """Have every living attempt of this machine supervised, whatever its flow run shows."""
    newer = newer_tick()
    if newer is not None:
        return Completed(name=QUIET, message=newer)
    end_stuck(datetime.now(UTC))
    forget_quiet(datetime.now(UTC))
    done, failed, waiting = [], [], []
    for case in look():
        if isinstance(case, Unseen):
            failed.append(f"{case.name}: {case.why}")
        elif case.remedy is Remedy.NOTHING:
            waiting.append(case.name)
        else:
            state = apply(case, return_state=True)
            if state.is_completed():
                done.append(data_of(state))
            else:
                failed.append(f"{case.name}: {state.message}")
    if failed:
        return finish_with(Failed(message="; ".join([*failed, *done])))
    if done:
        return Completed(message="; ".join(done))
    names = ", ".join(waiting)
    text = f"not supervised, and left alone: {names}" if names else "every run is supervised"
    if waiting:
        text = "; ".join([text, *limits()])
    return Completed(name=QUIET, message=text)
