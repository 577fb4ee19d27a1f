"""Settings that keep a run alive: checkpoints, restarts, communication limits.

Times are seconds, steps are completed optimizer steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from perdure.storage.frozen_model import SettingsModel
from perdure.storage.retention import Retention
from perdure.training.errors import InputError
from perdure.training.platforms.forms import read_platform
from perdure.training.platforms.settings import (
    JOB_FIELDS,
    MAX_GRACE_S,
    POLICY_FIELDS,
    Fact,
    ImportedSettings,
    Setting,
    format_value,
)
from perdure.training.platforms.tft import TFT, read_snapshot_steps
from perdure.training.recovery.rungs import JobPolicy, Policy

# Recommended save intervals by model size: every epoch, every 500 steps, every 100 to 200 steps.
EPOCH_BELOW_PARAMETERS = 1_000_000_000
STEPS_500_UP_TO_PARAMETERS = 10_000_000_000
RECOMMENDED_KEEP_LAST = 5
MAX_SKIPPED_IN_A_ROW = 10  # MindFormers' default of global_norm_spike_count_threshold


class CheckpointSpec(SettingsModel):
    """When to save and which checkpoints to keep.

    A job without an interval gets the recommended interval for its model size.
    """

    every_steps: int | None = Field(None, ge=1, description="save every N steps")
    every_epochs: int | None = Field(None, ge=1, description="save at the end of every Nth epoch")
    every_s: float | None = Field(None, gt=0, description="save every N seconds")
    mtbf_s: float | None = Field(
        None, gt=0, description="expected mean seconds between failures; sets the Young/Daly save "
        "interval, together with the measured cost of a save and the failures so far"
    )  # fmt: skip
    host_memory: bool = Field(
        True, description="save to memory that the node agent holds, and upload from there while "
        "training continues; requires twice a rank's share of the state per rank"
    )  # fmt: skip
    partner_copies: int = Field(
        0, ge=0, le=2, description="number of other nodes that hold a copy of each node's saves "
        "in memory, so that recovery from a lost node costs only the steps since the last save "
        "and reads nothing from the store. Each node needs 3 times its share of the state, plus 2 "
        "times for every copy that it holds, instead of 2 times"
    )  # fmt: skip
    partner_mb_per_s: float | None = Field(
        1000.0, gt=0, description="partner_copies: limit on what a node sends, in MB/s; null: none"
    )
    failure_domains: dict[str, str] = Field(
        {}, description="partner_copies: failure domain (rack, super pod, power supply) by node "
        "name; a node's copies lie outside its own domain. A node that is not listed is a domain "
        "of its own. Default: the super pods of the rank table, if none has more than half of the "
        "nodes"
    )  # fmt: skip
    node_disk: bool | None = Field(
        None, description="also keep the newest saves on the node's disk; default: true unless "
        "the store is a folder"
    )  # fmt: skip
    keep_last: int = Field(
        RECOMMENDED_KEEP_LAST, ge=1, description="number of newest checkpoints to keep"
    )
    keep_every_steps: int | None = Field(
        None, ge=1, description="also keep every checkpoint whose step is a multiple of this"
    )
    keep_best: int | None = Field(
        None, ge=1, description="also keep this many checkpoints with the lowest training loss; "
        "the checkpoint-retention deployment deletes the others"
    )  # fmt: skip

    @model_validator(mode="after")
    def _check_copies(self) -> Self:
        if self.partner_copies and not self.host_memory:
            raise ValueError(
                f"partner_copies={self.partner_copies} needs host_memory=true: what is copied is "
                "the save in memory"
            )
        return self

    def check_partners(self, *, nodes: int, is_command: bool, pod_retries: int) -> None:
        """Check that the job has the nodes, the program and the recoveries that copies need.

        Raises:
            ValueError: it does not.
        """
        copies = self.partner_copies
        if not copies:
            return
        name = f"checkpoint.partner_copies={copies}"
        if is_command:
            raise ValueError(f"{name} is for sessions: a command saves its checkpoints itself")
        if copies >= nodes:
            raise ValueError(
                f"{name} needs more than {copies} nodes, engine.nodes={nodes}: every "
                "copy lies on another node"
            )
        if not pod_retries:
            raise ValueError(
                f"{name} needs restart.pod_retries of 1 or more: without it all containers are "
                "replaced when a node is lost, and their memory with them"
            )

    @property
    def copy_bytes_per_s(self) -> float | None:
        """Limit of what a node sends to its partners."""
        limit = self.partner_mb_per_s
        return limit * 1e6 if limit is not None else None

    @property
    def shares_in_memory(self) -> int:
        """How many times its share of the state a node holds, its partners' copies included."""
        # As the slots of storage/partner_copies.py: three of its own, and two for each copy.
        return 3 + 2 * self.partner_copies if self.partner_copies else 2

    @property
    def has_interval(self) -> bool:
        """Whether the job chose an interval of its own."""
        chosen = (self.every_steps, self.every_epochs, self.every_s, self.mtbf_s)
        return any(value is not None for value in chosen)

    def resolved(self, num_parameters: int) -> CheckpointSpec:
        """Fill in the recommended interval where the job has none."""
        if self.has_interval:
            return self
        return self.model_copy(update=recommended_interval(num_parameters))

    def retention(self, losses: Mapping[int, float] | None = None) -> Retention:
        """Make the rule for the checkpoints to keep.

        Args:
            losses: training loss by step. With keep_best, a step that is not among them is kept,
                so that a caller without any deletes nothing.
        """
        return Retention(self.keep_last, self.keep_every_steps, self.keep_best, losses or {})


