"""What the coordinator exports to Prometheus."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from perdure.training.coordinator.metrics import BASE_LABELS, AttemptNow, RunMetrics
from perdure.training.journal.events import StepRecord
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.protocol import PauseBegan, PauseEnded
from perdure.training.recovery.rungs import Recovery, Rung
from perdure.training.recovery.stages import Stage
from perdure.training.wire.node import DeviceSample, HostSample, NodeSample
from tests.unit.journal.histories import began, ended

LABELS = {"run_id": "run-1", "placement": "2", "attempt": "3"}
RECORD = StepRecord(
    step=7, loss=1.5, grad_norm=0.5, lr=1e-3, tokens_per_s=1000.0, mfu=0.4, at_s=99.0, step_s=2.5,
    position=56, epoch=0, placement=2, attempt=3,
)  # fmt: skip
FAULT = Fault(
    fault_class=FaultClass.NATIVE_CRASH, at_s=90.0, node="node-0", rank=1, evidence="died"
)
SAMPLE = NodeSample(
    at_s=95.0,
    devices=(
        DeviceSample(index=0, utilisation_percent=80.0, memory_percent=50.0, temperature_c=61.0,
                     power_w=300.0, memory_total_bytes=64 << 30, link_is_up=True),
        DeviceSample(index=1, health="Critical", error_codes=("80E01801",)),
    ),
    host=HostSample(cpu_percent=25.0, disk_free_bytes=1000, disk_free_percent=10.0),
)  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def now() -> AttemptNow:
    return AttemptNow(Stage.TRAINING, 2, {"training": 4})


@pytest.fixture
def metrics(clock, now):
    past = [Recovery(fault=FAULT, rung=Rung.IN_PLACE_RESTART, progressed=True)] * 2
    return RunMetrics(
        list(LABELS.values()), target_step=60, state=lambda: now, past=past, clock=clock
    )


@pytest.fixture
def value(metrics) -> Callable[..., Any]:
    def value(name: str, **further: str) -> float | None:
        return metrics.registry.get_sample_value(name, {**LABELS, **further})

    return value


BEGAN = began(1, Rung.PROCESS_REPLACE, FAULT)


def test_every_series_carries_run_placement_and_attempt(metrics):
    metrics.step(RECORD)
    metrics.sampled("node-0", SAMPLE)
    metrics.record(BEGAN)
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    assert len(samples) > 50
    assert all({name: s.labels[name] for name in BASE_LABELS} == LABELS for s in samples)


def test_before_the_first_step_there_is_no_series_of_steps(value):
    assert value("perdure_step") is None
    assert value("perdure_loss") is None
    assert value("perdure_target_step") == 60


def test_the_newest_step_is_exported_and_all_durations_are_counted(metrics, value):
    metrics.step(RECORD)
    metrics.step(RECORD)
    assert value("perdure_step") == 7
    assert value("perdure_loss") == 1.5
    assert value("perdure_tokens_per_second") == 1000.0
    assert value("perdure_mfu_ratio") == 0.4
    assert value("perdure_step_duration_seconds_count") == 2
    assert value("perdure_step_duration_seconds_sum") == 5.0
    assert value("perdure_step_duration_seconds_bucket", le="2.0") == 0
    assert value("perdure_step_duration_seconds_bucket", le="3.0") == 2


def test_without_a_peak_there_is_no_mfu(metrics, value):
    fields = {name: getattr(RECORD, name) for name in RECORD.__slots__}
    metrics.step(StepRecord(**{**fields, "mfu": None}))
    assert value("perdure_mfu_ratio") is None


def test_the_age_of_a_checkpoint_grows_from_the_begin_of_the_attempt_or_from_a_commit(
    metrics, value, clock
):
    clock.now_s = 130.0
    assert value("perdure_checkpoint_age_seconds") == 30.0
    assert value("perdure_checkpoint_committed_step") is None
    metrics.committed(10, at_s=125.0)
    assert value("perdure_checkpoint_age_seconds") == 5.0
    assert value("perdure_checkpoint_committed_step") == 10


def test_a_recovery_is_counted_once_with_its_rung_and_its_fault(metrics, value):
    which = {"rung": "process_replace", "fault_class": "native_crash"}
    metrics.record(BEGAN)
    assert value("perdure_recoveries_total", **which, outcome="recovered") == 0
    metrics.record(ended(1, steps_lost=1, duration_s=0.4))
    assert value("perdure_recoveries_total", **which, outcome="recovered") == 1
    assert value("perdure_recoveries_total", **which, outcome="failed") == 0
    rung = {"rung": "process_replace"}
    assert value("perdure_recovery_duration_seconds_bucket", **rung, le="0.5") == 1
    assert value("perdure_steps_lost_total") == 1


def test_a_recovery_that_failed_has_no_duration(metrics, value):
    metrics.record(BEGAN)
    metrics.record(ended(1, None, succeeded=False, why="no"))
    which = {"rung": "process_replace", "fault_class": "native_crash"}
    assert value("perdure_recoveries_total", **which, outcome="failed") == 1
    assert value("perdure_recovery_duration_seconds_count", rung="process_replace") is None


def test_recoveries_before_the_attempt_are_counted_apart(value):
    which = {"rung": "in_place_restart", "fault_class": "native_crash"}
    assert value("perdure_past_recoveries", **which) == 2


def test_one_stage_is_one_and_the_others_are_zero(value):
    stages = {stage: value("perdure_attempt_stage", stage=stage.value) for stage in Stage}
    assert stages == {**dict.fromkeys(Stage, 0.0), Stage.TRAINING: 1.0}
    assert value("perdure_generation") == 2
    assert value("perdure_ranks", state="training") == 4


def test_a_pause_shows(metrics, value):
    assert value("perdure_paused") == 0
    metrics.record(PauseBegan(at_s=1.0, number=1, step=7))
    assert value("perdure_paused") == 1
    metrics.record(PauseEnded(at_s=2.0, number=1, step=7))
    assert value("perdure_paused") == 0


def test_devices_and_hosts_are_exported_in_base_units(metrics, value):
    metrics.sampled("node-0", SAMPLE)
    first = {"node": "node-0", "device": "0"}
    assert value("perdure_device_utilisation_ratio", **first) == 0.8
    assert value("perdure_device_memory_ratio", **first) == 0.5
    assert value("perdure_device_temperature_celsius", **first) == 61.0
    assert value("perdure_device_power_watts", **first) == 300.0
    assert value("perdure_device_healthy", **first) == 1
    second = {"node": "node-0", "device": "1"}
    assert value("perdure_device_healthy", **second) == 0
    assert value("perdure_device_error_codes", **second) == 1
    assert value("perdure_device_power_watts", **second) is None, "its tool does not say"
    assert value("perdure_host_cpu_ratio", node="node-0") == 0.25
    assert value("perdure_host_memory_ratio", node="node-0") is None
    assert value("perdure_disk_free_bytes", node="node-0") == 1000
    assert value("perdure_sample_age_seconds", node="node-0") == 5.0


def test_a_node_whose_agent_is_gone_shows_nothing_old(metrics, value):
    metrics.sampled("node-0", SAMPLE)
    metrics.forget("node-0")
    metrics.forget("node-0")
    assert value("perdure_device_healthy", node="node-0", device="0") is None


def test_the_endpoint_serves_prometheus_text(metrics):
    metrics.step(RECORD)
    port = metrics.serve("127.0.0.1", 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=240) as answer:
        text = answer.read().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["perdure_step"].samples[0].value == 7
    assert families["perdure_step_duration_seconds"].type == "histogram"
    assert families["perdure_recoveries"].type == "counter"
    (info,) = families["perdure_build_info"].samples
    assert set(info.labels) == {*BASE_LABELS, "version", "torch", "python"}


def test_a_port_that_is_taken_is_an_error_to_the_caller(metrics):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            metrics.serve("127.0.0.1", taken.getsockname()[1])
