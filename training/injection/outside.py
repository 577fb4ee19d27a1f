"""Faults injected from outside: what is due at a step, and whether it has hit.

Times are seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from perdure.training.specs.drill import Kill, Victim

# Kills what has this index; whether something was hit.
Hit = Callable[[Victim, int], bool]


@dataclass(slots=True)
class KillInjector:
    """Kills processes of a run, each victim once.

    Attributes:
        kills: what to kill.
        fired_s: when each was hit, by its index in `kills`.
        num_due: how often each was due while all processes ran, likewise.
    """

    kills: tuple[Kill, ...]
    fired_s: dict[int, float] = field(default_factory=dict)
    num_due: Counter[int] = field(default_factory=Counter)

    def inject(self, hit: Hit, step: int, *, is_running: bool = True) -> None:
        """Kill what is due; a victim that is not there just now is due again at the next call.

        Args:
            hit: kills one victim.
            step: the newest completed one.
            is_running: whether processes run on every member.
        """
        for number, kill in enumerate(self.kills):
            if kill.step > step or number in self.fired_s:
                continue
            self.num_due[number] += is_running
            if hit(kill.victim, kill.index):
                self.fired_s[number] = time.time()
