"""The NPUs' own network, in the words of hccn_tool."""

from __future__ import annotations

import time

import pytest

from perdure.training.node_checks import device_network
from perdure.training.node_checks.device_network import (
    check_pings,
    check_ports,
    check_tls,
    parse_loss,
    ping_targets,
)
from perdure.training.telemetry.vendor_tools import NoAnswer
from perdure.training.wire.node import CheckOutcome, PingTarget
from tests.jobs import small_job
from tests.unit.telemetry.driver_tools import SAMPLES

OPTICAL = (SAMPLES / "hccn-optical.txt").read_text().replace("not present", "present")
TLS = (
    "dev_id:{}, tls switch[{}](0:disable, 1:enable), tls preconfigured[1](0:non-preset, "
    "1:preset), tls alarm time threshold[60]days"
)
LATER_S = time.monotonic() + 1e6


def answered(lost: int = 0) -> str:
    """What a ping prints, of six packets."""
    lines = [f"recv time out seq:{n}" for n in range(lost)]
    lines += [f"recv seq:{n},time:0.286000ms" for n in range(lost, 6)]
    share = f"{100 * lost / 6:.2f}% packet loss"
    received = f"6 packets transmitted, {6 - lost} received, {share}"
    return "\n".join(["device 0 PING 10.1.2.0", *lines, received])


TABLE = (SAMPLES / "npu-smi-info.txt").read_text()  # devices 0 and 7


class Tools:
    """The driver's tools of a node, as they answer: by the option, and by the device after it."""

    def __init__(self, **answers: str) -> None:
        self.asked: list[str] = []
        self._answers = {
            "optical": OPTICAL,
            "ip": "ipaddr:10.1.1.9\nnetmask:255.255.255.0\n",
            "tls": TLS.format(0, 0),
            "ping": answered(),
            **answers,
        }

    def __call__(self, command, *, timeout_s=10.0):
        if command[0] == "npu-smi":
            return TABLE
        _, _, device, option, *_ = command
        self.asked.append(" ".join(command))
        name = option.removeprefix("-")
        return self._answers.get(f"{name}_{device}", self._answers[name])


@pytest.fixture(autouse=True)
def _installed(tmp_path, monkeypatch):
    monkeypatch.setattr(device_network, "find_tool", lambda name: name)
    monkeypatch.setattr(device_network, "HCCN_CONF", tmp_path / "hccn.conf")


def test_there_is_nothing_to_check_without_the_tools(tmp_path, monkeypatch):
    monkeypatch.setattr(device_network, "find_tool", lambda _name: None)
    targets = [PingTarget(device=0, member=1, address="10.1.1.0")]
    assert check_ports(2) == check_tls(2) == ()
    assert check_pings(small_job(tmp_path), targets, until_s=LATER_S) == ()


def test_the_light_and_the_gid_of_a_healthy_port_are_told():
    optics, gid = check_ports(2, ask_tool=Tools(ip_7="ipaddr:fe80::9"))
    assert (optics.name, optics.outcome) == ("device_optics", CheckOutcome.OK)
    assert (gid.name, gid.outcome, gid.seen) == (
        "device_gid",
        CheckOutcome.OK,
        "device 0: ::ffff:10.1.1.9; device 7: fe80::9",
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("present              : present", "present              : not present"),
         "no optical module is present"),
        (("Tx Power             : 1.4035", "Tx Power             : 4.4035"),
         "Tx Power 4.4035 mW is above 3.5481 mW"),
        (("Rx Power             : 1.0189", "Rx Power             : 0.0009"),
         "Rx Power 0.0009 mW is below 0.1445 mW"),
        (("Rx Power             : 1.0189", "Rx Power2            : 0.0000"),
         "Rx Power2 0.0000 mW is below 0.1445 mW"),
        (("Rx Los Flag          : 0x0", "Rx Los Flag          : 0xff"), "Rx Los Flag 0xff"),
        (("Tx LoL Flag          : 0x0", "Tx LoL Flag          : 0x4"), "Tx LoL Flag 0x4"),
        (("Rx Los Flag          : 0x0",
          "RxLos Flag       Normal    | Abnormal  | Normal    | Normal"), "RxLos Flag Abnormal"),
    ],
)  # fmt: skip
def test_light_that_is_lost_or_weak_is_a_warning_for_its_device(change, words):
    assert change[0] in OPTICAL
    optics, _ = check_ports(2, ask_tool=Tools(optical_7=OPTICAL.replace(*change)))
    assert (optics.outcome, optics.seen) == (CheckOutcome.WARNING, f"device 7: {words}")


def test_a_lane_without_a_reading_is_no_complaint():
    text = OPTICAL.replace("Rx Power             : 1.0189 mW", "Rx Power3            : NA")
    assert check_ports(1, ask_tool=Tools(optical=text))[0].outcome is CheckOutcome.OK


def test_a_device_without_a_port_of_its_own_is_skipped_in_the_tools_words():
    optics, _ = check_ports(1, ask_tool=Tools(optical="This device does not support optical cmd."))
    assert optics.outcome is CheckOutcome.SKIPPED
    assert optics.seen == "device 0: This device does not support optical cmd."


def test_a_port_without_an_address_has_no_gid():
    _, gid = check_ports(2, ask_tool=Tools(ip_7="ipaddr:NA"))
    assert gid.outcome is CheckOutcome.WARNING
    assert gid.seen == "device 7: no address, and thus no GID that other nodes could reach"


def test_an_address_that_the_drivers_file_has_otherwise_fails(tmp_path):
    (tmp_path / "hccn.conf").write_text("address_0=10.1.1.9\naddress_7=10.7.7.7\n")
    _, gid = check_ports(2, ask_tool=Tools())
    assert gid.outcome is CheckOutcome.FAILED
    assert gid.seen.startswith("device 7: its address is 10.1.1.9, ")
    assert gid.seen.endswith("hccn.conf has 10.7.7.7")


