"""What a node reports about itself: checks before it is used, samples while it works.

What a tool does not report is None; a tool that is missing, or gives no answer, is a gap with its
name. Percentages are 0 to 100, sizes bytes, times seconds; `at_s` since the epoch.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, TypeAdapter

from perdure.storage.frozen_model import FrozenModel


class CheckOutcome(StrEnum):
    """How a check came out, from good to bad."""

    SKIPPED = "skipped"  # it does not apply here, `seen` has the reason
    OK = "ok"
    WARNING = "warning"  # it can be used, and an operator should look
    FAILED = "failed"  # it must not be used


class Check(FrozenModel):
    """One check.

    Attributes:
        name: of the check.
        node: that was checked; None: the job or the gang as a whole.
        seen: what was found.
        allowed: what it is compared with; "" where nothing is.
        seconds: it took.
        figures: what was measured, by name with its unit.
    """

    name: str
    outcome: CheckOutcome
    seen: str
    allowed: str = ""
    node: str | None = None
    seconds: float = 0.0
    figures: dict[str, float] = Field(default={})


class NodeTask(FrozenModel):
    """What a node is asked to check.

    Attributes:
        job: as JSON, without secrets.
        folder: of the container.
        node_folder: that outlives its containers; None: there is none.
        first_rank: of the ranks of this node, one for each slot.
        state_bytes: model and optimizer state of the whole job; None: not known.
        is_new: whether the node itself is checked; otherwise it takes part in the gang alone.
        gang_host: where the first rank listens; None: no check of the gang.
        with_store: whether the keys of the store are there.
    """

    job: str
    node: str
    folder: str
    node_folder: str | None
    slots: int
    first_rank: int
    world_size: int
    state_bytes: int | None = None
    is_new: bool
    gang_host: str | None
    gang_port: int = 0
    timeout_s: float
    with_store: bool = True


CHECKS: TypeAdapter[tuple[Check, ...]] = TypeAdapter(tuple[Check, ...])


def unanswered(node: str, why: str) -> Check:
    """The check of a node whose agent did not answer."""
    return Check(name="agent", node=node, outcome=CheckOutcome.FAILED, seen=why)


def worst(outcomes: list[CheckOutcome]) -> CheckOutcome:
    """The worst of several outcomes; skipped when there is none."""
    order = list(CheckOutcome)
    return max(outcomes, key=order.index, default=CheckOutcome.SKIPPED)


class DeviceSample(FrozenModel):
    """One device.

    Attributes:
        index: as workers count them (LOCAL_RANK).
        health: word of its driver: OK, Warning, Alarm, Critical; None when it reports none.
        error_codes: that its driver reports at the moment.
        link_is_up: of its network port.
        net_health: word of hccn_tool: Success, Init, Socket failed, ...
    """

    index: int
    name: str = ""
    health: str | None = None
    error_codes: tuple[str, ...] = ()
    utilisation_percent: float | None = None
    memory_percent: float | None = None
    memory_total_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    link_is_up: bool | None = None
    net_health: str | None = None

    @property
    def is_ill(self) -> bool:
        """Whether its driver reports a fault."""
        return self.health not in (None, "OK", "Warning")

    @property
    def is_healthy(self) -> bool:
        """Whether neither its driver nor its link reports a fault."""
        return not self.is_ill and self.link_is_up is not False


class HostSample(FrozenModel):
    """The host, or the part of it that the container sees."""

    cpu_percent: float | None = None
    memory_percent: float | None = None
    disk_free_percent: float | None = None
    disk_free_bytes: int | None = None


class NodeSample(FrozenModel):
    """A sample of a node."""

    at_s: float
    devices: tuple[DeviceSample, ...] = ()
    host: HostSample = HostSample()
    gaps: tuple[str, ...] = ()
