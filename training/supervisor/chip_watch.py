"""The watcher for fault codes that chips report while their processes live.

The agents sample the driver's tools, the engine knows the platform's reports. A code that asks to
act is a fault at once, before a collective waits half an hour for the chip: the coordinator of a
session asks the ladder, and may replace the process or the node; a command ends, and the ladder is
asked about the end of its attempt. Times are seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from perdure.training.config.watch import ChipEventAction
from perdure.training.diagnosis.chip_reports import fault_of_report
from perdure.training.errors import AgentUnreachable, EngineError
from perdure.training.journal.history import RunHistory
from perdure.training.recovery.chip_events import (
    CLEAR_S,
    ChipEvent,
    ChipEvents,
    ChipKey,
    ChipReport,
    NodeReports,
    chip_key,
)
from perdure.training.recovery.faults import Fault
from perdure.training.recovery.protocol import ChipReported
from perdure.training.supervisor.placing import Placer
from perdure.training.supervisor.starting import AttemptStarter
from perdure.training.supervisor.watch import Progress, WatchResult
from perdure.training.telemetry.mounted_files import RESET_FILE
from perdure.training.wire.agent import NoticeOrder
from perdure.training.wire.agent_status import AgentStatus

_log = logging.getLogger("perdure.supervisor")

ANSWER_S = 5.0  # for the coordinator's decision to be seen
MISSED_SAMPLES = 3  # without a code, after which it counts as gone
NO_ROOM = "no other node is free"


@dataclass(slots=True)
class ChipWatch:
    """The watcher for the chips of one attempt.

    Attributes:
        starter: of the attempt.
        placer: knows whether another node is free.
    """

    starter: AttemptStarter
    placer: Placer
    _events: ChipEvents = field(init=False)
    _platform: PlatformReports = field(init=False)
    _unanswered: list[Fault] = field(default_factory=list)
    _sent_s: float = float("-inf")

    def __post_init__(self) -> None:
        """Know the codes that earlier attempts have answered."""
        every_s = self.starter.job.watch.sample_every_s
        self._platform = PlatformReports(self.starter, every_s)
        self._events = ChipEvents(
            answered=frozenset(_answered_before(self.starter.writer.history)),
            clear_s=max(CLEAR_S, MISSED_SAMPLES * every_s),
        )

    def check(self, progress: Progress) -> WatchResult | None:
        """Have new codes answered: by the coordinator, or by the end of a command's attempt."""
        answered = self._answered(progress)
        statuses = progress.snapshot.agents.values()
        progress.platform_reports = self._platform.newest()
        nodes = node_reports(statuses, progress.platform_reports)
        slots = self.starter.job.engine.slots_per_node
        faults = [
            self._fault_of(event, progress)
            for event in self._events.update(nodes, answered, now_s=progress.at_s)
            if event.report.device < slots  # where it is not known which chips are the pod's
        ]
        progress.chips = (*progress.chips, *faults)
        if self.starter.job.watch.chip_events is ChipEventAction.REPORT:
            return None
        for fault in faults:
            _log.warning("%s: %s, and its process has not failed yet", fault.node, fault.evidence)
        self._unanswered = [
            fault
            for fault in (*self._unanswered, *faults)
            if not any(_answers(other, fault) for other in answered)
        ]
        # The chip of a node that misses a poll is still to be answered.
        due = [fault for fault in self._unanswered if fault.node in nodes]
        if not due or progress.has_given_up:
            return None
        if self.starter.job.worker.is_command:
            return WatchResult(culprit=due[0])
        if not progress.open_recoveries and time.monotonic() - self._sent_s > ANSWER_S:
            self._send(due[0])
        return None

    def _answered(self, progress: Progress) -> Sequence[Fault]:
        """List the faults that were answered in this attempt."""
        view = self.starter.writer.now(self.starter.view)
        began = [*(span.began for span in view.recoveries), *progress.open_recoveries]
        return [recovery.fault for recovery in began]

    def _fault_of(self, event: ChipEvent, progress: Progress) -> Fault:
        step = progress.last.step if progress.last is not None else None
        fault = fault_of_report(event.report, at_s=event.since_s, step=step)
        return replace(fault, rank=_rank_on(event.report, progress.snapshot.agents.values()))

    def _send(self, fault: Fault) -> None:
        """Report a fault to the coordinator, again while it is starting or busy."""
        self._sent_s = time.monotonic()
        placement, attempt = self.starter.view.key
        why_not = None if self.placer.has_room(is_sure=False) else NO_ROOM
        message = ChipReported(fault=fault, no_other_node=why_not)
        order = NoticeOrder(placement=placement, attempt=attempt, message=message)
        try:
            self.starter.fleet.notice(order)
        except (EngineError, AgentUnreachable) as error:
            _log.warning("no report of %s reaches the coordinator: %s", fault.node, error)


