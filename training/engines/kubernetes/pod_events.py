"""The cluster's events about pods that are being lost. Times are seconds of CLOCK_MONOTONIC."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from perdure.training.engines.kubernetes.api import EVENTS, Api, ApiError
from perdure.training.engines.kubernetes.objects import Document
from perdure.training.engines.kubernetes.pods import explain_loss

EVENTS_APART_S = 0.5  # between two lists of the events about a pod

_log = logging.getLogger("perdure.engine")


@dataclass(slots=True)
class PodEvents:
    """Events by pod, as they were read last.

    Attributes:
        api: their cluster.
    """

    api: Api
    _by_pod: dict[str, tuple[float, Sequence[Document]]] = field(default_factory=dict)

    def about(self, pod: str) -> Sequence[Document]:
        """Read the events about a pod, oldest first, where the run has the right to.

        The event with the reason of a deletion may be written a moment later.
        """
        asked_s, events = self._by_pod.get(pod, (0.0, ()))
        now_s = time.monotonic()
        if explain_loss(events) or now_s < asked_s + EVENTS_APART_S:
            return events
        fields = f"involvedObject.kind=Pod,involvedObject.name={pod}"
        try:
            items, _ = self.api.list(EVENTS, fields=fields, patience_s=0.0)
        except ApiError as error:
            _log.info("events do not show why pod %s is lost: %s", pod, error)
        else:
            events = sorted(items, key=lambda event: str(event.get("lastTimestamp")))
        self._by_pod[pod] = (now_s, events)
        return events
