"""Results from the logs of one run: when steps continued, which were executed again, the loss.

Times are seconds, since the epoch where a name ends in `at_s`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Self

from pydantic import BaseModel, ConfigDict

from benchmarks.recovery.workload import FAULT_FILE, NOTICED, NUM_RANKS

WARMUP_STEPS = 3

Curve = Mapping[int, float]


class Completed(BaseModel):
    """A line of a step log.

    Attributes:
        cpu_s: that the process has used, all threads together.
        memory_bytes: of the process, with the last step alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    step: int
    loss: float
    at_s: float
    cpu_s: float
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Logs:
    """All step logs of a run.

    Attributes:
        completed: in the order of time.
        fault_at_s: when the fault was, None without one.
        noticed_at_s: when the first survivor noticed it, None where nothing says so.
    """

    completed: Sequence[Completed]
    fault_at_s: float | None
    noticed_at_s: float | None = None

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Read them; the last line of a killed process may be cut off."""
        lines = [
            line
            for path in folder.glob("steps-*.jsonl")
            for line in path.read_text(encoding="ascii").splitlines()
            if line.endswith("}")
        ]
        completed = sorted(map(Completed.model_validate_json, lines), key=lambda one: one.at_s)
        fault = folder / FAULT_FILE
        at_s = _times(fault)[0] if fault.exists() else None
        noticed = [one for path in folder.glob(f"{NOTICED}-*") for one in _times(path)]
        after = [one for one in noticed if at_s is not None and one >= at_s]
        return cls(completed, at_s, min(after, default=None))

    @property
    def newest(self) -> int:
        """Newest completed step."""
        return max((one.step for one in self.completed), default=0)

    def curve(self) -> Curve:
        """Mean loss over the ranks by step; of a step that was done again, the last time."""
        last: dict[int, dict[int, float]] = {}
        for one in self.completed:
            last.setdefault(one.step, {})[one.rank] = one.loss
        return {
            step: fmean(loss for _, loss in sorted(by_rank.items()))
            for step, by_rank in sorted(last.items())
        }

    def step_times(self, *, first: int, rank: int = 0) -> list[float]:
        """Seconds between completed steps of a rank, from `first` on, up to the fault."""
        until_s = self.fault_at_s or float("inf")
        own = [one for one in self.completed if one.rank == rank and one.at_s <= until_s]
        pairs = itertools.pairwise(own)
        return [after.at_s - before.at_s for before, after in pairs if before.step >= first]


def _times(path: Path) -> list[float]:
    lines = path.read_text(encoding="ascii").splitlines()
    return [float(json.loads(line)["at_s"]) for line in lines]


@dataclass(frozen=True, slots=True)
class Recovery:
    """One run with a fault.

    Attributes:
        step_s: median before the fault.
        resume_s: from the fault to the next newly completed step, of any rank.
        full_s: until as many ranks as before completed a step; None: never.
        steps_lost: completed steps that were done again.
        difference: largest of the loss to the undisturbed run, relative; 0 when all digits agree.
        noticed_s: from the fault to the first survivor that noticed it, None: nothing says so.
    """

    step_s: float
    resume_s: float
    full_s: float | None
    steps_lost: int
    difference: float
    noticed_s: float | None = None

    @property
    def resume_steps(self) -> float:
        """In step times."""
        return self.resume_s / self.step_s

    @classmethod
    def of(cls, logs: Logs, undisturbed: Curve) -> Self:
        """The results in a run's logs.

        Raises:
            ValueError: there was no fault, or no step came after it.
        """
        fault_s = logs.fault_at_s
        if fault_s is None:
            raise ValueError("the fault did not happen")
        before = max((c.step for c in logs.completed if c.at_s <= fault_s), default=0)
        new = [c for c in logs.completed if c.step > before and c.at_s > fault_s]
        if not new:
            raise ValueError("no step was completed after the fault")
        return cls(
            step_s=median(logs.step_times(first=WARMUP_STEPS)),
            resume_s=new[0].at_s - fault_s,
            full_s=next((at_s - fault_s for at_s in _by_all(new)), None),
            steps_lost=len(_done_again(logs.completed, fault_s)),
            difference=_difference(logs.curve(), undisturbed),
            noticed_s=None if logs.noticed_at_s is None else logs.noticed_at_s - fault_s,
        )


def _by_all(completed: Sequence[Completed]) -> Iterator[float]:
    """When steps were complete on as many ranks as there are."""
    ranks: dict[int, set[int]] = {}
    for one in completed:
        ranks.setdefault(one.step, set()).add(one.rank)
        if len(ranks[one.step]) == NUM_RANKS:
            yield one.at_s


def _done_again(completed: Sequence[Completed], fault_s: float) -> set[int]:
    """Steps that a rank completed before the fault and after it."""
    before = {(c.rank, c.step) for c in completed if c.at_s <= fault_s}
    after = {(c.rank, c.step) for c in completed if c.at_s > fault_s}
    return {step for _, step in before & after}


def _difference(curve: Curve, undisturbed: Curve) -> float:
    steps = {*curve, *undisturbed}
    if curve.keys() != undisturbed.keys():
        return float("inf")
    return max((abs(curve[s] - undisturbed[s]) / abs(undisturbed[s]) for s in steps), default=0.0)
