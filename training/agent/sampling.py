"""Looking at the node while an attempt runs, in a thread of its own. Times are seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from training.health.sources.sampling import LOOK_LIMIT_S, Sampler
from training.wire.sample import NodeSample

MISSED_LOOKS = 3


class Sampling:
    """Keeps the newest look at the node.

    Args:
        folder: the container's.
        tell: called with every sample, in the thread that looks.

        clock: monotonic clock.
    """

    def __init__(
        self,
        folder: Path,
        tell: Callable[[NodeSample], object] = lambda _sample: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell = tell
        self._newest: NodeSample | None = None
        self._folder = folder
        self._ended = threading.Event()
        self._clock = clock
        self._taken_s = self._stale_s = 0.0

    @property
    def newest(self) -> NodeSample | None:
        """The newest sample, None before the first; stays when the attempt has ended.

        A look that hangs leaves a gap: what was seen before it says nothing of now.
        """
        sample, silent_s = self._newest, self._clock() - self._taken_s
        if sample is None or self._ended.is_set() or silent_s <= self._stale_s:
            return sample
        return NodeSample(at_s=sample.at_s, gaps=(f"no look at the node for {silent_s:.0f} s",))

    def begin(self, num_devices: int, every_s: float) -> None:
        """Look at these devices and the host from now on, once every so often."""
        self.end()
        self._ended = threading.Event()
        self._stale_s = MISSED_LOOKS * every_s + LOOK_LIMIT_S
        sampler = Sampler(self._folder, num_devices)
        arguments = (sampler, every_s, self._ended)
        threading.Thread(
            target=self._look, args=arguments, name="perdure-sampling", daemon=True
        ).start()

    def end(self) -> None:
        """No more looks; returns at once."""
        self._ended.set()

    def _look(self, sampler: Sampler, every_s: float, ended: threading.Event) -> None:
        # A tool may take its time: the sample of an attempt that is over counts no more.
        while not ended.is_set():
            sample = sampler.look()
            if not ended.is_set():
                self._taken_s = self._clock()
                self._newest = sample
                self._tell(sample)
            ended.wait(every_s)
