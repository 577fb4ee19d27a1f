"""Waiting for pods until their agents listen, or until it is sure that they never will.

Times are seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial

from perdure.training.engines.kubernetes import pods
from perdure.training.engines.kubernetes.objects import Document
from perdure.training.engines.kubernetes.pods import Refusal
from perdure.training.engines.kubernetes.watching import Watched
from perdure.training.errors import EngineError, NoCapacity

_log = logging.getLogger("perdure.engine")


def await_up(
    watched: Watched,
    names: Sequence[str],
    *,
    limit_s: float,
    wait_s: float | None,
    left_out: Mapping[str, str],
) -> None:
    """Wait until all agents listen.

    Args:
        watched: the pods of the run.
        names: of those that are awaited.
        limit_s: for all of it.
        wait_s: for room, where it is less than for all else.
        left_out: nodes that they may not be on, and why; told where there is no room.

    Raises:
        NoCapacity: there was no room for all of them in time.
        EngineError: they cannot start, or did not in time.
    """
    began_s = time.monotonic()
    deadline_s = began_s + limit_s
    told: frozenset[str] = frozenset()
    while waiting := _not_up(_listed(watched, names), names):
        is_late = time.monotonic() > deadline_s
        if wait_s is not None and time.monotonic() > began_s + wait_s:
            is_late = is_late or any(why.is_room for why in waiting)
        if any(why.is_final for why in waiting) or is_late:
            waited_s = time.monotonic() - began_s
            raise _not_placed(waiting, len(names), waited_s, left_out)
        texts = frozenset(why.text for why in waiting)
        for text in sorted(texts - told) if told else ():  # at first nothing has a node yet
            _log.info("waiting: %s", text)
        told |= texts
        watched.wait(partial(_any_is_settled, names), timeout_s=1.0)


def _listed(watched: Watched, names: Sequence[str]) -> Mapping[str, Document]:
    """The pods of the run, asked for now where one of these is missing.

    They have been created: one that is missing then is gone, although nobody has seen it.
    """
    if any(name not in watched.objects for name in names):
        watched.refresh()
    return watched.objects


def _not_up(found: Mapping[str, Document], names: Sequence[str]) -> list[Refusal]:
    pods_of = [(name, found.get(name)) for name in names]
    return [
        Refusal(f"{name} was taken away", is_room=True, is_final=True)
        if pod is None or pods.is_leaving(pod)
        else pods.why_not_up(pod)
        for name, pod in pods_of
        if pod is None or pods.is_leaving(pod) or not pods.is_up(pod)
    ]


def _any_is_settled(names: Sequence[str], now: Mapping[str, Document]) -> bool:
    """Whether there is something new to say of pods that are awaited."""
    found = [now[name] for name in names if name in now]
    is_all_up = len(found) == len(names) and all(pods.is_up(pod) for pod in found)
    return is_all_up or any(pods.is_over(pod) for pod in found)


def _not_placed(
    waiting: Sequence[Refusal], wanted: int, limit_s: float, left_out: Mapping[str, str]
) -> EngineError:
    final = [why for why in waiting if why.is_final]
    reason = "; ".join(dict.fromkeys(why.text for why in final or waiting))
    text = f"{wanted - len(waiting)} of {wanted} pods were up"
    text += f": {reason}" if final else f" within {limit_s:g} s: {reason}"
    is_room = any(why.is_room for why in (final or waiting))
    if is_room and left_out:
        left = "; ".join(f"{node}: {why}" for node, why in left_out.items())
        text += f"; left out for what MindCluster reports (engine.mindcluster): {left}"
    return NoCapacity(text) if is_room else EngineError(text)
