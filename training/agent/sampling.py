"""Looking at the node while an attempt runs, in a thread of its own. Times are seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from training.monitor.sample import NodeSample
from training.monitor.sources.sampling import Sampler


class Sampling:
    """Keeps the newest look at the node.

    Args:
        folder: the container's.
        tell: called with every sample, in the thread that looks.

    Attributes:
        newest: sample, None before the first; stays when the attempt has ended.
    """

    def __init__(
        self, folder: Path, tell: Callable[[NodeSample], object] = lambda _sample: None
    ) -> None:
        self._tell = tell
        self.newest: NodeSample | None = None
        self._folder = folder
        self._ended = threading.Event()

    def begin(self, num_devices: int, every_s: float) -> None:
        """Look at these devices and the host from now on, once every so often."""
        self.end()
        self._ended = threading.Event()
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
                self.newest = sample
                self._tell(sample)
            ended.wait(every_s)
