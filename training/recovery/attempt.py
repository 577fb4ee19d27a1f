"""An attempt from its start to its end: stimuli in, actions out.

`handle` is the one door. It looks a stimulus (stimuli.py) up in the table of transitions.py, has
reactions.py do what the table says to what the attempt remembers (memory.py), and returns what is
to be done (actions.py). No I/O and no clock: the coordinator's server passes stimuli in with their
time and carries the actions out, tests do the same without processes, and replay.py does it with
the history that a coordinator has written. Times are seconds since the epoch, steps completed
optimizer steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perdure.training.recovery.actions import Action
from perdure.training.recovery.invariants import check_invariants
from perdure.training.recovery.ladder import InProcessDecider
from perdure.training.recovery.memory import AttemptSettings, Memory
from perdure.training.recovery.reactions import Reactions
from perdure.training.recovery.stages import Stage
from perdure.training.recovery.stimuli import Stimulus


@dataclass(slots=True)
class Attempt:
    """The state machine.

    Attributes:
        memory: what it remembers; nothing but `handle` changes it.
        settings: limits.
        decider: chooses the rung.
        checks_invariants: whether every stimulus is followed by a check of all invariants.
    """

    memory: Memory
    settings: AttemptSettings
    decider: InProcessDecider
    checks_invariants: bool = False

    def handle(self, stimulus: Stimulus, *, now_s: float) -> Sequence[Action]:
        """Take one stimulus in. Returns what is to be done, in this order.

        Raises:
            InvariantBroken: where they are checked: names the stimulus and what does not hold.
        """
        memory, state = self.memory, self.memory.state
        Reactions(memory, self.settings, self.decider, now_s).react(stimulus)
        actions = memory.outbox.take()
        if self.checks_invariants:
            check_invariants(memory, stimulus, state)
        return actions

    def is_due(self, now_s: float) -> bool:
        """Whether `TimePassed` would change something by now."""
        memory = self.memory
        return memory.is_late(now_s) or memory.is_settled(now_s) or bool(memory.unexplained(now_s))

    @property
    def has_deadline(self) -> bool:
        """Whether something may become due soon, even if no message comes."""
        round_ = self.memory.round
        waits = round_.suspicion is not None or round_.deadline_s is not None
        return waits or not self.memory.ranks.are_all_explained

    @property
    def stage(self) -> Stage:
        """Where it is."""
        return self.memory.state.stage

    @property
    def generation(self) -> int:
        """Of the process groups."""
        return self.memory.round.generation

    @property
    def step(self) -> int:
        """Newest completed step that is known."""
        return self.memory.step

    @property
    def nodes(self) -> Mapping[int, str]:
        """By rank, the node it runs on, as the agents report."""
        return self.memory.nodes

    @property
    def rank_counts(self) -> dict[str, int]:
        """How many ranks there are in each state; a living one may train or come to its end."""
        ranks = self.memory.ranks
        return {
            "connected": len(ranks.living),
            "training": len(self.memory.round.training),
            "ending": len(ranks.ending),
            "dead": len(ranks.dead),
            "all": self.memory.world_size,
        }
