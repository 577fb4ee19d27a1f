"""Each part of watching alone: the heartbeat of a step, looks at a node and at all health points.

Each figure is measured in rounds and printed as least, median and most. What a worker pays per
step is the heartbeat alone; the other two are paid by the agent and by the supervisor, beside
the training. Times are seconds unless a name says otherwise.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from perdure.training.config.watch import WatchSpec
from perdure.training.journal.events import StepRecord
from perdure.training.liveness.heartbeat import HeartbeatWriter, Phase
from perdure.training.telemetry.alerts import AlertMonitor, RunSample
from perdure.training.telemetry.sampling import Sampler
from perdure.training.wire.rank_snapshot import RankSnapshot

STEPS = 2000
COLLECTIVES = 4  # of a step: three buckets of gradients and the vote
LOOKS = 50
STEP_S = 0.05
LIMIT = 0.005


def measure(rounds: int) -> bool:
    """Print the figures. Returns whether a step of 50 ms pays less than half a percent."""
    beats_s = [_heartbeats_s() for _ in range(rounds)]
    print(f"heartbeat of a step, {COLLECTIVES} collectives: {_spread(beats_s, 1e6)} us")
    with tempfile.TemporaryDirectory() as folder:
        sampler = Sampler(Path(folder), 8)
        sampler.take_sample()  # which finds the tools, once
        samples_s = [_cpu_s(sampler.take_sample) for _ in range(rounds)]
    period_s = WatchSpec().sample_every_s
    share = median(samples_s) / period_s
    print(f"look at a node: {_spread(samples_s, 1e3)} ms of processor, {share:.3%} of a core")
    for num_ranks in (8, 1024):
        looks_s = [_look_s(num_ranks) for _ in range(rounds)]
        print(f"look at the health of {num_ranks} ranks: {_spread(looks_s, 1e3)} ms")
    share = median(beats_s) / STEP_S
    is_met = share < LIMIT
    verdict = "met" if is_met else "MISSED"
    print(f"a step of {1000 * STEP_S:.0f} ms pays {share:.3%}; under {LIMIT:.1%}: {verdict}")
    return is_met


def _heartbeats_s() -> float:
    """Of one step."""
    with tempfile.TemporaryDirectory() as folder:
        writer = HeartbeatWriter(Path(folder) / "heartbeat-0")
        began_s = time.perf_counter()
        for step in range(STEPS):
            writer.beat(phase=Phase.DATA)
            writer.record_data_wait(1000)
            writer.beat(phase=Phase.STEP)
            for _ in range(COLLECTIVES):
                writer.enter_collective("allreduce in world")
                writer.leave_collective()
            writer.record_vote(1000)
            writer.beat(step=step)
        return (time.perf_counter() - began_s) / STEPS


def _cpu_s(act: Callable[[], object]) -> float:
    before_s = time.process_time()
    act()
    return time.process_time() - before_s


def _look_s(num_ranks: int) -> float:
    """Of one look at every rank."""
    watch = AlertMonitor(WatchSpec())
    looks = [
        RunSample(
            at_s=float(number),
            ranks=[
                RankSnapshot(rank, f"node-{rank // 8}", rank % 8, rank, 2 * number, "step",
                             waited_s=0.1 * number, data_s=0.01 * number, latency_s=0.001)
                for rank in range(num_ranks)
            ],
            steps=[
                StepRecord(2 * number + i, 3.0, 1.0, 1e-3, 1.0, None, 0.0, 0.5, 0, 0, 1, 1)
                for i in range(2)
            ],
        )
        for number in range(LOOKS)
    ]  # fmt: skip
    began_s = time.perf_counter()
    for look in looks:
        watch.update(look)
    return (time.perf_counter() - began_s) / LOOKS


def _spread(values: list[float], scale: float) -> str:
    return "/".join(f"{scale * one:.2f}" for one in (min(values), median(values), max(values)))
