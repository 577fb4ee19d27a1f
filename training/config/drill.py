"""Faults made on purpose: by a job in its own workers, and from outside by orders to its agents."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from perdure.storage.frozen_model import FrozenModel, SettingsModel


class DrillKind(StrEnum):
    """Kinds of injected faults."""

    KILL = "kill"  # SIGKILL to the rank's own process
    STOP = "stop"  # SIGSTOP to it
    DEVICE_MEMORY = "device_memory"  # the rank's whole state is damaged, and the runtime reports it
    COLLECTIVE = "collective"  # the runtime reports that a collective failed
    LINK = "link"  # the rank's connections to the others are broken
    GRADIENT = "gradient"  # the rank's loss is multiplied, and the gradient norm with it
    NOT_A_NUMBER = "not_a_number"  # the rank's loss is NaN, and so is the gradient of all
    EXCEPTION = "exception"  # the program raises an error of its own
    NODE = "kill_node"  # SIGKILL to everything on the rank's node, its agent too


# The others imitate what torch raises, or change its tensors.
OF_ANY_FRAMEWORK = frozenset({DrillKind.KILL, DrillKind.STOP, DrillKind.EXCEPTION, DrillKind.NODE})


class DrillPoint(StrEnum):
    """Places within a step."""

    START = "start"
    BACKWARD = "backward"
    REDUCING = "reducing"  # the first collective that reduces the gradients is on its way (gloo)
    PREPARED = "prepared"
    VOTED = "voted"
    APPLYING = "applying"
    HALF_APPLIED = "half_applied"
    APPLIED = "applied"  # optimizers and schedules have run, `with step:` is not left yet
    SAVE = "save"
    RECOVERY = "recovery"  # the first recovery that continues with the step or a later one
    RESTORE = "restore"  # before the state is restored, in the first start that comes, at any step


class DrillFault(SettingsModel):
    """A fault that is injected once per run, however often its step is executed again."""

    kind: DrillKind = Field(description="kind of the fault")
    rank: int = Field(ge=0, description="global rank that the fault hits")
    step: int = Field(ge=1, description="step in which the fault occurs")
    point: DrillPoint = Field(DrillPoint.BACKWARD, description="place within the step")
    times: int = Field(
        1, ge=1, description="number of injections, one each time the step reaches this place"
    )


class Victim(StrEnum):
    """Targets of a kill from outside: a worker, a whole node, or a process beside the workers."""

    RANK = "rank"
    NODE = "node"
    AGENT = "agent"  # the first process of its container, which some platforms end with it
    FORK_SERVER = "fork_server"
    CHECKPOINT_SERVER = "checkpoint_server"
    COORDINATOR = "coordinator"  # on the first node alone
    SPARE = "spare"  # a node with a warm spare


class Kill(FrozenModel):
    """A single SIGKILL from outside."""

    victim: Victim = Field(description="process or node to kill")
    index: int = Field(
        0,
        ge=0,
        description="global rank, or otherwise the member of the placement; ignored for a spare",
    )
    step: int = Field(ge=1, description="completed step after which the kill may happen")

    def __str__(self) -> str:
        """For reports."""
        return f"kill of {self.victim.replace('_', ' ')} {self.index} at step {self.step}"


class DrillSpec(SettingsModel):
    """Faults injected on purpose."""

    faults: tuple[DrillFault, ...] = Field((), description="faults to inject, in any order")
    kills: bool = Field(
        False, description="let agents obey orders to kill processes; implied by faults"
    )

    @property
    def is_drill(self) -> bool:
        """Whether anything may be broken on purpose."""
        return self.kills or bool(self.faults)
