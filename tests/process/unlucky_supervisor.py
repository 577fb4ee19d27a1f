"""`python -m perdure`, with a mishap at the decision about the first attempt that fails.

The first argument names it: `hook` has the failure hook of the attempt raise, `before` and `after`
kill the process before the decision is on record, or right after it.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from perdure.cli import main
from perdure.tasks.pretrain import attempt
from perdure.training.journal.attempt_view import AttemptView
from perdure.training.recovery.faults import Fault
from perdure.training.recovery.rungs import Decision
from perdure.training.supervisor.finishing import Decider


def fail(_task: Any, _task_run: Any, _state: Any) -> None:
    raise RuntimeError("the hook could not decide")


def arrange(mishap: str) -> None:
    if mishap == "hook":
        attempt.on_failure_hooks = [fail]
        return
    ask_the_ladder = Decider.decide

    def decide(self: Decider, view: AttemptView, fault: Fault) -> Decision:
        if mishap == "after":
            ask_the_ladder(self, view, fault)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")

    Decider.decide = decide  # type: ignore[method-assign]


if __name__ == "__main__":
    arrange(sys.argv.pop(1))
    main()