@pytest.mark.parametrize(
    ("answers", "outcome", "seen"),
    [
        ({}, CheckOutcome.OK, "TLS off"),
        ({"tls": TLS.format(0, 1)}, CheckOutcome.OK, "TLS on"),
        ({"tls": "device 0, tls switch[1](0:disable, 1:enable), tls preconfigured[0]"},
         CheckOutcome.OK, "TLS on"),
        ({"tls_7": TLS.format(1, 1)}, CheckOutcome.FAILED,
         "TLS off for device 0 and on for device 7"),
        ({"tls": "hccn_tool is busy, please try again."}, CheckOutcome.SKIPPED,
         "hccn_tool shows no switch"),
    ],
)  # fmt: skip
def test_tls_is_the_same_on_all_devices_of_a_node(answers, outcome, seen):
    (check,) = check_tls(2, ask_tool=Tools(**answers))
    assert (check.name, check.outcome, check.seen) == ("device_tls", outcome, seen)


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        (answered(), 0.0),
        (answered(lost=6), 100.0),
        (answered(lost=3), 50.0),
        ("6 packets transmitted, 6 received, 0.00% packets loss\nmax time 1.2us", 0.0),
        ("device 0 PING 10.1.2.0\nrecv time out seq:0", 100.0),
        ("Destination Host Unreachable", 100.0),
        ("hccn_tool is busy, please try again.", None),
        ("", None),
    ],
)
def test_the_share_of_lost_packets_is_read_whole(text, loss):
    assert parse_loss(text) == loss


def test_each_device_pings_a_neighbor_in_a_ring_of_nodes():
    ports = {n: [f"10.1.{n}.{device}" for device in range(3)] for n in range(3)}
    targets = ping_targets(ports)
    assert [(t.device, t.member, t.address) for t in targets[0]] == [
        (0, 1, "10.1.1.0"),
        (1, 2, "10.1.2.1"),
        (2, 1, "10.1.1.2"),
    ]
    assert {t.member for t in targets[2]} == {0, 1}


@pytest.mark.parametrize(
    ("ports", "expected"),
    [
        ({0: ["a"]}, {0: []}),
        ({0: ["a"], 1: ["b"]}, {0: [1], 1: [0]}),
        ({0: ["a"], 1: ["b"], 2: ["c"]}, {0: [1, 2], 1: [2, 0], 2: [0, 1]}),
        ({0: ["a", "b"], 3: ["c"]}, {0: [3], 3: [0]}),
        ({0: ["a"], 1: [""]}, {0: [], 1: [0]}),
        ({}, {}),
    ],
    ids=["alone", "two", "one device each", "fewer devices", "no address", "none"],
)
def test_no_node_pings_itself_or_a_port_that_is_not_known(ports, expected):
    targets = ping_targets(ports)
    assert {n: [t.member for t in of] for n, of in targets.items()} == expected


TARGETS = [PingTarget(device=n, member=1 + n, address=f"10.1.{1 + n}.{n}") for n in range(2)]


def ping(tmp_path, tools, **comm):
    job = small_job(tmp_path, comm=comm)
    (check,) = check_pings(job, TARGETS, until_s=LATER_S, ask_tool=tools)
    return check.outcome, check.seen


def test_ports_of_other_nodes_that_answer_are_counted(tmp_path):
    tools = Tools()
    assert ping(tmp_path, tools) == (CheckOutcome.OK, "2 ports of other nodes answer")
    assert tools.asked == [
        "hccn_tool -i 0 -ping -g address 10.1.1.0",
        "hccn_tool -i 7 -ping -g address 10.1.2.1",
    ]


def test_a_neighbor_that_is_lost_is_a_warning_and_the_node_that_reaches_nobody_fails(tmp_path):
    words = "device 7 to node 2 (10.1.2.1): 100% lost"
    assert ping(tmp_path, Tools(ping_7=answered(lost=6))) == (CheckOutcome.WARNING, words)
    assert ping(tmp_path, Tools(ping=answered(lost=6))) == (
        CheckOutcome.FAILED,
        f"device 0 to node 1 (10.1.1.0): 100% lost; {words}",
    )


def test_packets_that_are_lost_now_and_then_are_a_warning(tmp_path):
    outcome, seen = ping(tmp_path, Tools(ping=answered(lost=3)))
    assert outcome is CheckOutcome.WARNING
    assert "50% lost" in seen


@pytest.mark.parametrize("comm", [{"chip": "a3"}, {"rank_table": "v1.2"}])
def test_nodes_of_a_super_pod_need_no_roce(tmp_path, comm):
    assert ping(tmp_path, Tools(ping=answered(lost=6)), **comm)[0] is CheckOutcome.WARNING


def test_a_tool_that_says_nothing_of_packets_fails_no_node(tmp_path):
    outcome, seen = ping(tmp_path, Tools(ping="hccn_tool is busy, please try again."))
    assert outcome is CheckOutcome.WARNING
    assert seen.startswith("device 0 to node 1 (10.1.1.0): no result")


def test_no_ping_begins_after_the_time_of_the_checks(tmp_path):
    assert check_pings(small_job(tmp_path), TARGETS, until_s=0.0, ask_tool=Tools()) == ()


def test_a_ping_that_never_ends_is_no_result(tmp_path):
    def never(command, *, timeout_s=10.0):
        if "-ping" in command:
            raise NoAnswer(f"{timeout_s}")
        return TABLE

    (check,) = check_pings(small_job(tmp_path), TARGETS, until_s=LATER_S, ask_tool=never)
    assert check.outcome is CheckOutcome.WARNING
