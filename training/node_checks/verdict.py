"""The verdict on failed checks: against single nodes, or against the things that all nodes share.

A check that fails on some nodes counts against them. A check that fails on every node counts
against a thing that they share: the store, the job, the image. Pure.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perdure.training.node_checks.versions import NAME as VERSIONS
from perdure.training.wire.node import Check, CheckOutcome

# Checks of the gang; named here, for this module must not load torch.
JOIN = "join"
ALL_REDUCE = "all_reduce"
TLS = "device_tls"
_SLOW_SHARE = 0.5  # a device that computes less than this share of the median is slow
_SPEED = "gflop_s"
_SHARED = frozenset({"store", "store_disk", "secrets"})


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    """The conclusion from all checks of a placement.

    Attributes:
        checks: all checks, with warnings that only a comparison of nodes shows.
        refused: reasons by the names of nodes that must not be used.
        common: failures that are no single node's fault.
    """

    checks: tuple[Check, ...]
    refused: Mapping[str, str]
    common: tuple[str, ...]

    @property
    def is_passed(self) -> bool:
        """Whether every node of the placement may be used."""
        return not self.refused


def verdict_of(checks: Sequence[Check]) -> CheckVerdict:
    """Draw one verdict from the checks of all nodes of a placement."""
    compared = tuple(_compare_nodes(checks))
    refused: dict[str, str] = {}
    common: list[str] = []
    for name in dict.fromkeys(check.name for check in compared):
        completed = [
            c for c in compared if c.name == name and c.outcome is not CheckOutcome.SKIPPED
        ]
        failed = [c for c in completed if c.outcome is CheckOutcome.FAILED]
        if not failed:
            continue
        if _is_common(name, failed, completed):
            common.append(f"{name}: {failed[0].seen}")
            continue
        for check in failed:
            if check.node is not None:
                refused.setdefault(check.node, f"{name}: {check.seen}")
    return CheckVerdict(compared, refused, tuple(common))


def _is_common(name: str, failed: Sequence[Check], completed: Sequence[Check]) -> bool:
    """Whether a failure is common: few nodes make many fail in a collective, not elsewhere."""
    if any(check.node is None for check in failed):
        return True
    if name == JOIN:
        return 2 * len(failed) > len(completed)  # the node that they do not reach is not among them
    if name == ALL_REDUCE:
        return 2 * len(failed) >= len(completed)
    # The check of a single node cannot tell it from the things that all nodes share.
    return len(failed) == len(completed) and (len(completed) > 1 or name in _SHARED)


def _compare_nodes(checks: Sequence[Check]) -> Sequence[Check]:
    """Compare nodes with the others.

    Versions that differ from most nodes' and devices that are slow beside others are warnings. TLS
    that differs is a failure: HCCL connects no device with TLS to one without. It is that of the
    nodes that differ from most, and of all where there is no majority.
    """
    checks = _compare_tls(checks)
    versions = [c.seen for c in checks if c.name == VERSIONS]
    usual = statistics.mode(versions) if versions else ""
    speeds = [c.figures[_SPEED] for c in checks if _SPEED in c.figures]
    median = statistics.median(speeds) if len(speeds) > 2 else 0.0
    return [_add_warning(check, usual=usual, median=median) for check in checks]


def _compare_tls(checks: Sequence[Check]) -> Sequence[Check]:
    counts = Counter(c.seen for c in checks if c.name == TLS and c.outcome is CheckOutcome.OK)
    if len(counts) < 2:
        return checks
    (usual, most), (_, next_most) = counts.most_common(2)
    if most == next_most:
        words = ", ".join(f"{text} on {count} nodes" for text, count in sorted(counts.items()))
        return [_fail(c, words) if c.name == TLS and c.seen in counts else c for c in checks]
    return [
        _fail(c, f"{c.seen}; most nodes have {usual}")
        if c.name == TLS and c.seen in counts and c.seen != usual
        else c
        for c in checks
    ]


def _fail(check: Check, text: str) -> Check:
    return check.model_copy(update={"outcome": CheckOutcome.FAILED, "seen": text})


def _add_warning(check: Check, *, usual: str, median: float) -> Check:
    text = ""
    if check.name == VERSIONS and check.seen != usual:
        text = f"{check.seen}; most nodes have {usual}"
    elif check.figures.get(_SPEED, median) < _SLOW_SHARE * median:
        text = f"{check.seen}; the median node reaches {median:.1f} GFLOP/s"
    if not text or check.outcome is not CheckOutcome.OK:
        return check
    return check.model_copy(update={"outcome": CheckOutcome.WARNING, "seen": text})
