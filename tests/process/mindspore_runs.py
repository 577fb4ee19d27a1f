"""MindSpore in an environment of its own, and the losses of an undisturbed program."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from perdure.training.processes import free_port
from tests.process.harness import REPO
from tests.process.program_jobs import EXAMPLES

BIN = REPO / ".venv-mindspore/bin"
PATH = f"{BIN}:/usr/bin:/bin"
EPOCHS, PER_EPOCH = 6, 5
STEPS = EPOCHS * PER_EPOCH

MARKS = [
    pytest.mark.process,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (BIN / "msrun").exists(), reason="no MindSpore: make test-mindspore installs it"
    ),
]
_LINE = re.compile(r"^epoch: (\d+) step: (\d+), loss is (\S+)")


def losses(lines: Iterable[str]) -> dict[int, str]:
    """What was printed of every step."""
    found = (match for line in lines if (match := _LINE.search(line)))
    return {(int(m[1]) - 1) * PER_EPOCH + int(m[2]): m[3] for m in found}


@cache
def losses_by_hand() -> dict[int, str]:
    """What the program prints of every step without Perdure, started by msrun."""
    out = Path(mkdtemp(prefix="mindspore-by-hand-"))
    done = subprocess.run(
        [
            "msrun", "--worker_num=2", "--local_worker_num=2", "--master_addr=127.0.0.1",
            f"--master_port={free_port()}", f"--log_dir={out}/logs", "--join=True",
            "mindspore_train.py", "--epochs", str(EPOCHS), "--out", str(out),
        ],
        cwd=EXAMPLES, env={**os.environ, "PATH": PATH}, capture_output=True, text=True,
        timeout=400, check=True,
    )  # fmt: skip
    curve = losses(done.stdout.splitlines())
    assert sorted(curve) == list(range(1, STEPS + 1))
    return curve
