"""Faults made on purpose: by a job in its own workers, and from outside by orders to its agents."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from perdure.storage.frozen_model import FrozenModel


class DrillKind(StrEnum):
    """What happens."""

    KILL = "kill"  # SIGKILL to the rank's own process
    STOP = "stop"  # SIGSTOP to it
    DEVICE_MEMORY = "device_memory"  # the rank's whole state is damaged, and the runtime reports it
    COLLECTIVE = "collective"  # the runtime reports that a collective failed
    LINK = "link"  # the rank's connections to the others are broken
    GRADIENT = "gradient"  # the rank's loss is multiplied, and the gradient norm with it
    NOT_A_NUMBER = "not_a_number"  # the rank's loss is NaN, and so is the gradient of all
    EXCEPTION = "exception"  # the program raises an error of its own
    NODE = "kill_node"  # SIGKILL to everything on the rank's node, its agent too


class DrillPoint(StrEnum):
    """Where in a step."""

    START = "start"
    BACKWARD = "backward"
    REDUCING = "reducing"  # the first collective that reduces the gradients is on its way (gloo)
    PREPARED = "prepared"
    VOTED = "voted"
    APPLYING = "applying"
    HALF_APPLIED = "half_applied"
    SAVE = "save"
    RECOVERY = "recovery"  # the first recovery that continues with the step or a later one
    RESTORE = "restore"  # before the state is restored, in the first start that comes, at any step


class DrillFault(FrozenModel):
    """One fault, injected once in the whole run, however often its step is executed again."""

    kind: DrillKind = Field(description="what happens")
    rank: int = Field(ge=0, description="global rank that it hits")
    step: int = Field(ge=1, description="step in which it happens")
    point: DrillPoint = Field(DrillPoint.BACKWARD, description="where in the step")
    times: int = Field(1, ge=1, description="how often, each time that the step comes to its point")


class Victim(StrEnum):
    """What is killed from outside: a worker, a whole node, or what it runs beside its workers."""

    RANK = "rank"
    NODE = "node"
    AGENT = "agent"  # the first process of its container, which some platforms end with it
    FORK_SERVER = "fork_server"
    CHECKPOINT_SERVER = "checkpoint_server"
    COORDINATOR = "coordinator"  # on the first node alone
    SPARE = "spare"  # a node on which a container stands by


class Kill(FrozenModel):
    """SIGKILL from outside, once."""

    victim: Victim = Field(description="what is killed")
    index: int = Field(
        0, ge=0, description="global rank, else the member of the placement; of a spare none"
    )
    step: int = Field(ge=1, description="completed step from which on it happens")

    def __str__(self) -> str:
        """For reports."""
        return f"kill of {self.victim.replace('_', ' ')} {self.index} at step {self.step}"


class DrillSpec(FrozenModel):
    """A drill: a run with faults injected on purpose."""

    faults: tuple[DrillFault, ...] = Field((), description="faults, in any order")
    kills: bool = Field(
        False, description="whether agents obey orders to kill processes; with faults they do"
    )

    @property
    def is_drill(self) -> bool:
        """Whether anything may be broken on purpose."""
        return self.kills or bool(self.faults)
