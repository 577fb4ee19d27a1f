"""Whose fault a failed check is."""

from __future__ import annotations

from training.health.verdict import verdict_of
from training.wire.node import Check, CheckOutcome


def check(node, outcome=CheckOutcome.OK, name="devices", **more):
    return Check(name=name, node=node, outcome=outcome, seen=more.pop("seen", name), **more)


FAILED = CheckOutcome.FAILED


def test_nothing_failed_nothing_refused():
    verdict = verdict_of([check("a"), check("b"), check("b", CheckOutcome.WARNING, "disk")])
    assert (verdict.refused, verdict.common) == ({}, ())


def test_a_check_that_fails_on_some_nodes_counts_against_them():
    verdict = verdict_of([check("a"), check("b", FAILED, seen="Alarm"), check("c")])
    assert (verdict.refused, verdict.common) == ({"b": "devices: Alarm"}, ())


def test_a_check_that_fails_everywhere_counts_against_what_they_share():
    verdict = verdict_of([check("a", FAILED, "store"), check("b", FAILED, "store")])
    assert (verdict.refused, verdict.common) == ({}, ("store: store",))


def test_the_only_node_that_was_checked_is_refused():
    checks = [check("a", CheckOutcome.SKIPPED), check("b", FAILED)]
    assert verdict_of(checks).refused == {"b": "devices: devices"}


def test_a_store_that_fails_the_only_node_that_was_checked_counts_against_the_store():
    verdict = verdict_of([check("b", FAILED, "store"), check("b")])
    assert (verdict.refused, verdict.common) == ({}, ("store: store",))


def test_a_rank_that_does_not_join_is_refused_and_the_others_are_not():
    checks = [
        check("a", name="join"),
        check("a", CheckOutcome.WARNING, "all_reduce"),
        check("b", FAILED, "join"),
    ]
    assert verdict_of(checks).refused == {"b": "join: join"}


def test_when_most_do_not_reach_the_first_node_no_node_is_refused():
    checks = [check("a", name="join"), *[check(n, FAILED, "join") for n in "bc"]]
    verdict = verdict_of(checks)
    assert (verdict.refused, verdict.common) == ({}, ("join: join",))


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
