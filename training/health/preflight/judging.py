"""Whose fault a failed check is: a node's, or everybody's.

A check that fails on some nodes speaks against them. One that fails wherever it was made speaks
against what they share: the store, the job, the image. Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from training.health.preflight.names import ALL_REDUCE, JOIN
from training.health.preflight.versions import NAME as VERSIONS
from training.wire.check import Check, Outcome

SLOW_SHARE = 0.5  # a device that computes less than this share of the median is told
SPEED = "gflop_s"
OF_STORE = frozenset({"store", "store_disk"})


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the checks of a placement come to.

    Attributes:
        checks: all of them, with warnings that only a comparison of nodes shows.
        refused: why, by the name of a node that must not be used.
        common: what is wrong and no single node's fault.
    """

    checks: tuple[Check, ...]
    refused: Mapping[str, str]
    common: tuple[str, ...]


def judge(checks: Sequence[Check]) -> Judgement:
    """InProcessDecider the checks of all nodes of a placement."""
    told = tuple(_compared(checks))
    refused: dict[str, str] = {}
    common: list[str] = []
    for name in dict.fromkeys(check.name for check in told):
        made = [c for c in told if c.name == name and c.outcome is not Outcome.SKIPPED]
        failed = [c for c in made if c.outcome is Outcome.FAILED]
        if not failed:
            continue
        if _is_common(name, failed, made):
            common.append(f"{name}: {failed[0].seen}")
            continue
        for check in failed:
            if check.node is not None:
                refused.setdefault(check.node, f"{name}: {check.seen}")
    return Judgement(told, refused, tuple(common))


def _is_common(name: str, failed: Sequence[Check], made: Sequence[Check]) -> bool:
    """In a collective the many suffer from the few; elsewhere everybody speaks for itself."""
    if any(check.node is None for check in failed):
        return True
    if name == JOIN:
        return 2 * len(failed) > len(made)  # the one they do not reach is not among them
    if name == ALL_REDUCE:
        return 2 * len(failed) >= len(made)
    # One node alone may be checked: nothing tells it from the store, which all would blame.
    return len(failed) == len(made) and (len(made) > 1 or name in OF_STORE)


def _compared(checks: Sequence[Check]) -> Sequence[Check]:
    """Warn of versions that differ from most nodes', and of devices that are slow beside others."""
    versions = [c.seen for c in checks if c.name == VERSIONS]
    usual = statistics.mode(versions) if versions else ""
    speeds = [c.figures[SPEED] for c in checks if SPEED in c.figures]
    median = statistics.median(speeds) if len(speeds) > 2 else 0.0
    return [_with_warning(check, usual=usual, median=median) for check in checks]


def _with_warning(check: Check, *, usual: str, median: float) -> Check:
    said = ""
    if check.name == VERSIONS and check.seen != usual:
        said = f"{check.seen}; most nodes have {usual}"
    elif check.figures.get(SPEED, median) < SLOW_SHARE * median:
        said = f"{check.seen}; the median node reaches {median:.1f} GFLOP/s"
    if not said or check.outcome is not Outcome.OK:
        return check
    return check.model_copy(update={"outcome": Outcome.WARNING, "seen": said})
