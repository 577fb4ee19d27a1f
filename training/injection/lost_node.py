"""Become a lost node: `python -m perdure.training.injection.lost_node MARKER`, run by its agent.

The program kills all processes in the container with that marker. The first process of a pod then
stays and answers nobody: to the cluster the pod runs, as if its node had just lost its power.
"""

from __future__ import annotations

import os
import signal
import sys

from perdure.training.processes import kill_container


def main() -> None:
    """Lose the node."""
    kill_container(sys.argv[1])
    while os.getpid() == 1:
        signal.pause()


if __name__ == "__main__":
    main()
