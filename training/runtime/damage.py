"""What injected faults do to a rank's tensors and connections."""

from __future__ import annotations

import math
from itertools import chain

import torch
from torch import Tensor

from training.runtime.process_group.connections import shut_down
from training.runtime.process_group.generations import Generations
from training.runtime.program import Training
from training.runtime.state.transfer import local_part


def damage_state(training: Training | None) -> None:
    """Overwrite the rank's whole state: weights, buffers, and what the optimizer keeps."""
    assert training is not None  # noqa: S101 steps come after register()
    kept = chain.from_iterable(one.values() for one in training.optimizer.state.values())
    with torch.no_grad():
        for value in chain(training.model.parameters(), training.model.buffers(), kept):
            if isinstance(value, Tensor):
                own = local_part(value)
                own.fill_(math.nan if own.is_floating_point() else -1)


def break_connections(generations: Generations | None) -> None:
    """Shut down the rank's connections to the others; None: it has none that can be restored."""
    if generations is not None:
        for connection in generations.connections().values():
            shut_down(connection.sockets)
