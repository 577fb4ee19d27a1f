"""The lab's command line: `python -m tests.kubernetes.lab --help`."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

from tests.kubernetes.lab import life, network
from tests.kubernetes.lab.build import build, obstacle
from tests.kubernetes.lab.cluster import Lab
from tests.kubernetes.lab.places import HUB_NAMESPACE, KUBECONFIG, PROGRAMS

ACTIONS = """\
build     build the programs, unless they are there
up        start the lab, or mend everything in the one that runs
down      end it
status    its nodes
exec      run a command in its hub, where the cluster's addresses are reached
kubectl   the same for kubectl, as an administrator
test      build, start, run pytest with the arguments that follow, end; or use KUBECONFIG's cluster
soak      the same for a run of PERDURE_SOAK_S, an hour by default, with an event every two minutes
"""


def main() -> int:
    """Do what is asked. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.kubernetes.lab",
        description=ACTIONS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=[line.split()[0] for line in ACTIONS.splitlines()])
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...")
    given = parser.parse_args()
    if given.action == "test":
        return _test(given.rest)
    if given.action == "soak":
        return _test(["tests/kubernetes/soak.py", *given.rest])
    if reason := obstacle():
        print(f"no lab: {reason}", file=sys.stderr)
        return 2
    if given.action in ("exec", "kubectl"):
        _become(given.rest if given.action == "exec" else [str(PROGRAMS / "kubectl"), *given.rest])
    if given.action == "status":
        return _status()
    steps: dict[str, Callable[[], object]] = {"build": build, "up": _up, "down": life.down}
    began_s = time.monotonic()
    steps[given.action]()
    print(f"{given.action}: {time.monotonic() - began_s:.0f} s")
    return 0


def _up() -> None:
    build()
    life.up()


def _become(command: Sequence[str]) -> None:
    line = network.inside(HUB_NAMESPACE, *command)
    os.environ["KUBECONFIG"] = str(KUBECONFIG)
    os.execvp(line[0], line)  # noqa: S606 no shell is wanted


def _status() -> int:
    if not life.is_up():
        print("down")
        return 1
    print(Lab().kubectl("get", "nodes", "-o", "wide"))
    print(f"KUBECONFIG={KUBECONFIG}")
    return 0


def _test(arguments: Sequence[str]) -> int:
    pytest = [sys.executable, "-m", "pytest", *arguments]
    if os.environ.get("KUBECONFIG", str(KUBECONFIG)) not in ("", str(KUBECONFIG)):
        return subprocess.run(pytest, check=False).returncode
    if reason := obstacle():
        print(f"NOT TESTED on Kubernetes: {reason}", file=sys.stderr)
        return 1 if os.environ.get("CI") else 0
    signal.signal(signal.SIGTERM, _leave)  # so that the lab is ended then, too
    try:
        _up()
        environment = {**os.environ, "KUBECONFIG": str(KUBECONFIG)}
        line = network.inside(HUB_NAMESPACE, *pytest)
        return subprocess.run(line, env=environment, check=False).returncode
    finally:
        life.down()


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
