"""Events of chips in one attempt: which reports of a driver or platform are new and ask to act.

A chip reports a code for as long as it has the fault, so the same code is there at every poll,
often from two reporters, and may flicker. It is one event until it has been gone for a while.
`ACTS_AT_ONCE` (chips.py) has the levels that end the processes on the chip; other codes are alerts
alone. A code that an earlier attempt answered, and that is still there when the next one begins,
was left there by healing or by the policy: it is no new event. Neither is a code that came with a
fault which the processes have reported themselves. Pure; times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from perdure.training.recovery.chips import ACTS_AT_ONCE, ChipLevel, chip_fact
from perdure.training.recovery.faults import Fault

CLEAR_S = 30.0  # as for alerts: a reading that wavers must stay inside its limits a while
STALL_WINDOW_S = 60.0  # the step in which ranks have stalled began so long before, at most
CLOCKS_S = 1.0  # apart, of a node and its supervisor

ChipKey = tuple[str | None, int | None, str | None]


@dataclass(frozen=True, slots=True)
class ChipReport:
    """A code that a chip reports at one moment.

    Attributes:
        device: local index, as workers count them.
        level: as its reporter has it; None: as the tables have it.
        reporter: "npu-smi" or the name of a platform.
    """

    node: str
    device: int
    code: str
    level: ChipLevel | None = None
    reporter: str = "npu-smi"

    @property
    def key(self) -> ChipKey:
        """Node, device and code."""
        return self.node, self.device, self.code

    @property
    def acts_at_once(self) -> bool:
        """Whether the processes on the chip end for it; a code without a level is an alert."""
        fact = chip_fact(self.code)
        level = self.level or (fact.level if fact is not None else None)
        return level is not None and ACTS_AT_ONCE[level]


@dataclass(frozen=True, slots=True)
class NodeReports:
    """The reports about the chips of a node.

    Attributes:
        at_s: when the node was sampled.
        is_complete: False where a tool gave no answer: a code that is missing may still be there.
    """

    at_s: float
    reports: Sequence[ChipReport] = ()
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class ChipEvent:
    """A code that asks to act, from its first report on."""

    report: ChipReport
    since_s: float


@dataclass(slots=True)
class ChipEvents:
    """The events of an attempt so far.

    Attributes:
        answered: codes that earlier attempts of the run answered.
        clear_s: a code that complete samples have not shown for longer is a new event.
    """

    answered: Collection[ChipKey] = ()
    clear_s: float = CLEAR_S
    _gone_s: dict[ChipKey, float | None] = field(default_factory=dict)
    _sampled_s: dict[str, tuple[float | None, float]] = field(default_factory=dict)

    def update(
        self, nodes: Mapping[str, NodeReports], faults: Sequence[Fault], *, now_s: float
    ) -> list[ChipEvent]:
        """Take the newest reports, and return the events that are new and ask to act.

        Args:
            nodes: those with a sample, by name.
            faults: of this attempt that are answered already.
            now_s: the moment.
        """
        return [
            ChipEvent(report, now_s)
            for node, sample in nodes.items()
            for report in self._new_of(node, sample, faults, now_s)
        ]

    def _new_of(
        self, node: str, sample: NodeReports, faults: Sequence[Fault], now_s: float
    ) -> Iterator[ChipReport]:
        previous_s, newest_s = self._sampled_s.get(node, (None, sample.at_s))
        if sample.at_s > newest_s:
            previous_s = newest_s
        if sample.is_complete:
            self._sampled_s[node] = previous_s, sample.at_s
            self._note_absences(node, sample)
        for report in sample.reports:
            is_old = report.key in self._gone_s and not self._is_gone(report.key, now_s)
            self._gone_s[report.key] = None
            is_left = previous_s is None and report.key in self.answered
            is_known = is_old or is_left or _is_covered(report, faults, previous_s)
            if report.acts_at_once and not is_known:
                yield report

    def _note_absences(self, node: str, sample: NodeReports) -> None:
        """Note since when the codes that the node has shown are missing."""
        present = {report.key for report in sample.reports}
        for key, gone_s in self._gone_s.items():
            if key[0] == node and key not in present and gone_s is None:
                self._gone_s[key] = sample.at_s

    def _is_gone(self, key: ChipKey, now_s: float) -> bool:
        gone_s = self._gone_s[key]
        return gone_s is not None and now_s - gone_s > self.clear_s


def _is_covered(report: ChipReport, faults: Iterable[Fault], since_s: float | None) -> bool:
    """Whether the fault came with one of the same chip that was answered since the last sample."""
    return since_s is not None and any(
        (fault.node, fault.device) == (report.node, report.device)
        and fault.at_s >= since_s - CLOCKS_S
        for fault in faults
    )


def chip_key(fault: Fault) -> ChipKey:
    """What a fault of a chip is about."""
    return fault.node, fault.device, fault.code
