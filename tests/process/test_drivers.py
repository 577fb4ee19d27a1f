"""Drivers of drills and of random faults that are terminated: their run is taken down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from perdure.training.processes import MARKER
from tests.process.harness import REPO
from tests.waiting import wait_for

pytestmark = [pytest.mark.process, pytest.mark.alone, pytest.mark.long]

CHAOS = ("perdure.training.drill.chaos", "--seed", "1", "--faults", "3")
DRILL = ("perdure", "drill", "replace-rank")


def below(folder: Path) -> list[psutil.Process]:
    """Processes of containers in a folder, whatever became of their parents."""
    found = []
    for process in psutil.process_iter(["status"]):
        with suppress(psutil.Error):
            is_dead = process.info["status"] == psutil.STATUS_ZOMBIE
            if not is_dead and process.environ().get(MARKER, "").startswith(str(folder)):
                found.append(process)
    return found


def has_trained(folder: Path) -> bool:
    logs = folder.glob("perdure-*/runs/*/nodes/*/*/attempts/*/metrics.jsonl")
    return any('"kind":"step"' in log.read_text(encoding="utf-8") for log in logs)


@pytest.mark.parametrize(
    ("program", "number", "is_training"),
    [
        pytest.param(CHAOS, signal.SIGTERM, True, id="chaos in training"),
        pytest.param(CHAOS, signal.SIGHUP, False, id="chaos while its run starts"),
        pytest.param(DRILL, signal.SIGTERM, True, id="a drill in training"),
    ],
)
def test_a_driver_that_is_terminated_leaves_no_process(tmp_path, program, number, is_training):
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PERDURE_HOME": str(tmp_path / "home")}
    with (tmp_path / "driver.log").open("wb") as log:
        driver = subprocess.Popen(
            [sys.executable, "-m", *program],
            cwd=REPO,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # The tests themselves may run under nohup, whose ignored SIGHUP is inherited.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # noqa: PLW1509 no threads yet
        )
    try:
        agents = wait_for(lambda: below(tmp_path))
        assert agents
        if is_training:
            wait_for(lambda: has_trained(tmp_path))
        driver.send_signal(number)
        assert driver.wait(timeout=240) == 128 + number
        assert below(tmp_path) == []
        if program is CHAOS:
            assert not list(tmp_path.glob("perdure-chaos-*")), "its folder is of no more use"
    finally:
        driver.kill()
        for process in below(tmp_path):
            process.kill()
