"""Telling the Prefect server: never in the way of a run, never lost while the run lives."""

from __future__ import annotations

import logging
import threading

import pytest

from tasks import reporting
from tasks.reporting import Reporter, fault_report
from training.policy.faults import Fault, FaultClass, RecoverableBy
from training.policy.ladder import Decision, Rung


@pytest.fixture
def reporter(monkeypatch):
    monkeypatch.setattr(reporting, "RETRY_S", 0.01)
    reporter = Reporter("run", None, logging.getLogger("test"))
    reporter.start()
    yield reporter
    reporter.close()


def test_what_the_server_did_not_take_is_told_again_until_it_does(reporter, caplog):
    told = threading.Event()
    refusals = iter([ConnectionError("down"), ConnectionError("down"), None])

    def tell() -> None:
        refusal = next(refusals)
        if refusal is not None:
            raise refusal
        told.set()

    reporter._submit("fault-p1-a1", tell)
    assert told.wait(5)
    assert caplog.text.count("does not take") == 1, "an outage is one line in the log"


def test_of_updates_to_the_same_thing_only_the_newest_is_told(reporter):
    busy, release, done = threading.Event(), threading.Event(), threading.Event()
    seen: list[int] = []

    def occupy() -> None:
        busy.set()
        release.wait(5)

    reporter._submit("first", occupy)
    assert busy.wait(5)
    for number in range(5):
        reporter._submit("progress", lambda number=number: seen.append(number))
    reporter._submit("last", done.set)
    release.set()
    assert done.wait(5)
    assert seen == [4]


def test_closing_does_not_wait_for_a_server_that_is_down(monkeypatch):
    monkeypatch.setattr(reporting, "CLOSE_TIMEOUT_S", 5.0)
    reporter = Reporter("run", None, logging.getLogger("test"))
    failed = threading.Event()

    def tell() -> None:
        failed.set()
        raise ConnectionError("down")

    reporter.start()
    reporter._submit("attempts", tell)
    assert failed.wait(5)
    reporter.close()
    assert not reporter._thread.is_alive()


def test_a_fault_report_names_class_evidence_place_decision_and_isolation():
    fault = Fault(FaultClass.NODE_LOST, 0.0, "the agent of node-1 is gone", node="node-1", step=77)
    decision = Decision(
        Rung.POD_RESCHEDULE, "node-1", "node_lost: pod_reschedule", ("in_place_restart: off",)
    )
    text = fault_report(1, 2, fault, decision)
    for word in ("node_lost", "node-1", "after step 77", "is gone", "pod_reschedule", "isolated"):
        assert word in text


def test_a_fault_report_says_whose_fault_it_is_what_to_do_and_what_else_it_may_be():
    fault = Fault(
        FaultClass.DEVICE_MEMORY_ERROR,
        0.0,
        "UCE ERROR",
        node="node-1",
        device=3,
        code="507053",
        action="Have the device tested.",
        recoverable_by=RecoverableBy.ISOLATE,
        user_fault=False,
        hardware_fault=True,
    )
    other = Fault(FaultClass.COLLECTIVE_TIMEOUT, 0.0, "EI0002: waited too long")
    text = fault_report(1, 1, fault, Decision(Rung.STOP, None, "over"), [other])
    for row in (
        "| code | 507053 |",
        "| device | 3 |",
        "| cause lies in | hardware |",
        "| mended by | isolate |",
        "| you should | Have the device tested. |",
        "- collective_timeout: `EI0002: waited too long`",
    ):
        assert row in text
