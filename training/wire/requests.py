"""Requests of a user to a run that goes on: a small object in its store.

The coordinator of an attempt reads it every other second, so a request reaches the ranks without
any supervisor. It holds over attempts and supervisors until it is withdrawn, at the latest when
the run ends. Of two requests the later one counts. Times are seconds since the epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pydantic import ValidationError

from perdure.storage.errors import Corrupt, NotFound
from perdure.storage.frozen_model import FrozenModel
from perdure.storage.objects import ObjectStore


class Control(FrozenModel):
    """A request.

    Attributes:
        pause: whether all ranks are to pause at a step boundary.
        cancel: whether the run is to end; its supervisor looks for it.
        at_s: time of the request, 0: there was none.
    """

    pause: bool = False
    cancel: bool = False
    at_s: float = 0.0


def read_control(store: ObjectStore, run_id: str) -> Control:
    """Read the present request to the run.

    Raises:
        Corrupt: the object is no request.
        StorageError: the store does not answer.
    """
    key = control_key(run_id)
    try:
        return Control.model_validate_json(store.get(key))
    except NotFound:
        return Control()
    except ValidationError as error:
        raise Corrupt(f"{key} is not what controls a run") from error


def is_pause_wanted(store: ObjectStore, run_id: str) -> bool:
    """Whether the run is to pause; what cannot be read counts as no request.

    Raises:
        StorageError: the store does not answer.
    """
    return _sound_control(store, run_id).pause


def is_cancel_wanted(store: ObjectStore, run_id: str) -> bool:
    """Whether the run is to end; what cannot be read counts as no request.

    Raises:
        StorageError: the store does not answer.
    """
    return _sound_control(store, run_id).cancel


def _sound_control(store: ObjectStore, run_id: str) -> Control:
    try:
        return read_control(store, run_id)
    except Corrupt:
        return Control()


def request_cancel(
    store: ObjectStore, run_id: str, *, clock: Callable[[], float] = time.time
) -> None:
    """Request the end of the run.

    Raises:
        StorageError: the store does not answer.
    """
    control = Control(cancel=True, at_s=clock())
    store.put(control_key(run_id), control.model_dump_json().encode())


def write_control(
    store: ObjectStore, run_id: str, *, pause: bool, clock: Callable[[], float] = time.time
) -> Control:
    """Request something else of the run.

    Raises:
        StorageError: the store does not answer.
    """
    control = Control(pause=pause, at_s=clock())
    store.put(control_key(run_id), control.model_dump_json().encode())
    return control


def clear_requests(store: ObjectStore, run_id: str) -> None:
    """Withdraw the request.

    Raises:
        StorageError: the store does not answer.
    """
    try:
        control = read_control(store, run_id)
        is_wanted = control.pause or control.cancel
    except Corrupt:
        is_wanted = True  # a sound request replaces it
    if is_wanted:
        write_control(store, run_id, pause=False)


def control_key(run_id: str) -> str:
    """Return the key of the request in the store."""
    return f"runs/{run_id}/control.json"
