"""What an agent and a coordinator exchange in files of the attempt's folder."""

from __future__ import annotations

from pathlib import Path

from storage.model import FrozenModel
from training.recovery.decision import Recovery
from training.recovery.rungs import Rung

_METRICS_FILE = "metrics-address.json"


class MetricsAddress(FrozenModel):
    """Where the coordinator answers Prometheus."""

    url: str


def metrics_file(attempt_folder: Path) -> Path:
    """Where a coordinator writes its `MetricsAddress`, once it answers there."""
    return attempt_folder / _METRICS_FILE


class CoordinatorConfig(FrozenModel):
    """How to coordinate one attempt: a private file, for it has the token.

    Attributes:
        job: as JSON, without secrets.
        host: address to bind; loopback unless configured otherwise.
        store_port: port of the rendezvous store, 0: any free one.
        placement: of the attempt.
        attempt: number of the attempt in its placement.
        live_file: the attempt log.
        address_file: written once it listens.
        supported: rungs that the engine can do.
        past: recoveries of the run so far, oldest first.
    """

    job: str
    host: str
    store_port: int
    token: str
    placement: int
    attempt: int
    live_file: str
    address_file: str
    supported: tuple[Rung, ...]
    past: tuple[Recovery, ...] = ()
