"""What one look at a node shows: its devices and its host.

Whatever a tool does not say is None; a tool that is not there, or gives no answer, is a gap with
its name. Percentages are 0 to 100, sizes bytes, times seconds since the epoch.
"""

from __future__ import annotations

from storage.model import FrozenModel


class DeviceSample(FrozenModel):
    """One device.

    Attributes:
        index: as workers count them (LOCAL_RANK).
        health: word of its driver: OK, Warning, Alarm, Critical; None when it does not say.
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
        """Whether its driver speaks against it."""
        return self.health not in (None, "OK", "Warning")

    @property
    def is_healthy(self) -> bool:
        """Whether nothing that was said speaks against it."""
        return not self.is_ill and self.link_is_up is not False


class HostSample(FrozenModel):
    """The host, or the part of it that the container sees."""

    cpu_percent: float | None = None
    memory_percent: float | None = None
    disk_free_percent: float | None = None
    disk_free_bytes: int | None = None


class NodeSample(FrozenModel):
    """One look at a node."""

    at_s: float
    devices: tuple[DeviceSample, ...] = ()
    host: HostSample = HostSample()
    gaps: tuple[str, ...] = ()