def recommended_interval(num_parameters: int) -> dict[str, int]:
    """Recommend a save interval for a model of this many parameters, as a field."""
    if num_parameters < EPOCH_BELOW_PARAMETERS:
        return {"every_epochs": 1}
    if num_parameters <= STEPS_500_UP_TO_PARAMETERS:
        return {"every_steps": 500}
    return {"every_steps": 200}


class HealSpec(SettingsModel):
    """Treatment of a chip that had a fault, before processes start on it again."""

    check: bool = Field(
        True, description="test the hardware before a restart: driver health, error counters and "
        "a short computation; a chip that fails has its node isolated and the job rescheduled"
    )  # fmt: skip
    reset: bool = Field(
        True, description="reset the chip if the level of its fault code asks for it, no other "
        "program uses the node's chips, and the driver allows it (npu-smi set -t reset)"
    )  # fmt: skip
    wait_s: float = Field(
        15.0, ge=0, le=600, description="seconds for a fault to clear on its own (MindCluster's "
        "WaitFaultSelfHealingTime)"
    )  # fmt: skip
    reset_s: float = Field(
        150.0, ge=1, le=600, description="seconds for a chip to come back after a reset "
        "(MindCluster's WaitDeviceResetTime)"
    )  # fmt: skip


class RestartSpec(JobPolicy):
    """Restart policy, with the value ranges of ModelArts' fault-tolerance annotations."""

    hang_timeout_s: float | None = Field(
        None, gt=0, description="seconds without a step before the run counts as hung; default: "
        "learned, max(60, 10 x median step)"
    )  # fmt: skip
    start_timeout_s: float = Field(
        600.0,
        gt=0,
        description="seconds from process start to the first step before the run counts as hung",
    )
    spare_wait_s: float | None = Field(
        None, ge=0, description="seconds to wait for room: a healthy spare node, a quota, a queue; "
        "default: as long as it takes, but a minute while processes that live wait, too, or where "
        "too few healthy nodes exist and the job may go back to isolated ones"
    )  # fmt: skip
    failover_grace_s: int = Field(
        3, ge=-1, le=MAX_GRACE_S, description="seconds from SIGTERM to SIGKILL for the processes "
        "that survive another process's failure; -1: no SIGKILL, except for a process that "
        "outlives the hang limit"
    )  # fmt: skip
    unmount_after_s: int = Field(
        -1, ge=-1, le=MAX_GRACE_S, description="seconds after which volumes of a container that "
        "goes away are unmounted, asynchronously (MA_FAILOVER_TERMINATION_GRACE_PERIOD_SECONDS): "
        "processes and saves end before, and the next container does not wait for the unmount; "
        "-1: it waits"
    )  # fmt: skip
    every_s: float | None = Field(
        None, ge=1, description="seconds after which the processes restart in their containers, "
        "at the next committed checkpoint; uses up no budget; default: never"
    )  # fmt: skip
    delay_s: float = Field(0.0, ge=0, le=3600, description="seconds to pause before a restart")
    heal: HealSpec = Field(
        HealSpec(), description="treatment of a faulty chip before a restart in place"
    )
    progress_after_s: float = Field(
        600.0, gt=0, description="commands: seconds that an attempt must last to count as progress"
    )
    snapshot_every_steps: int = Field(
        10, ge=1, description="numeric_retry: steps between two snapshots of the state in host "
        "memory, to which an abnormal step returns; requires twice a rank's share of the state"
    )  # fmt: skip
    abnormal_loss: float | None = Field(
        None, gt=0, description="loss from which a step is abnormal; nan and inf always are"
    )
    abnormal_grad_norm: float | None = Field(
        None, gt=0, description="gradient norm, before clipping, from which a step is abnormal "
        "(global_norm_spike_threshold)"
    )  # fmt: skip
    max_skipped_in_a_row: int = Field(
        MAX_SKIPPED_IN_A_ROW, ge=1, description="data_skipping: number of abnormal batches in a "
        "row that ends the run (global_norm_spike_count_threshold)"
    )  # fmt: skip
    from_platform: dict[str, str] = Field(
        {}, description="ModelArts annotations, MindCluster labels, MS_ENABLE_TFT or "
        "HIGH_AVAILABILITY, as name: text; they set the fields above"
    )  # fmt: skip

    @model_validator(mode="before")
    @classmethod
    def _fill_from_platform(cls, document: Any) -> Any:
        entries = document.get("from_platform") if isinstance(document, dict) else None
        if not isinstance(entries, dict) or not all(
            isinstance(text, str) for item in entries.items() for text in item
        ):
            return document  # the field's own type reports what is wrong
        fields = read_platform(entries).fields
        interval = _snapshot_interval(entries, document)
        return {n: v for n, v in fields.items() if n in cls.model_fields} | interval | document

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.pod_before_in_place and not self.pod_retries:
            raise ValueError("pod_before_in_place=true needs pod_retries of 1 or more")
        # A job that was written out has every field.
        if self.max_skipped_in_a_row != MAX_SKIPPED_IN_A_ROW and not self.data_skipping:
            raise ValueError(
                f"max_skipped_in_a_row={self.max_skipped_in_a_row} with data_skipping=false: "
                "only abnormal batches that are skipped are counted"
            )
        chosen = {
            name: getattr(self, name)
            for name in self.model_fields_set & (POLICY_FIELDS | JOB_FIELDS)
        }
        self.read_platform([Setting(n, v, f"{n}={format_value(v)}") for n, v in chosen.items()])
        return self

    def policy(self, *, operator_retry: bool) -> Policy:
        """Complete the policy with the switch from the job's comm section, for the ladder."""
        choices: dict[str, Any] = {name: getattr(self, name) for name in JobPolicy.model_fields}
        return Policy(**choices, operator_retry=operator_retry)

    def read_platform(self, settings: Sequence[Setting] = ()) -> ImportedSettings:
        """Read from_platform as fields, beside the job's other settings."""
        return read_platform(self.from_platform, job_settings=settings)


