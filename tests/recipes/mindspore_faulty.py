"""The program of examples/mindspore_train.py, whose rank 1 raises once a file asks for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from mindspore.communication import get_rank
from mindspore.train import Callback
from mindspore_train import main, read_arguments


class RaiseOnRequest(Callback):  # type: ignore[misc]  # not installed beside Perdure
    """Raise behind a step, once."""

    def on_train_step_end(self, run_context: Any) -> None:
        """Raise where the file is."""
        request = read_arguments().out / "raise"
        if get_rank() == 1 and request.exists():
            request.unlink()
            raise RuntimeError("the batch is not as it was")


if __name__ == "__main__":
    main([RaiseOnRequest()])
