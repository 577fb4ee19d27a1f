"""The lab's command line: `python -m tests.ascend.lab [build | COMMAND ...]`."""

from __future__ import annotations

import os
import sys

from tests.ascend.lab.build import BuildFailed, build
from tests.ascend.lab.environment import environment

USAGE = """\
usage: python -m tests.ascend.lab build
       python -m tests.ascend.lab COMMAND ...   run it on emulated Ascend devices
"""


def main() -> int:
    """Build, and become the command. Returns the exit status where there is none."""
    command = sys.argv[1:]
    if not command or command[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if command else 2
    try:
        built = build()
    except (BuildFailed, FileNotFoundError) as error:
        print(f"no emulator: {error}", file=sys.stderr)
        return 2
    if command == ["build"]:
        print(built)
        return 0
    variables = environment(built, os.environ)
    os.environ["PATH"] = variables["PATH"]
    try:
        os.execvpe(command[0], command, variables)  # noqa: S606 no shell is wanted
    except FileNotFoundError:
        print(f"no such command: {command[0]}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
