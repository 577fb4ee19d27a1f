"""When a command that prints nothing any more hangs: by the output of all of its nodes.

Of most programs one rank alone prints, so a node that prints nothing says nothing. Pure. Times are
seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class SilentOutputDetector:
    """Judges the output of one attempt.

    Attributes:
        limit_s: how long no node may print anything.
    """

    limit_s: float
    _seen: dict[str, int] = field(default_factory=dict)
    _grew_s: float | None = None

    def judge(self, output_bytes: Mapping[str, int], *, now_s: float) -> float | None:
        """Take in a look; for how long nothing has been printed, once that is beyond the limit.

        Args:
            output_bytes: length of the output so far, by node; of nodes that gave no answer none.
            now_s: the time.
        """
        has_grown = any(self._seen.get(node) != size for node, size in output_bytes.items())
        self._seen.update(output_bytes)
        if has_grown or self._grew_s is None:
            self._grew_s = now_s
        silent_s = now_s - self._grew_s
        return silent_s if silent_s > self.limit_s else None
