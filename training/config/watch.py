"""Limits of silence, thresholds of alerts, logs, metrics, and checks of nodes before a run.

Times are seconds. The defaults of utilization, memory, step time and latency are those of
ModelArts' and MindCluster's operation guides; the others are our own.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from perdure.storage.frozen_model import SettingsModel


class HangAction(StrEnum):
    """Consequences of a hang."""

    RESTART = "restart"
    ALERT = "alert"


class ChipEventAction(StrEnum):
    """Consequences of a fault code that a chip reports while processes live."""

    ACT = "act"
    REPORT = "report"


class WatchSpec(SettingsModel):
    """Hang limits, alert thresholds, log collection and metrics."""

    sample_every_s: float = Field(
        10.0, ge=0.1, le=600, description="seconds between two samples of devices and hosts"
    )
    save_timeout_s: float | None = Field(
        None, gt=0, description="seconds that a save may block training before the run counts as "
        "hung; default: restart.start_timeout_s"
    )  # fmt: skip
    restore_timeout_s: float | None = Field(
        None,
        gt=0,
        description="seconds that a restore may take before the run counts as hung; "
        "default: restart.start_timeout_s",
    )
    evaluate_timeout_s: float = Field(
        3600.0,
        gt=0,
        description="seconds that an evaluation (`with session.evaluation():`), or the program's "
        "work after its last step, may take before the run counts as hung",
    )
    command_quiet_s: float = Field(
        1800.0, gt=0, description="commands: seconds without output or process I/O before the "
        "command counts as hung, provided that its use of processors is even "
        "(MA_HANG_DETECT_TIME)"
    )  # fmt: skip
    output_quiet_s: float | None = Field(
        None, gt=0, description="commands: seconds without output on any node before the command "
        "counts as hung, regardless of its processes; default: rule off"
    )  # fmt: skip
    hang_action: HangAction = Field(
        HangAction.RESTART, description="restart: a hang ends the attempt, and the recovery "
        "ladder answers; alert: the attempt continues, with an alert until the ranks make "
        "progress again"
    )  # fmt: skip
    chip_events: ChipEventAction = Field(
        ChipEventAction.ACT, description="act: a fault code whose level asks for a restart, a "
        "reset or the removal of the chip is answered when the driver or MindCluster reports it; "
        "report: it is an alert until processes fail over it"
    )  # fmt: skip
    utilisation_low_percent: float = Field(
        50.0,
        ge=0,
        le=100,
        description="alert when a device is used less than this, in percent, for low_for_s",
    )
    low_for_s: float = Field(
        300.0, gt=0, description="seconds below utilisation_low_percent before the alert"
    )
    memory_high_percent: float = Field(
        95.0,
        gt=0,
        le=100,
        description="alert when more than this percentage of a device's memory is in use",
    )
    loss_jump_ratio: float = Field(
        2.0,
        gt=1,
        description="alert when a loss exceeds this many times the mean of the recent steps",
    )
    step_slow_ratio: float = Field(
        2.0,
        gt=1,
        description="alert when steps take more than this many times the mean of the earlier steps",
    )
    step_slow_for_s: float = Field(
        60.0,
        ge=0,
        description="seconds of steps, and at least five steps, that step_slow_ratio "
        "compares with the earlier steps",
    )
    latency_high_ms: float = Field(
        500.0,
        gt=0,
        description="alert when the smallest collective of a step takes longer than "
        "this, in milliseconds, on the rank that enters it last",
    )
    straggler_ratio: float = Field(
        0.2, gt=0, le=1, description="alert when a rank is later than the others by more than "
        "this share of the step, step after step"
    )  # fmt: skip
    data_wait_ratio: float = Field(
        0.3,
        gt=0,
        le=1,
        description="alert when a rank waits for its data for more than this share of the time",
    )
    checkpoint_age_ratio: float = Field(
        3.0,
        gt=1,
        description="alert when no checkpoint is committed for this many times the usual interval",
    )
    disk_free_low_percent: float = Field(
        10.0,
        ge=0,
        lt=100,
        description="alert when less than this percentage of the file system "
        "with a node's scratch folder is free",
    )
    consistency_every_steps: int = Field(
        100, ge=0, description="steps between two comparisons of weights and gradients among "
        "ranks that hold the same state, in addition to the first steps; 0: no comparison, for "
        "programs whose ranks differ on purpose"
    )  # fmt: skip
    isolate_fail_slow: bool = Field(
        False, description="evacuate and isolate a node with a straggling rank"
    )
    log_limit_bytes: int = Field(
        64 << 20, ge=0, description="compressed bytes of logs that each node uploads to the store "
        "at the end of an attempt; 0: no upload"
    )  # fmt: skip
    system_logs: tuple[str, ...] = Field(
        ("/var/log/npu/slog", "/var/log/npu/hccl"),
        description="folders of a node whose *.log files are stored with an attempt's logs, as far "
        "as they were written since the node's agent started; missing folders are skipped",
    )
    metrics_port: int = Field(
        0,
        ge=0,
        le=65_535,
        description="port of the coordinator's Prometheus endpoint; 0: any free port",
    )
    tensorboard: str | None = Field(
        None, description="folder for TensorBoard event files, written on the first rank's node "
        "if TensorBoard is installed; default: no event files"
    )  # fmt: skip

    def check_hang_rules(self, *, is_command: bool, detects_hangs: bool) -> None:
        """Check that the rules about hangs can apply to the job.

        Raises:
            ValueError: a rule cannot.
        """
        if self.output_quiet_s is not None:
            if not is_command:
                raise ValueError("watch.output_quiet_s is for commands: a session has heartbeats")
            if not detects_hangs:
                raise ValueError(
                    "watch.output_quiet_s needs restart.hang=true, which looks for hangs"
                )
        if self.hang_action is HangAction.ALERT and not detects_hangs:
            raise ValueError(
                f"watch.hang_action={self.hang_action} needs restart.hang=true, which looks for "
                "hangs"
            )


class PreflightSpec(SettingsModel):
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
    device_memory_gib: float | None = Field(
        None, gt=0, le=4096, description="memory of one device in GiB, against which preflight "
        "holds the needs of the built-in trainer; default: that of this machine's NPUs, 64 for "
        "pods with huawei.com/Ascend910"
    )  # fmt: skip
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
        """Time for an exchange among all ranks; a check has two of them, and the start."""
        return self.timeout_s / 3