@dataclass(slots=True)
class PlatformReports:
    """The platform's reports of chips, read in a thread: its server may be away.

    Attributes:
        starter: of the attempt; earlier reports are left out.
        every_s: time between two reads.
    """

    starter: AttemptStarter
    every_s: float
    _newest: Sequence[ChipReport] = ()
    _reading: Future[Sequence[ChipReport]] | None = None
    _began_s: float = float("-inf")
    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "perdure-platform")
    )

    def newest(self) -> Sequence[ChipReport]:
        """Return the newest reports, and begin to read further ones when it is time."""
        if self._reading is not None and self._reading.done():
            try:
                self._newest = self._reading.result()
            except EngineError as error:
                _log.warning("the platform's reports of chips are not known: %s", error)
            self._reading = None
        if self._reading is None and time.monotonic() - self._began_s >= self.every_s:
            self._began_s = time.monotonic()
            since_s = self.starter.view.started.at_s
            self._reading = self._pool.submit(self.starter.fleet.chip_reports, since_s)
        return self._newest


def _answers(other: Fault, fault: Fault) -> bool:
    """Whether an answered fault is that of the chip, or a later one of it."""
    is_same_place = (other.node, other.device) == (fault.node, fault.device)
    return is_same_place and other.at_s >= fault.at_s


def node_reports(
    statuses: Iterable[AgentStatus], platform: Sequence[ChipReport]
) -> dict[str, NodeReports]:
    """List what drivers and platform report about the chips of the nodes with a sample."""
    nodes: dict[str, NodeReports] = {}
    for status in statuses:
        sample = status.sample
        if sample is None:
            continue
        reports = [
            ChipReport(status.node, device.index, code)
            for device in sample.devices
            for code in device.error_codes
        ]
        reports += [
            ChipReport(status.node, device.index, code.code, code.level, reporter=RESET_FILE.name)
            for device in sample.devices
            for code in device.platform_codes
        ]
        # The platform's own level of a code counts, where it has one.
        further = [report for report in platform if report.node == status.node]
        nodes[status.node] = NodeReports(
            sample.at_s, (*further, *reports), is_complete=sample.is_complete
        )
    return nodes


def _rank_on(report: ChipReport, statuses: Iterable[AgentStatus]) -> int | None:
    """Return the rank that computes on the chip, where its node knows it."""
    for status in statuses:
        if status.node != report.node:
            continue
        ranks = status.ranks if status.is_launcher else status.workers
        return next((rank.rank for rank in ranks if rank.local_rank == report.device), None)
    return None


def _answered_before(history: RunHistory) -> Iterator[ChipKey]:
    """List the codes of chips that earlier attempts have answered."""
    for view in history.attempts[history.budgets_from :]:
        faults = [recovery.began.fault for recovery in view.recoveries]
        if view.fault is not None:
            faults.append(view.fault)
        yield from (chip_key(fault) for fault in faults if fault.chip_code is not None)
