"""Reading what the tools of a driver print; samples are theirs, see samples/README.md."""

from __future__ import annotations

import pytest

from perdure.training.telemetry.npu_smi import (
    Ecc,
    fill_usage,
    parse_counters,
    parse_ecc,
    parse_health,
    parse_link,
    parse_link_history,
    parse_net_health,
    parse_table,
    parse_usages,
)
from perdure.training.telemetry.vendor_tools import read_assignments
from tests.unit.telemetry.driver_tools import SAMPLES
from tests.values import not_none

MIB = 1 << 20

# Two chips on a card, in the layout of npu-smi 25: the second has no power of its own, and
# workers count by Phy-ID.
TWO_CHIPS = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.3.rc1                 Version: 25.3.rc1                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 4     Ascend910           | OK            | 170.1       41                0    / 0             |
| 0     8                   | 0000:0A:00.0  | 12          0    / 0          6400 / 65536         |
+------------------------------------------------------------------------------------------------+
| 4     Ascend910           | Alarm         | -           43                0    / 0             |
| 1     9                   | 0000:0B:00.0  | -           0    / 0          65536/ 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 4       0                 | 4711          | python                   | 6100                    |
+===========================+===============+====================================================+
"""


def sample(name: str) -> str:
    return (SAMPLES / name).read_text()


def test_the_table_lists_every_chip():
    first, last = parse_table(sample("npu-smi-info.txt"))
    assert (first.npu, first.chip, first.physical, first.name) == (0, 0, 0, "xxx")
    assert (first.health, first.power_w, first.temperature_c) == ("OK", 73.1, 37)
    assert (first.utilisation_percent, first.memory_percent) == (0, 0)
    assert first.memory_total_bytes == 32768 * MIB
    assert (last.npu, last.physical, last.temperature_c) == (7, 7, 38)


def test_two_chips_of_a_card_are_distinguished_and_processes_are_no_chips():
    first, second = parse_table(TWO_CHIPS)
    assert [(c.npu, c.chip, c.physical, c.health) for c in (first, second)] == [
        (4, 0, 8, "OK"),
        (4, 1, 9, "Alarm"),
    ]
    assert (second.power_w, second.utilisation_percent) == (None, None)
    assert (round(first.memory_percent or 0, 1), second.memory_percent) == (9.8, 100)


@pytest.mark.parametrize("text", ["", "dcmi model initialized failed, ret is -8005", "|1|2|3|\n"])
def test_what_is_no_table_has_no_chips(text):
    assert parse_table(text) == ()


def test_a_healthy_chip_has_no_codes():
    health = parse_health(sample("npu-smi-health.txt"))
    assert (health.word, health.error_codes, health.information) == ("OK", (), ())


def test_an_alarm_comes_with_all_its_codes_and_sentences():
    health = parse_health(sample("npu-smi-health-alarm.txt"))
    assert health.word == "Alarm"
    assert health.error_codes == ("A4025021", "8C03A000", "8C084E00")
    assert len(health.information) == 3
    assert health.information[2].endswith("event state=Heartbeat Lost.")


def test_without_a_chip_number_the_label_is_another():
    assert parse_health("\tHealth                         : Warning\n").word == "Warning"


def test_a_removed_card_has_no_health():
    assert parse_health(sample("npu-smi-invalid-card.txt")).word is None


def test_memory_errors_are_counted_over_hbm_and_ddr():
    assert parse_ecc(sample("npu-smi-ecc.txt")) == Ecc(0, 0, 0)
    text = sample("npu-smi-ecc.txt")
    text = text.replace(
        "HBM Double Bit Error Count               : 0", "HBM Double Bit Error Count : 3"
    )
    text = text.replace(
        "HBM Double Bit Isolated Pages Count      : 0", "HBM Double Bit Isolated Pages Count : 2"
    )
    assert parse_ecc(text) == Ecc(0, 3, 2)
    assert parse_ecc(sample("npu-smi-invalid-card.txt")) is None


def test_the_newer_layout_of_memory_errors_has_hbm_alone():
    text = "HBM Single Bit Error Count : 4\nHBM Double Bit Error Count : 1\n"
    assert parse_ecc(text + "HBM Next-Isolated Pages Count : 1\n") == Ecc(4, 1, 0)


def test_usages_have_a_block_for_every_chip():
    (usage,) = parse_usages(sample("npu-smi-usages.txt"))
    assert (usage.memory_total_bytes, usage.memory_percent, usage.utilisation_percent) == (
        32768 * MIB, 0, 0,
    )  # fmt: skip
    two = sample("npu-smi-usages.txt") * 2
    assert len(parse_usages(two)) == 2
    assert parse_usages("Invalid card id.") == ()


def test_newer_drivers_report_the_use_of_all_cores():
    text = "Aicore Usage Rate(%) : 3\nNPU Utilization(%) : 44\nChip ID : 0\n"
    (usage,) = parse_usages(text)
    assert usage.utilisation_percent == 44
    first, second = parse_table(TWO_CHIPS)
    assert fill_usage(second, usage).utilisation_percent == 44
    assert fill_usage(first, usage).utilisation_percent == 12


def test_a_link_is_up_down_or_unknown():
    assert parse_link(sample("hccn-link.txt")) is True
    assert parse_link("link status: DOWN\n") is False
    assert parse_link("hccn_tool is busy, please try again") is None


def test_the_net_health_is_the_tool_s_word():
    assert parse_net_health(sample("hccn-net-health.txt")) == "Init"
    assert parse_net_health(sample("hccn-net-health-failed.txt")) == "Socket failed"
    assert parse_net_health("") is None


def test_every_counter_of_a_port_is_read():
    counters = parse_counters(sample("hccn-stat.txt"))
    assert counters["nic_tx_all_pkg_num"] == 122404
    assert counters["roce_qp_status_err_num"] == 0
    assert parse_counters(sample("hccn-stat-short.txt")) == {
        "roce_rx_err_pkt_num": 0,
        "roce_tx_err_pkt_num": 0,
    }


@pytest.mark.parametrize(
    ("name", "losses", "newest"),
    [("hccn-link-stat.txt", 2, False), ("hccn-link-stat-device.txt", 1, True)],
)
def test_the_record_of_a_link_counts_its_losses(name, losses, newest):
    history = not_none(parse_link_history(sample(name)))
    assert (history.up_count, history.num_losses, history.changes[0][1]) == (2, losses, newest)


def test_no_record_of_a_link_is_none():
    assert parse_link_history("Invalid card id.") is None


def test_version_files_are_assignments():
    driver = read_assignments(SAMPLES / "driver-version.info")
    assert (driver["Version"], driver["Innerversion"]) == ("23.0.7", "V100R001C15SPC012B220")
    assert read_assignments(SAMPLES / "nowhere.info") == {}
