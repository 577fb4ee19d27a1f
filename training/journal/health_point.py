"""The health points of a run: what may be told of it before it is a fault."""

from __future__ import annotations

from enum import StrEnum


class HealthPoint(StrEnum):
    """What is looked at; each alert is about one of them."""

    UTILISATION_LOW = "utilisation_low"
    MEMORY_HIGH = "memory_high"
    DEVICE_UNHEALTHY = "device_unhealthy"
    LINK_DOWN = "link_down"
    LOSS_ABNORMAL = "loss_abnormal"
    STEP_SLOW = "step_slow"
    LATENCY_HIGH = "latency_high"
    STRAGGLER = "straggler"
    DATA_STARVED = "data_starved"
    CHECKPOINT_OLD = "checkpoint_old"
    DISK_FILLING = "disk_filling"
    HEARTBEAT_LOST = "heartbeat_lost"
