"""The driver's tool about chips between two attempts, as programs that stand in its place."""

from __future__ import annotations

import pytest

from perdure.training.node_checks.chip_health import inspect_chips, reset_chips
from perdure.training.recovery.healing import HealPlan
from perdure.training.telemetry.npu_smi import parse_processes
from tests.unit.telemetry.driver_tools import SAMPLES, install, only_tools_of

PLAN = HealPlan("8C084E00")
BUSY = "| 0       0       | 4711          | python          | 1024          |\n"


def tool(folder, *, health: str = "npu-smi-health.txt", busy: str = "", says: str = "Status : OK"):
    """The tool; it notes each reset that was confirmed."""
    (folder / "busy").write_text(busy)
    install(
        folder,
        "npu-smi",
        f"""case "$*" in
        info) cat {SAMPLES}/npu-smi-info.txt {folder}/busy ;;
        *health*) cat {SAMPLES}/{health} ;;
        *ecc*) cat {SAMPLES}/npu-smi-ecc.txt ;;
        set*) read answer; [ "$answer" = y ] && echo "$*" >>{folder}/resets; echo "{says}" ;;
        esac""",
    )


@pytest.fixture
def tools(tmp_path, monkeypatch):
    return only_tools_of(tmp_path / "tools", monkeypatch)


def look(tools, plan=PLAN):
    return inspect_chips(plan, 1, tools, suspects=(0,))


def test_a_chip_with_an_alarm_is_ill_and_its_codes_are_known(tools):
    tool(tools, health="npu-smi-health-alarm.txt")
    health = look(tools)
    assert not health.is_good
    assert health.codes == ("A4025021", "8C03A000", "8C084E00")
    assert "device 0: Alarm" in health.text


def test_a_chip_that_reports_nothing_is_well(tools):
    tool(tools)
    assert look(tools).is_good


def test_without_a_driver_there_is_nothing_to_ask(tools):
    assert look(tools).is_good
    assert reset_chips((0,)) == (False, "not possible, npu-smi is not installed")


def test_the_reset_names_card_and_chip_and_is_confirmed(tools):
    tool(tools)
    assert reset_chips((1,)) == (True, "chip 7.0 by npu-smi")
    assert (tools / "resets").read_text() == "set -t reset -i 7 -c 0\n"


def test_no_chip_is_reset_while_a_process_uses_one_of_the_node(tools):
    tool(tools, busy=BUSY)
    assert reset_chips((0,)) == (False, "not done, 1 processes use chips of the node")
    assert not (tools / "resets").exists()


def test_a_driver_that_refuses_is_quoted(tools):
    tool(tools, says="Failed to reset server")
    assert reset_chips((0,)) == (False, "refused: Failed to reset server")


def test_the_table_of_processes_is_told_from_that_of_chips():
    table = (SAMPLES / "npu-smi-info.txt").read_text()
    assert parse_processes(table) == 0
    assert parse_processes(table + BUSY) == 1
