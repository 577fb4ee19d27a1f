"""Healing in place: what is done about a chip before processes are started on it again.

ModelArts' in-place recovery heals faults of a chip where the job stands, and falls to isolation
and rescheduling when the fault is still there (its guide on fault tolerance). What a code asks for
is its level, MindCluster's. The table follows the hot reset of its device plugin: processes have
ended first; a fault that asks for new processes alone gets 15 s to go by itself, and a reset after
that; a chip gets 150 s to come back from one (faultCustomization.json, WaitFaultSelfHealingTime and
WaitDeviceResetTime). A code that separates its chip never gets here.

The node carries out one act after the other and asks `next_act` for each; nothing here looks at a
clock or a device. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar

from pydantic import ConfigDict

from perdure.training.recovery.blame import points_at_hardware
from perdure.training.recovery.chips import SEPARATED, ChipLevel, chip_fact
from perdure.training.recovery.faults import Fault

CHECK_LIMIT_S = 60.0  # of one check: the driver's tools, then the computation
RESET_COMMAND_LIMIT_S = 60.0


class Reset(StrEnum):
    """When a chip is reset."""

    NEVER = "never"
    IF_ILL = "if_ill"  # a check has shown that the fault is still there
    FIRST = "first"  # the level asks for it whatever a check would show


@dataclass(frozen=True, slots=True)
class Treatment:
    """What a level asks for.

    Attributes:
        reset: when.
        waits: whether the fault first gets time to go by itself.
    """

    reset: Reset
    waits: bool = False


# None: a code of no level, or a fault of hardware without a code.
TREATMENTS: Mapping[ChipLevel | None, Treatment] = {
    None: Treatment(Reset.NEVER, waits=True),
    ChipLevel.NOT_HANDLED: Treatment(Reset.NEVER, waits=True),
    ChipLevel.SUB_HEALTHY: Treatment(Reset.NEVER, waits=True),
    ChipLevel.RESTART_REQUEST: Treatment(Reset.IF_ILL, waits=True),
    ChipLevel.RESTART_JOB: Treatment(Reset.IF_ILL, waits=True),
    ChipLevel.RESET_WHEN_IDLE: Treatment(Reset.IF_ILL),
    ChipLevel.RESET_NOW: Treatment(Reset.FIRST),
    ChipLevel.NO_NEW_JOBS: Treatment(Reset.NEVER),
    ChipLevel.SEPARATE: Treatment(Reset.NEVER),
    ChipLevel.SEPARATE_BY_HAND: Treatment(Reset.NEVER),
}


class Act(StrEnum):
    """What a node does about a chip."""

    CHECK = "check"  # health and error counters by the driver, then a short computation
    RESET = "reset"


@dataclass(frozen=True, slots=True)
class HealPlan:
    """What is to be healed, and what the job allows.

    Attributes:
        code: that the chip reported; None: none.
        devices: local indices; empty: all that the job uses on the node.
        may_reset: whether the job lets chips be reset.
        wait_s: that a fault gets to go by itself.
        reset_s: that a chip gets to come back from a reset.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    code: str | None
    devices: tuple[int, ...] = ()
    may_reset: bool = True
    wait_s: float = 15.0
    reset_s: float = 150.0

    @property
    def limit_s(self) -> float:
        """By when a node has an answer: the longest course is check, reset, check."""
        return self.wait_s + self.reset_s + 2 * CHECK_LIMIT_S + RESET_COMMAND_LIMIT_S


