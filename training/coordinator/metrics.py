"""What the coordinator exports to Prometheus about its attempt.

Names follow Prometheus' conventions: base units, `_total` for counters, `_ratio` for shares of
one. Every series carries run_id, placement and attempt. Most are computed at each scrape,
from the newest report of each thing; only what is counted is kept as a counter. Times are
seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client import Counter as CounterMetric
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from perdure.training.coordinator.scrapes import serve_scrapes
from perdure.training.journal.events import LedgerEvent, StepRecord
from perdure.training.recovery.protocol import PauseBegan, PauseEnded, RecoveryBegan, RecoveryEnded
from perdure.training.recovery.rungs import Recovery
from perdure.training.recovery.stages import Stage
from perdure.training.wire.node import DeviceSample, HostSample, NodeSample

BASE_LABELS = ("run_id", "placement", "attempt")
STEP_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300, 600)
RECOVERY_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
SUCCEEDED, FAILED = "recovered", "failed"  # values of the label `outcome`
PACKAGES = (("version", "perdure"), ("torch", "torch"))

# Of the newest step record, device sample and host sample: name, what it is, where it is read.
STEP_GAUGES: Sequence[tuple[str, str, Callable[[StepRecord], float | None]]] = (
    ("perdure_step", "Completed optimizer steps.", lambda r: r.step),
    ("perdure_loss", "Mean over the global batch.", lambda r: r.loss),
    ("perdure_grad_norm", "Before clipping.", lambda r: r.grad_norm),
    ("perdure_learning_rate", "Of the first parameter group.", lambda r: r.lr),
    ("perdure_tokens_per_second", "Of all ranks together.", lambda r: r.tokens_per_s),
    ("perdure_mfu_ratio", "Model FLOP/s over peak FLOP/s.", lambda r: r.mfu),
    ("perdure_samples_consumed", "Position in the data, global samples.", lambda r: r.position),
    ("perdure_step_timestamp_seconds", "When the step was completed.", lambda r: r.at_s),
)
DEVICE_GAUGES: Sequence[tuple[str, str, Callable[[DeviceSample], float | None]]] = (
    (
        "perdure_device_utilisation_ratio",
        "Share of time in which the device worked.",
        lambda d: _ratio(d.utilisation_percent),
    ),
    (
        "perdure_device_memory_ratio",
        "Used share of the device's memory.",
        lambda d: _ratio(d.memory_percent),
    ),
    (
        "perdure_device_memory_total_bytes",
        "Memory of the device.",
        lambda d: d.memory_total_bytes,
    ),
    ("perdure_device_temperature_celsius", "Of the device.", lambda d: d.temperature_c),
    ("perdure_device_power_watts", "Drawn by the device.", lambda d: d.power_w),
    (
        "perdure_device_healthy",
        "1 when neither its driver nor its link reports a fault.",
        lambda d: float(d.is_healthy),
    ),
    (
        "perdure_device_link_up",
        "1 when its network port has a link.",
        lambda d: None if d.link_is_up is None else float(d.link_is_up),
    ),
    (
        "perdure_device_error_codes",
        "Number of error codes that its driver reports.",
        lambda d: len(d.error_codes),
    ),
)
HOST_GAUGES: Sequence[tuple[str, str, Callable[[HostSample], float | None]]] = (
    ("perdure_host_cpu_ratio", "Used share of the processors.", lambda h: _ratio(h.cpu_percent)),
    ("perdure_host_memory_ratio", "Used share of memory.", lambda h: _ratio(h.memory_percent)),
    ("perdure_disk_free_bytes", "Where the node's scratch folder is.", lambda h: h.disk_free_bytes),
    ("perdure_disk_free_ratio", "Likewise.", lambda h: _ratio(h.disk_free_percent)),
)


@dataclass(frozen=True, slots=True)
class AttemptNow:
    """The state of the attempt at the moment.

    Attributes:
        stage: of the attempt.
        generation: of its process groups.
        ranks: how many there are in each state.
    """

    stage: Stage
    generation: int
    ranks: Mapping[str, int]


class RunMetrics(Collector):
    """The metrics of one attempt, in a registry of their own.

    Args:
        labels: values of `BASE_LABELS`.
        target_step: of the run.
        state: of the attempt; called from the threads of the endpoint.
        past: recoveries of the run so far.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        labels: Sequence[str],
        *,
        target_step: int | None,
        state: Callable[[], AttemptNow],
        past: Sequence[Recovery] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._labels = tuple(labels)
        self._target_step = target_step
        self._state = state
        self._clock = clock
        self._began_s = clock()
        self._past = Counter(
            (recovery.rung.value, recovery.fault.fault_class.value) for recovery in past
        )
        self._step: StepRecord | None = None
        self._committed_step: int | None = None
        self._committed_s = self._began_s
        self._is_paused = False
        self._samples: dict[str, NodeSample] = {}
        self._began: dict[int, tuple[str, str]] = {}  # rung and fault class, by number
        self.registry = CollectorRegistry()
        self._steps = _step_durations(self.registry).labels(*self._labels)
        self._recoveries = CounterMetric(
            "perdure_recoveries_total",
            "Recoveries inside the processes of the attempt that came to their end.",
            (*BASE_LABELS, "rung", "fault_class", "outcome"),
            registry=self.registry,
        )
        self._durations = _recovery_durations(self.registry)
        self._lost = CounterMetric(
            "perdure_steps_lost_total",
            "Completed steps that were done again after recoveries inside the processes.",
            BASE_LABELS,
            registry=self.registry,
        ).labels(*self._labels)
        self.registry.register(self)

    def step(self, record: StepRecord) -> None:
        """A step was completed."""
        self._step = record
        self._steps.observe(record.step_s)

    def committed(self, step: int, *, at_s: float) -> None:
        """A checkpoint was committed."""
        self._committed_step, self._committed_s = step, at_s

    def record(self, event: LedgerEvent) -> None:
        """The coordinator recorded an event."""
        match event:
            case RecoveryBegan():
                which = (event.decision.rung.value, event.fault.fault_class)
                self._began[event.number] = which
                # A counter that begins with its first event has no increase to show.
                for outcome in (SUCCEEDED, FAILED):
                    self._recoveries.labels(*self._labels, *which, outcome)
            case RecoveryEnded():
                self._recovery_ended(event)
            case PauseBegan():
                self._is_paused = True
            case PauseEnded():
                self._is_paused = False
            case _:
                pass  # a last save ends the attempt; alerts are the supervisor's

    def _recovery_ended(self, event: RecoveryEnded) -> None:
        rung, fault_class = self._began.pop(event.number)
        outcome = SUCCEEDED if event.succeeded else FAILED
        self._recoveries.labels(*self._labels, rung, fault_class, outcome).inc()
        if event.succeeded:
            self._durations.labels(*self._labels, rung).observe(event.duration_s)
            self._lost.inc(event.steps_lost)

    def sampled(self, node: str, sample: NodeSample) -> None:
        """An agent has sampled its node."""
        self._samples[node] = sample

    def forget(self, node: str) -> None:
        """The agent of a node is not connected any more: its state is not known."""
        self._samples.pop(node, None)

    def collect(self) -> Iterator[Metric]:
        """Everything that is no counter, as it is now; what is not known yet has no series."""
        yield self._info()
        yield from self._attempt_gauges()
        if self._step is not None:
            for name, text, read in STEP_GAUGES:
                yield self._gauge(name, text, read(self._step))
        # Copied: agents come and go while Prometheus scrapes.
        samples = sorted(self._samples.copy().items())
        ages = [((node,), max(0.0, self._clock() - sample.at_s)) for node, sample in samples]
        yield self._gauges("perdure_sample_age_seconds", "Of the newest sample of a node.",
                           ages, further=("node",))  # fmt: skip
        for name, text, read_device in DEVICE_GAUGES:
            of_devices = [
                ((node, str(device.index)), read_device(device))
                for node, sample in samples
                for device in sample.devices
            ]
            yield self._gauges(name, text, of_devices, further=("node", "device"))
        for name, text, read_host in HOST_GAUGES:
            of_hosts = [((node,), read_host(sample.host)) for node, sample in samples]
            yield self._gauges(name, text, of_hosts, further=("node",))

    def _attempt_gauges(self) -> Iterator[Metric]:
        state = self._state()
        yield from (
            self._gauge("perdure_target_step", "At which the run is complete.", self._target_step),
            self._gauge("perdure_generation", "Of the process groups, from 1.", state.generation),
            self._gauge("perdure_attempt_start_time_seconds", "When the attempt began.",
                        self._began_s),
            self._gauge("perdure_paused", "1 while all ranks are paused at one step boundary.",
                        self._is_paused),
            self._gauge("perdure_checkpoint_age_seconds",
                        "Since the newest commit, before the first since the attempt began.",
                        max(0.0, self._clock() - self._committed_s)),
            self._gauge("perdure_checkpoint_committed_step",
                        "Of the newest checkpoint of the attempt.", self._committed_step),
        )  # fmt: skip
        stages = [((stage.value,), float(stage is state.stage)) for stage in Stage]
        yield self._gauges("perdure_attempt_stage", "1 for the stage that the attempt is in.",
                           stages, further=("stage",))  # fmt: skip
        yield self._gauges("perdure_ranks", "Ranks in each state; one may be in several.",
                           [((name,), count) for name, count in sorted(state.ranks.items())],
                           further=("state",))  # fmt: skip
        yield self._gauges("perdure_past_recoveries", "Recoveries of the run before this attempt.",
                           sorted(self._past.items()), further=("rung", "fault_class"))  # fmt: skip

    def _gauge(self, name: str, text: str, value: float | None) -> Metric:
        return self._gauges(name, text, [((), value)])

    def _gauges(
        self,
        name: str,
        text: str,
        values: Iterable[tuple[Sequence[str], float | None]],
        *,
        further: Sequence[str] = (),
    ) -> Metric:
        family = GaugeMetricFamily(name, text, labels=(*BASE_LABELS, *further))
        for labels, value in values:
            if value is not None:
                family.add_metric((*self._labels, *labels), value)
        return family

    def _info(self) -> Metric:
        family = InfoMetricFamily("perdure_build", "What runs.", labels=BASE_LABELS)
        versions = {name: package_version(package) for name, package in PACKAGES}
        family.add_metric(self._labels, {**versions, "python": platform.python_version()})
        return family

    def describe(self) -> Iterator[Metric]:
        """Nothing in advance: the registry need not ask for values to know the names."""
        return iter(())

    def serve(self, host: str, port: int) -> int:
        """Answer scrapes in threads of their own, until the process ends. Returns the port.

        Raises:
            OSError: the port is taken, or the host is none of this machine's.
        """
        return serve_scrapes(self.registry, host, port)


def _step_durations(registry: CollectorRegistry) -> Histogram:
    return Histogram(
        "perdure_step_duration_seconds",
        "How long completed steps took.",
        BASE_LABELS,
        buckets=STEP_BUCKETS_S,
        registry=registry,
    )


def _recovery_durations(registry: CollectorRegistry) -> Histogram:
    return Histogram(
        "perdure_recovery_duration_seconds",
        "From the notice of a fault until training went on.",
        (*BASE_LABELS, "rung"),
        buckets=RECOVERY_BUCKETS_S,
        registry=registry,
    )


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def package_version(package: str) -> str:
    """Return the version of an installed package, or "unknown"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"  # run from a source tree