def _snapshot_interval(entries: Mapping[str, str], document: Mapping[str, Any]) -> dict[str, int]:
    """Read snapshot_every_steps from the platform's entries, where they name it."""
    steps = read_snapshot_steps(TFT, entries[TFT]) if TFT in entries else None
    if steps is None:
        return {}
    interval = document.get("snapshot_every_steps", steps)
    if interval != steps:
        raise InputError(
            "",
            f"{TFT} TRE_SNAPSHOT_STEPS:{steps} and snapshot_every_steps={interval} contradict each "
            "other, keep one of them",
        )
    return {"snapshot_every_steps": steps}


class RankTableForm(StrEnum):
    """Formats of HCCL's rank table: v1.0 of clusters (Atlas A2), v1.2 of super pods (Atlas A3)."""

    V1_0 = "v1.0"
    V1_2 = "v1.2"


class OpRetrySpec(SettingsModel):
    """HCCL's own re-execution of a broken collective (Atlas A3 only)."""

    enabled: bool = Field(False, description="set HCCL_OP_RETRY_ENABLE for both levels")
    max_count: int = Field(1, ge=1, le=10, description="retries of one operator")
    hold_time_ms: int = Field(
        5000, ge=0, le=60_000, description="milliseconds to wait before the first retry"
    )
    interval_ms: int = Field(1000, ge=0, le=60_000, description="milliseconds between two retries")


@dataclass(frozen=True, slots=True)
class HcclTimeouts:
    """HCCL's own limits: until all ranks are connected, and of one collective."""

    connect_s: int
    exec_s: int


HCCL_TIMEOUTS: Mapping[str, HcclTimeouts] = {
    "standard": HcclTimeouts(600, 1836),  # HCCL's own default of the second
    "platform": HcclTimeouts(1200, 1800),
}
MEGABYTE = 1 << 20


