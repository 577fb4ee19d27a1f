"""Chips healed on a supervisor's order, by a real agent and real processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from perdure.training.errors import EngineError
from perdure.training.journal.attempt_log import FILE_NAME, parse_lines
from perdure.training.journal.events import ChipsHealed
from perdure.training.recovery.healing import HealPlan
from perdure.training.recovery.rungs import Rung
from perdure.training.wire.node import HealOrder
from tests.unit.agent.conftest import Container
from tests.unit.telemetry.driver_tools import SAMPLES, install
from tests.waiting import wait_for


def order(folder: Path, attempt: int, **plan: Any) -> HealOrder:
    return HealOrder(
        placement=7,
        attempt=attempt,
        rung=Rung.IN_PLACE_RESTART,
        plan=HealPlan(**{"code": None, "wait_s": 0.0, "reset_s": 1.0, **plan}),
        slots_per_node=1,
        variables={"OMP_NUM_THREADS": "1"},
        cwd=str(folder),
    )


def healed(container: Container, wanted: HealOrder) -> ChipsHealed:
    def done() -> ChipsHealed | None:
        reply = container.call(wanted)
        assert reply.healing is not None
        return reply.healing.done

    event: ChipsHealed = wait_for(done, what="the end of the healing")
    return event


def test_a_device_computes_in_a_process_and_the_attempts_log_has_the_outcome(new_container):
    container = new_container()
    done = healed(container, order(container.folder, 1))
    assert done.succeeded, done.text
    assert done.node == "node-1"
    assert done.acts[0].seen.endswith("and computes right")
    log = container.folder / "attempts" / "p0007-a0001" / FILE_NAME
    assert list(parse_lines(log.read_text())) == [done]
    # A supervisor that takes over gets the same answer: nothing is done twice.
    assert healed(container, order(container.folder, 1)) == done


def test_a_chip_that_stays_ill_after_its_reset_cannot_be_used(new_container, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    install(
        tools,
        "npu-smi",
        f"""case "$*" in
        info) cat {SAMPLES}/npu-smi-info.txt ;;
        *health*) cat {SAMPLES}/npu-smi-health-alarm.txt ;;
        set*) read answer; echo "$*" >>{tools}/resets; echo "Status : OK" ;;
        esac""",
    )
    container = new_container({"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"})
    done = healed(container, order(container.folder, 1, code="8C03A000"))
    assert not done.succeeded
    assert [(act.act, act.is_good) for act in done.acts] == [("reset", True), ("check", False)]
    assert "8C03A000" in done.acts[-1].codes
    assert (tools / "resets").read_text() == "set -t reset -i 0 -c 0\n"


def test_while_an_attempt_runs_nothing_is_healed(shared):
    shared.start("sleep", "600")
    shared.until("running")
    with pytest.raises(EngineError, match="an attempt is running"):
        shared.call(order(shared.folder, 2))
