"""Faults injected from outside: kills that are due at a step, and the agent that carries them out.

Times are seconds, since the epoch where a name ends in `fired_s`; steps are completed optimizer
steps.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from perdure.training.config.drill import Kill, Victim
from perdure.training.injection.victims import (
    KILLED,
    NODE_LOSS,
    kill,
    parts_of,
    workers_of,
)
from perdure.training.wire.agent import AgentConfig, AgentReply, KillOrder

REPLY_S = 0.1  # for the reply to be on its way before its sender is gone

# Kills the victim with this index. Returns whether it was there.
Hit = Callable[[Victim, int], bool]


@dataclass(slots=True)
class KillInjector:
    """Kills processes of a run, each victim once.

    Attributes:
        kills: the victims, each with its step.
        fired_s: when each victim was hit, by its index in `kills`.
        num_due: how often each kill was due while all processes ran, by the same index.
    """

    kills: tuple[Kill, ...]
    fired_s: dict[int, float] = field(default_factory=dict)
    num_due: Counter[int] = field(default_factory=Counter)

    def inject(self, hit: Hit, step: int, *, is_running: bool = True) -> None:
        """Kill the victims that are due; a missing victim is due again at the next call.

        Args:
            hit: kills a victim.
            step: the newest completed step.
            is_running: whether processes run on every member.
        """
        for number, order in enumerate(self.kills):
            if order.step > step or number in self.fired_s:
                continue
            self.num_due[number] += is_running
            if hit(order.victim, order.index):
                self.fired_s[number] = time.time()


def kill_in_container(order: KillOrder, config: AgentConfig, marker: str) -> AgentReply:
    """Carry out an order to kill, in a drill.

    Args:
        order: names the victim.
        config: the configuration of this agent.
        marker: marks the processes of its container.
    """

    def is_own(candidate: str) -> bool:
        return candidate == marker

    if not config.is_drill:
        return AgentReply(error="the run is no drill: its job has neither drill.faults nor kills")
    match order.victim:
        case Victim.NODE | Victim.SPARE:
            _after_reply(lambda: _become_lost_node(marker))
            return AgentReply(num_killed=1)
        case Victim.AGENT:
            # As the first process of a pod it could not SIGKILL itself.
            _after_reply(lambda: os._exit(KILLED))
            return AgentReply(num_killed=1)
        case Victim.RANK:
            processes = workers_of(order.rank, is_own) if order.rank is not None else []
        case part:
            processes = parts_of(part, is_own)
    return AgentReply(num_killed=len(kill(processes)))


def lose_node_on_signal(marker: str) -> None:
    """Lose the node when a worker of the container signals it; for agents of drills."""
    signal.signal(NODE_LOSS, lambda *_: _become_lost_node(marker))


def _after_reply(action: Callable[[], None]) -> None:
    timer = threading.Timer(REPLY_S, action)
    timer.daemon = True
    timer.start()


def _become_lost_node(marker: str) -> NoReturn:
    """Turn the agent into `lost_node.py`, which kills all other processes of the container.

    No thread of the agent notices, and none of its connections stays open.
    """
    os.execv(  # noqa: S606 no shell is wanted
        sys.executable, [sys.executable, "-m", "perdure.training.injection.lost_node", marker]
    )
