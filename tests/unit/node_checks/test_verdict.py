"""Whose fault a failed check is."""

from __future__ import annotations

import pytest

from perdure.training.node_checks.verdict import verdict_of
from perdure.training.wire.node import Check, CheckOutcome


def check(node, outcome=CheckOutcome.OK, name="devices", **more):
    return Check(name=name, node=node, outcome=outcome, seen=more.pop("seen", name), **more)


FAILED = CheckOutcome.FAILED


@pytest.mark.parametrize(
    ("checks", "refused", "common"),
    [
        ([check("a"), check("b"), check("b", CheckOutcome.WARNING, "disk")], {}, ()),
        ([check("a"), check("b", FAILED, seen="Alarm"), check("c")], {"b": "devices: Alarm"}, ()),
        ([check(n, FAILED, "store") for n in "ab"], {}, ("store: store",)),
        ([check("a", CheckOutcome.SKIPPED), check("b", FAILED)], {"b": "devices: devices"}, ()),
        ([check("b", FAILED, "store"), check("b")], {}, ("store: store",)),
        (
            [
                check("a", name="join"),
                check("a", CheckOutcome.WARNING, "all_reduce"),
                check("b", FAILED, "join"),
            ],
            {"b": "join: join"},
            (),
        ),
        ([check("a", name="join"), *[check(n, FAILED, "join") for n in "bc"]], {}, ("join: join",)),
    ],
    ids=[
        "nothing failed", "failed on some nodes", "failed on every node", "the only node checked",
        "the store, seen from one node", "a rank that does not join", "most ranks do not join",
    ],
)  # fmt: skip
def test_a_failed_check_counts_against_its_node_or_against_what_the_nodes_share(
    checks, refused, common
):
    verdict = verdict_of(checks)
    assert (verdict.refused, verdict.common) == (refused, common)


def test_an_all_reduce_that_fails_for_half_or_more_is_no_single_nodes_fault():
    checks = [check("a", name="all_reduce"), check("b", FAILED, "all_reduce")]
    assert verdict_of(checks).common == ("all_reduce: all_reduce",)
    checks += [check("c", name="all_reduce")]
    assert verdict_of(checks).refused == {"b": "all_reduce: all_reduce"}


def test_other_versions_than_most_nodes_have_are_a_warning():
    checks = [check(n, name="versions", seen="torch 2.13.0") for n in "ab"]
    checks += [check("c", name="versions", seen="torch 2.12.0")]
    (warned,) = [c for c in verdict_of(checks).checks if c.outcome is CheckOutcome.WARNING]
    assert warned.node == "c"
    assert warned.seen == "torch 2.12.0; most nodes have torch 2.13.0"


def test_a_device_that_is_slow_beside_the_others_is_a_warning():
    speeds = {"a": 100.0, "b": 96.0, "c": 40.0}
    checks = [check(n, name="burn_in", figures={"gflop_s": s}) for n, s in speeds.items()]
    (warned,) = [c for c in verdict_of(checks).checks if c.outcome is CheckOutcome.WARNING]
    assert warned.node == "c"
    assert "the median node reaches 96.0 GFLOP/s" in warned.seen


@pytest.mark.parametrize(
    ("switches", "refused", "common"),
    [
        ({"a": "off", "b": "off"}, {}, ()),
        ({"a": "off", "b": "on", "c": "off"},
         {"b": "device_tls: TLS on; most nodes have TLS off"}, ()),
        ({"a": "on", "b": "on", "c": "off", "d": "on"},
         {"c": "device_tls: TLS off; most nodes have TLS on"}, ()),
        ({"a": "off", "b": "on"}, {}, ("device_tls: TLS off on 1 nodes, TLS on on 1 nodes",)),
        ({"a": "on"}, {}, ()),
    ],
    ids=["equal", "one on", "one off", "no majority", "one node"],
)  # fmt: skip
def test_tls_that_differs_from_most_nodes_fails_and_from_half_of_them_is_no_nodes_fault(
    switches, refused, common
):
    checks = [check(n, name="device_tls", seen=f"TLS {word}") for n, word in switches.items()]
    checks.append(check("z", CheckOutcome.SKIPPED, "device_tls", seen="hccn_tool shows no switch"))
    verdict = verdict_of(checks)
    assert (verdict.refused, verdict.common) == (refused, common)
