"""The Trainer of Hugging Face transformers, under Perdure. Written against transformers 5.24.

    from perdure.integrations.transformers import PerdureCallback

    trainer.add_callback(PerdureCallback(trainer))

In a process that `perdure run` has not started it does nothing.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from perdure.integrations.trainer_loop import TrainerLoop
from perdure.training.runtime.session import Session


class PerdureCallback(TrainerCallback):  # type: ignore[misc]  # follow_imports = "skip"
    """Has a Trainer restored, saved and watched, and recovered within its steps.

    Args:
        trainer: whose loop it is; before `trainer.train()`.

    Raises:
        InputError: a setting of the Trainer does not go together with that.
    """

    def __init__(self, trainer: Any) -> None:
        session = Session.current
        self._loop = TrainerLoop(session, trainer) if session is not None else None
        if self._loop is not None:
            self._loop.attach()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """The Trainer has applied a step."""
        if self._loop is not None:
            self._loop.applied()
