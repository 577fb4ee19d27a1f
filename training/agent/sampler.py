"""The sampler of a node, in a thread of its own while an attempt runs. Times are seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from perdure.training.telemetry.sampling import SAMPLE_LIMIT_S, Sampler
from perdure.training.wire.node import NodeSample

MISSED_SAMPLES = 3


class PeriodicSampler:
    """Sampler that keeps the newest sample of the node.

    Args:
        folder: the container's folder.
        clock: monotonic clock.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._newest: NodeSample | None = None
        self._folder = folder
        self._ended = threading.Event()
        self._due = threading.Event()
        self._clock = clock
        self._taken_s = self._stale_s = 0.0

    @property
    def newest(self) -> NodeSample | None:
        """The newest sample, None before the first; it remains when the attempt has ended.

        A sampler that hangs leaves a gap: its last sample is out of date.
        """
        sample, silent_s = self._newest, self._clock() - self._taken_s
        if sample is None or self._ended.is_set() or silent_s <= self._stale_s:
            return sample
        gap = f"no sample of the node for {silent_s:.0f} s"
        return NodeSample(at_s=sample.at_s, gaps=(gap,), is_complete=False)

    def begin(
        self, num_devices: int, every_s: float, on_sample: Callable[[NodeSample], object]
    ) -> None:
        """Sample the devices and the host from now on.

        Args:
            num_devices: devices of the node.
            every_s: time from one sample to the next.
            on_sample: called with every sample, in the sampling thread.
        """
        self.end()
        self._ended, self._due = threading.Event(), threading.Event()
        self._stale_s = MISSED_SAMPLES * every_s + SAMPLE_LIMIT_S
        threading.Thread(
            target=self._run,
            args=(Sampler(self._folder, num_devices), every_s, on_sample, self._ended, self._due),
            name="perdure-sampling",
            daemon=True,
        ).start()

    def end(self) -> None:
        """Stop sampling; returns at once."""
        self._ended.set()
        self._due.set()

    def hasten(self) -> None:
        """Take the next sample now."""
        self._due.set()

    def _run(
        self,
        sampler: Sampler,
        every_s: float,
        on_sample: Callable[[NodeSample], object],
        ended: threading.Event,
        due: threading.Event,
    ) -> None:
        # A tool may take its time: the sample of an attempt that is over counts no more.
        while not ended.is_set():
            sample = sampler.take_sample()
            if not ended.is_set():
                self._taken_s = self._clock()
                self._newest = sample
                on_sample(sample)
            due.wait(every_s)
            due.clear()
