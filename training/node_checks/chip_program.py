"""Have a device compute: takes its local index as argument, prints a check on stdout.

It is a process of its own because a device that fails may take the process with it; a fork from
the fork server of a container does not wait for imports.
"""

from __future__ import annotations

import sys

from perdure.training.device import pick_device
from perdure.training.node_checks import burn_in


def main() -> None:
    """Multiply twice, and compare with the known product."""
    check = burn_in.check_device(pick_device(int(sys.argv[1])), 0.0)
    sys.stdout.write(check.model_dump_json() + "\n")
    sys.stdout.flush()
