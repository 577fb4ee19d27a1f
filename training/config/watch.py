"""How a run is watched: limits of silence, thresholds of the health points, logs and metrics.

Times are seconds. The defaults of utilisation, memory, step time and latency are those of
ModelArts' and MindCluster's operation guides; the others are our own.

What is checked before processes are started on nodes. Times are seconds.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from perdure.storage.frozen_model import FrozenModel


class HangAction(StrEnum):
    """What a hang leads to."""

    RESTART = "restart"
    ALERT = "alert"


class WatchSpec(FrozenModel):
    """What is watched while a run goes on, and from which value on an alert is raised."""

    sample_every_s: float = Field(
        10.0, ge=0.1, le=600, description="between two looks at the devices and hosts"
    )
    save_timeout_s: float | None = Field(
        None, gt=0, description="a save that blocks longer is a hang; default: "
        "restart.start_timeout_s"
    )  # fmt: skip
    restore_timeout_s: float | None = Field(
        None, gt=0, description="likewise a restore; default: restart.start_timeout_s"
    )
    evaluate_timeout_s: float = Field(
        3600.0,
        gt=0,
        description="likewise an evaluation, `with session.evaluation():`, and "
        "what a program does after its last step",
    )
    command_quiet_s: float = Field(
        1800.0, gt=0, description="command jobs: neither output nor process I/O for this long, "
        "and then an even use of processors, is a hang (MA_HANG_DETECT_TIME)"
    )  # fmt: skip
    output_quiet_s: float | None = Field(
        None, gt=0, description="command jobs: nothing printed on any node for this long is a "
        "hang, whatever the processes do; default: no such rule"
    )  # fmt: skip
    hang_action: HangAction = Field(
        HangAction.RESTART, description="restart: a hang ends the attempt, and the ladder answers; "
        "alert: it is reported until the ranks make progress again, and the attempt goes on"
    )  # fmt: skip
    utilisation_low_percent: float = Field(
        50.0,
        ge=0,
        le=100,
        description="a device used less than this raises an alert after low_for_s",
    )
    low_for_s: float = Field(300.0, gt=0, description="see utilisation_low_percent")
    memory_high_percent: float = Field(95.0, gt=0, le=100, description="of a device's memory")
    loss_jump_ratio: float = Field(
        2.0, gt=1, description="a loss over this many times the mean of the last steps"
    )
    step_slow_ratio: float = Field(
        2.0, gt=1, description="a step over this many times the mean of the last steps"
    )
    step_slow_for_s: float = Field(
        60.0, ge=0, description="so long, and for five steps at least, or it is no trend"
    )
    latency_high_ms: float = Field(
        500.0, gt=0, description="of the smallest collective of a step, at its last rank"
    )
    straggler_ratio: float = Field(
        0.2, gt=0, le=1, description="a rank that is later than the others by this share of the "
        "step, step after step"
    )  # fmt: skip
    data_wait_ratio: float = Field(
        0.3, gt=0, le=1, description="share of the step for which a rank waits for its data"
    )
    checkpoint_age_ratio: float = Field(
        3.0, gt=1, description="no commit for this many times the usual interval"
    )
    disk_free_low_percent: float = Field(
        10.0, ge=0, lt=100, description="of the file system with a node's scratch folder"
    )
    consistency_every_steps: int = Field(
        100, ge=0, description="steps between two comparisons of weights and gradients on the "
        "ranks that hold the same ones, which also come in the first steps; 0: none, for a "
        "program whose ranks differ on purpose"
    )  # fmt: skip
    isolate_fail_slow: bool = Field(
        False, description="a node with a straggling rank is left and isolated"
    )
    log_limit_bytes: int = Field(
        64 << 20, ge=0, description="of the logs that each node puts into the store at the end "
        "of an attempt, compressed; 0: none"
    )  # fmt: skip
    system_logs: tuple[str, ...] = Field(
        ("/var/log/npu/slog",), description="folders of a node whose *.log files are stored with "
        "those of an attempt, as far as they were written since the node's agent started; one "
        "that is not there has none"
    )  # fmt: skip
    metrics_port: int = Field(
        0, ge=0, le=65_535, description="of the coordinator's Prometheus endpoint; 0: any free one"
    )
    tensorboard: str | None = Field(
        None, description="folder for TensorBoard's event files, written on the first rank's node "
        "where TensorBoard is installed; none by default"
    )  # fmt: skip


class PreflightSpec(FrozenModel):
    """Checks of nodes and gang before the first step of a placement."""

    nodes: bool = Field(
        True, description="check every new node before it is used; one that fails is isolated"
    )
    gang: bool = Field(True, description="let all ranks join and all-reduce once; needs nodes=true")
    burn_in_s: float = Field(
        1.0, ge=0, le=3600, description="seconds of matmul with a known result on every device"
    )
    timeout_s: float = Field(
        180.0, ge=10, le=3600, description="of all checks of a node, burn-in apart; one that is "
        "late has failed"
    )  # fmt: skip
    clock_skew_s: float = Field(
        0.5,
        gt=0,
        description="a node's clock that is off by more is a warning; logs are compared by it",
    )

    @property
    def limit_s(self) -> float:
        """Time for all checks of a node."""
        return self.timeout_s + self.burn_in_s

    @property
    def collective_s(self) -> float:
        """Time for one thing that needs all ranks; there are two of them, and the start."""
        return self.timeout_s / 3