@dataclass(frozen=True, slots=True)
class ActDone:
    """An act that was carried out.

    Attributes:
        is_good: a check has found nothing; a reset was accepted.
        codes: that the driver reported in a check.
        seen: in a few words.
        seconds: it took.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    act: Act
    is_good: bool
    seen: str
    codes: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class NextAct:
    """What is to be done next.

    Attributes:
        wait_s: a check is repeated for so long while it finds the fault.
    """

    act: Act
    wait_s: float = 0.0


def hardware_fault(fault: Fault, evidence: Sequence[Fault]) -> Fault | None:
    """The fault whose place is looked at before processes are started there again; None: none.

    What the program or its libraries did costs no check: the driver was asked about every device
    when the fault was diagnosed. If it reported one on the same node, that one counts.

    Args:
        fault: that is answered.
        evidence: what else it shows.
    """
    if fault.node is None:
        return None
    if fault.chip_code is not None:
        return fault if points_at_hardware(fault) else None
    drivers = [
        candidate
        for candidate in evidence
        if candidate.node == fault.node and candidate.rank is None and points_at_hardware(candidate)
    ]
    with_code = next((candidate for candidate in drivers if candidate.chip_code is not None), None)
    if with_code is not None or points_at_hardware(fault):
        return with_code or fault
    return next((candidate for candidate in drivers if candidate.device is not None), None)


def check_before_replacing(fault: Fault) -> HealPlan | None:
    """How the chip is checked before a rank gets a new process; None: not at all.

    Other ranks of the node train on: nothing is reset, and they do not wait for a fault to go.

    Args:
        fault: that is answered.
    """
    if hardware_fault(fault, ()) is None:
        return None
    devices = (fault.device,) if fault.device is not None else ()
    return HealPlan(fault.chip_code, devices, may_reset=False, wait_s=0.0)


def found_at_fault(fault: Fault, done: Sequence[ActDone]) -> Fault:
    """A fault with what a failed check after it has shown: it is the hardware of its node."""
    order = list(ChipLevel)
    ranked = [(order.index(level), code) for code in done[-1].codes if (level := _level(code))]
    worst = max(ranked, default=(0, fault.code))[1]
    return replace(fault, code=fault.chip_code or worst, hardware_fault=True)


def next_act(plan: HealPlan, done: Sequence[ActDone]) -> NextAct | None:
    """What comes after what was done; None: it is over, see `is_healed`."""
    if not done:
        treatment = _treatment(plan.code)
        if treatment.reset is Reset.FIRST and plan.may_reset:
            return NextAct(Act.RESET)
        return NextAct(Act.CHECK, plan.wait_s if treatment.waits else 0.0)
    last = done[-1]
    if last.act is Act.RESET:
        return NextAct(Act.CHECK, plan.reset_s if last.is_good else plan.wait_s)
    if last.is_good or not plan.may_reset or any(earlier.act is Act.RESET for earlier in done):
        return None
    codes = (plan.code, *last.codes)
    if any(_level(code) in SEPARATED for code in codes):
        return None
    allowed = any(_treatment(code).reset is not Reset.NEVER for code in codes)
    return NextAct(Act.RESET) if allowed else None


def is_healed(done: Sequence[ActDone]) -> bool:
    """Whether processes may be started there again."""
    return bool(done) and done[-1].act is Act.CHECK and done[-1].is_good


def acts_text(done: Sequence[ActDone]) -> str:
    """What was done, with the outcome of each act."""
    return "; ".join(f"{act_done.act}: {act_done.seen}" for act_done in done)


def is_still_there(plan: HealPlan, codes: Collection[str]) -> bool:
    """Whether the driver still reports the code, of a level that asks for something."""
    asks_nothing = (ChipLevel.NOT_HANDLED, ChipLevel.SUB_HEALTHY)
    return plan.code in codes and _level(plan.code) not in asks_nothing


def _level(code: str | None) -> ChipLevel | None:
    fact = chip_fact(code) if code is not None else None
    return fact.level if fact is not None else None


def _treatment(code: str | None) -> Treatment:
    return TREATMENTS[_level(code)]


def treatments_markdown() -> str:
    """The table of levels as Markdown."""
    words = {
        Reset.NEVER: "never",
        Reset.IF_ILL: "if the check shows that the fault is still there",
        Reset.FIRST: "at once, then the check",
    }
    lines = ["| level | waits for the fault to go | reset |", "|---|---|---|"]
    for level, row in TREATMENTS.items():
        if level in SEPARATED:
            continue  # the ladder starts nothing on such a chip
        name = f"`{level}`" if level is not None else "none known"
        lines.append(f"| {name} | {'yes' if row.waits else 'no'} | {words[row.reset]} |")
    return "\n".join(lines)
