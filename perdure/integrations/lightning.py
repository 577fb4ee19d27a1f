"""The Trainer of Lightning, under Perdure. Written against lightning 2.6.

    from perdure.integrations.lightning import PerdureCallback

    trainer = Trainer(callbacks=[PerdureCallback()], ...)

In a process that `perdure run` has not started it does nothing.
"""

from __future__ import annotations

from typing import Any, Self

import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors import data_connector
from torch import Tensor

from perdure.integrations.lightning_loop import LightningLoop
from perdure.training.errors import InputError
from perdure.training.runtime.session import Session

_broadcast_to_all = DDPStrategy.broadcast
_reduce_of_all = DDPStrategy.reduce


class PerdureCallback(Callback):  # type: ignore[misc]  # follow_imports = "skip"
    """Has a Trainer restored, saved and watched, and recovered within its steps."""

    def __init__(self) -> None:
        self._loop: LightningLoop | None = None
        if Session.current is not None:
            # What comes before `setup`, a rank that is replaced does alone: it has no other one to
            # set up a process group with, nor to receive an object from.
            data_connector._InfiniteBarrier = _Together  # noqa: SLF001 there is no public way
            DDPStrategy.broadcast = _broadcast
            DDPStrategy.reduce = _reduce

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The Trainer is about to fit.

        Raises:
            InputError: a setting of the Trainer does not go together with the session.
        """
        if Session.current is None or stage != "fit":
            return
        if self._loop is not None:
            raise InputError("trainer.fit", "a second one: the steps of a run are those of one fit")
        self._loop = LightningLoop(Session.current, trainer, pl_module)
        self._loop.attach()


def _broadcast(strategy: Any, obj: Any, src: int = 0) -> Any:
    session = Session.current
    if session is not None and session.is_alone:
        return obj
    return _broadcast_to_all(strategy, obj, src)


def _reduce(strategy: Any, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
    """Divide a sum on the host, as Lightning does when it sees gloo, which has no mean."""
    if reduce_op not in ("mean", "avg") or strategy.root_device.type != "cpu":
        return _reduce_of_all(strategy, tensor, group, reduce_op)
    total = _reduce_of_all(strategy, tensor, group, "sum")
    if not isinstance(total, Tensor) or (Session.current is not None and Session.current.is_alone):
        return total
    return total.copy_(total / dist.get_world_size(group))


class _Together:
    """Ends for all ranks together."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        dist.barrier()
