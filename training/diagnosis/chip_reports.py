"""Reports of chips as evidence: the fault that one shows, and the stall that one explains.

Times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from perdure.training.diagnosis.cause import Candidate, LogSource, build_fault
from perdure.training.diagnosis.evidence import Evidence
from perdure.training.diagnosis.plain_fault import build_plain_fault
from perdure.training.diagnosis.recognise import recognise
from perdure.training.recovery.blame import answer_of
from perdure.training.recovery.chip_events import STALL_WINDOW_S, ChipReport, chip_key
from perdure.training.recovery.chips import ChipAnswer
from perdure.training.recovery.faults import Fault, FaultClass


def fault_of_report(report: ChipReport, *, at_s: float, step: int | None) -> Fault:
    """Build the fault that a chip reports, by its code alone.

    Nothing is searched for, so that the answer does not wait for the compiler of the patterns.

    Args:
        report: of the chip.
        at_s: time of the report.
        step: newest step of the attempt.
    """
    level = f", level {report.level}" if report.level is not None else ""
    line = f"device {report.device}: fault_code: {report.code}{level}"
    finding = recognise(line, "", ())
    if finding is None:  # of no table: its reporter has given the level
        fault = build_plain_fault(FaultClass.UNKNOWN, Evidence(at_s, step), line)
    else:
        candidate = Candidate(LogSource(report.reporter, (finding,)), finding)
        fault = build_fault(candidate, at_s=at_s, step=step)
    evidence = f"{report.reporter} reports {line}"
    return replace(
        fault, evidence=evidence, node=report.node, device=report.device, code=report.code
    )


def reported_faults(evidence: Evidence) -> Iterator[Fault]:
    """List the faults of chips that the end of an attempt is blamed on."""
    if evidence.chip is not None:
        yield evidence.chip
    given_up = evidence.given_up
    if given_up is not None and chip_key(given_up.fault) in map(chip_key, evidence.chips):
        yield given_up.fault  # the driver's tool at the end knows neither its rank nor its time
    if evidence.silent:
        yield from (chip for chip in evidence.chips if _began_with_stall(chip, evidence))


def explains_stall(faults: Iterable[Fault], evidence: Evidence) -> bool:
    """Whether a chip has reported a fault since the ranks stalled: they wait for that chip.

    Training went on after a code that is older. A code that was not reported while the processes
    lived is new: the driver's tools are asked once more at the end.
    """
    old = {chip_key(chip) for chip in evidence.chips if not _began_with_stall(chip, evidence)}
    return bool(evidence.silent) and any(
        fault.fault_class is not FaultClass.HANG
        and fault.device is not None
        and answer_of(fault) not in (None, ChipAnswer.NOTHING)
        and chip_key(fault) not in old
        for fault in faults
    )


def _began_with_stall(chip: Fault, evidence: Evidence) -> bool:
    """Whether a chip reported a fault after the ranks had last made progress, or shortly before."""
    longest_s = max((silent.silent_s for silent in evidence.silent), default=0.0)
    return chip.at_s >= evidence.at_s - longest_s - STALL_WINDOW_S
