"""What is checked before processes are started on nodes. Times are seconds."""

from __future__ import annotations

from pydantic import Field

from perdure.storage.frozen_model import FrozenModel


class PreflightSpec(FrozenModel):
    """Checks of nodes and gang before the first step of a placement."""

    nodes: bool = Field(
        True,
        description="check every new node before the run uses it; a node that fails is isolated",
    )
    gang: bool = Field(
        True, description="let all ranks connect and all-reduce once; requires nodes=true"
    )
    burn_in_s: float = Field(
        1.0, ge=0, le=3600, description="seconds of matmul with a known result on every device"
    )
    timeout_s: float = Field(
        180.0, ge=10, le=3600, description="seconds for all checks of a node, burn-in not "
        "included; a late check counts as failed"
    )  # fmt: skip
    clock_skew_s: float = Field(
        0.5,
        gt=0,
        description="seconds that a node's clock may be off before preflight warns; logs of "
        "several nodes are ordered by these clocks",
    )

    @property
    def limit_s(self) -> float:
        """Time for all checks of a node."""
        return self.timeout_s + self.burn_in_s

    @property
    def collective_s(self) -> float:
        """Time for one thing that needs all ranks; there are two of them, and the start."""
        return self.timeout_s / 3
