"""Whether a program divides its losses by the number of micro-batches, as the step does itself.

Programs that accumulate gradients by hand do so. Done twice, the gradient is too small by that
number; clipping and adaptive optimizers hide it, so that nothing but a slower curve shows it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from torch import Tensor

_log = logging.getLogger("perdure.runtime")

# An example in each of the first steps is enough, and reading a divisor may wait for the device.
MAX_LOOKS = 8


class DivisionCheck:
    """Looks at the first losses of a process, and warns once.

    Args:
        notice: takes what is wrong, beside the log of the process.
    """

    def __init__(self, notice: Callable[[str], None] = lambda _: None) -> None:
        self._notice = notice
        self._left = MAX_LOOKS

    def look(self, loss: Tensor, num_micro_batches: int) -> None:
        """Warn if the last thing that was done to the loss is the division."""
        if self._left == 0 or num_micro_batches == 1:
            return
        self._left -= 1
        divisor = divisor_of(loss)
        if divisor is None or not math.isclose(divisor, num_micro_batches):
            return
        self._left = 0
        text = (
            f"the loss given to step.backward() was divided by {num_micro_batches}, the number of "
            "micro-batches of a step, and step.backward() divides by it as well: if that is the "
            "accumulation of gradients, leave the division out, or the gradient is too small"
        )
        _log.warning(text)
        self._notice(text)


def divisor_of(loss: Tensor) -> float | None:
    """The number that a tensor was divided by last, as autograd recorded it; None: it was not."""
    node = loss.grad_fn
    kind = type(node).__name__
    if kind not in {"DivBackward0", "MulBackward0"}:
        return None
    other = getattr(node, "_saved_other", None)
    if not isinstance(other, Tensor) or other.numel() != 1 or other.requires_grad:
        return None
    value = float(other)
    if kind == "DivBackward0":
        return value
    return 1.0 / value if value else None
