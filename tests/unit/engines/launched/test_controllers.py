"""Of two controllers one answers a fault: who acts on which rung, and what must be off."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.training.engines.launched.controllers import (
    MECHANISMS,
    SHARES,
    check_controllers,
    rivals,
    shares_markdown,
)
from perdure.training.engines.registry import platform_checks
from perdure.training.platforms.forms import ENTRIES
from perdure.training.recovery.rungs import Rung
from perdure.training.wire.node import CheckOutcome
from tests.jobs import small_job

LAUNCHED = {"kind": "launched", "nodes": 2}
VARIABLES = {"PROCESS_RECOVER", "ELASTIC_PROCESS_RECOVER_ENABLE", "ENABLE_RESTART_FAULT_PROCESS"}


def test_every_rung_has_one_row():
    assert sorted(rung for share in SHARES for rung in share.rungs) == sorted(Rung)


def test_the_page_has_the_table():
    page = Path(__file__).parents[4] / "docs" / "platforms.md"
    assert shares_markdown() in page.read_text(encoding="utf-8")


def test_names_are_those_that_policies_are_read_from():
    assert {mechanism.name for mechanism in MECHANISMS} - VARIABLES <= set(ENTRIES)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fault-scheduling", "force"), ("fault-scheduling", "grace"), ("pod-rescheduling", "on"),
        ("recover-strategy", "retry,recover"), ("recover-strategy", "recover-in-place,exit"),
        ("PROCESS_RECOVER", "on"), ("HIGH_AVAILABILITY", "dump"), ("MS_ENABLE_TFT", "{TTP:1}"),
        ("fault-tolerance/hang-retry", "true"), ("fault-tolerance/pod-retry-num", "3"),
    ],
)  # fmt: skip
def test_a_mechanism_that_is_on_is_named(name, text):
    (line,) = rivals({name: text, "HOME": "/root"})
    assert line.startswith(f"{name}={text}: ")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fault-scheduling", "off"), ("pod-rescheduling", "off"), ("recover-strategy", "exit"),
        ("PROCESS_RECOVER", "off"), ("HIGH_AVAILABILITY", ""), ("MS_ENABLE_TFT", "{}"),
        ("fault-tolerance/hang-retry", "false"), ("fault-tolerance/job-retry-num", "3"),
    ],
)  # fmt: skip
def test_a_mechanism_that_is_off_or_acts_after_the_end_is_no_rival(name, text):
    assert list(rivals({name: text})) == []


def test_entries_of_the_job_and_variables_of_the_node_are_looked_at():
    job = small_job(
        engine=LAUNCHED, restart={"from_platform": {"fault-scheduling": "force"}},
        env={"HIGH_AVAILABILITY": "retry"},
    )  # fmt: skip
    check = check_controllers(job, {"PROCESS_RECOVER": "on"})
    assert check.outcome is CheckOutcome.WARNING
    assert "fault-scheduling=force" in check.seen
    assert "(restart.from_platform)" in check.seen
    assert "HIGH_AVAILABILITY=retry" in check.seen
    assert "PROCESS_RECOVER=on" in check.seen


@pytest.mark.parametrize(("kind", "names"), [("launched", ["controllers"]), ("local", [])])
def test_preflight_looks_where_a_platform_owns_the_nodes(kind, names):
    job = small_job(engine={"kind": kind, "nodes": 2})
    assert [check.name for check in platform_checks(job)] == names