def why_no_megabytes(value: str) -> str | None:
    """Explain why a size is not in MB: it is in bytes, or has a unit of its own.

    HCCL's reference gives HCCL_BUFFSIZE in MB, default 200; some guides have 209715200, the same
    in bytes. Taken for MB, that would be 200 TB, twice for every communicator.
    """
    if value.isdecimal() and int(value) >= MEGABYTE:
        megabytes = max(1, int(value) // MEGABYTE)
        return f"{value} is a number of bytes, HCCL_BUFFSIZE is in MB: write {megabytes}"
    with_unit = re.fullmatch(r"(\d+) ?([KMGT]i?B?|B)", value, re.IGNORECASE)
    if with_unit is not None:
        return f"{value!r} has a unit, HCCL_BUFFSIZE is a plain number of MB"
    return None


class CommSpec(SettingsModel):
    """Limits and ports of the collectives, set as HCCL_* and torch variables."""

    master_port: int = Field(
        0, ge=0, le=65_535, description="rendezvous port on the first node; 0: any free port"
    )
    timeout_s: float = Field(
        600.0, gt=0, description="seconds that one collective may take in torch"
    )
    timeouts: Literal["standard", "platform"] = Field(
        "standard", description="values of connect_timeout_s and exec_timeout_s where the job "
        "does not set them: standard, 600 and 1836 s; platform, 1200 and 1800 s, as in the "
        "platforms' documents"
    )  # fmt: skip
    connect_timeout_s: int | None = Field(
        None,
        ge=120,
        le=7200,
        description="seconds for all ranks to connect "
        "(HCCL_CONNECT_TIMEOUT); default: as `timeouts` says",
    )
    exec_timeout_s: int | None = Field(
        None,
        ge=1,
        le=2_147_483_647,
        description="seconds that one collective may take in HCCL "
        "(HCCL_EXEC_TIMEOUT); default: as `timeouts` says",
    )
    buffsize_mb: int = Field(
        200, ge=1, le=4096,
        description="HCCL_BUFFSIZE in MB, allocated twice for every communicator",
    )  # fmt: skip
    if_base_port: int = Field(
        60_000, ge=1024, le=65_520, description="HCCL_IF_BASE_PORT, the first of 32 host ports"
    )
    rank_table: RankTableForm | None = Field(
        None, description="write hccl.json for each attempt, with the addresses from "
        "/etc/hccn.conf or the rank table that MindCluster mounts, and set RANK_TABLE_FILE; v1.0 "
        "for clusters, v1.2 for super pods; default: no rank table"
    )  # fmt: skip
    op_retry: OpRetrySpec = Field(OpRetrySpec(), description="HCCL's operator-level retry")
    link_retry: bool = Field(
        False, description="gloo: repeat a collective over new links when a connection breaks; "
        "keeps a copy of the inputs of a step's collectives"
    )  # fmt: skip
    link_retry_s: float = Field(30.0, gt=0, description="seconds that link_retry may take")
    chip: Literal["a2", "a3", "950"] | None = Field(
        None, description="Atlas series of the NPUs; operator retry and network recovery require a3"
    )
    mc2: bool = Field(False, description="the program uses MC2 fused operators")
    watchdog: bool | None = Field(
        None, description="let the HCCL/NCCL watchdog end a process whose peer is gone; default: "
        "true for commands, false for sessions, which recover inside that process"
    )  # fmt: skip

    @property
    def timeouts_s(self) -> HcclTimeouts:
        """HCCL's limits in effect."""
        chosen = HCCL_TIMEOUTS[self.timeouts]
        return HcclTimeouts(
            self.connect_timeout_s or chosen.connect_s, self.exec_timeout_s or chosen.exec_s
        )

    @field_validator("buffsize_mb", mode="before")
    @classmethod
    def _check_unit(cls, value: Any) -> Any:
        if why_no_megabytes(str(value)):
            raise ValueError(why_no_megabytes(str(value)))
        return value

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        timeouts = self.connect_timeout_s, self.exec_timeout_s
        if self.timeouts != "standard" and None not in timeouts:
            raise ValueError(
                f"timeouts={self.timeouts} changes nothing beside connect_timeout_s and "
                "exec_timeout_s, leave one of them out"
            )
        last_port = self.if_base_port + 31
        if self.if_base_port <= self.master_port <= last_port:
            raise ValueError(
                f"master_port={self.master_port} lies inside the 32 ports from "
                f"if_base_port={self.if_base_port} to {last_port}"
            )
        if self.op_retry.enabled and self.chip != "a3":
            raise ValueError(
                f"op_retry.enabled=true and chip={self.chip}: operator retry needs chip a3"
            )
        if self.op_retry.enabled and self.mc2:
            raise ValueError("op_retry.enabled=true and mc2=true exclude each other")
        if self.op_retry.enabled and self.watchdog:
            raise ValueError("op_retry.enabled=true and watchdog=true exclude each other")
        return self

    def settings(self) -> tuple[Setting, ...]:
        """List settings that an entry of a platform may contradict."""
        enabled, is_on = self.op_retry.enabled, bool(self.watchdog)
        unset = "" if "op_retry" in self.model_fields_set else " (its default)"
        return (
            Setting(
                "operator_retry", enabled, f"comm.op_retry.enabled={format_value(enabled)}{unset}"
            ),
            Setting(Fact.CHIP, self.chip or "unknown", f"comm.chip={self.chip or 'unknown'}"),
            Setting(Fact.MC2, self.mc2, f"comm.mc2={format_value(self.mc2)}"),
            Setting(Fact.WATCHDOG, is_on, f"comm.watchdog={format_value(is_on)}"),
        )
