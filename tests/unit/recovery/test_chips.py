"""Chip fault codes: what the tables say, and how codes escalate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.recovery.chips import (
    LEVELS,
    SEPARATED,
    ChipLevel,
    Kind,
    Reporter,
    Severity,
    chip_fact,
    chip_facts,
    escalated,
    heals_in_place,
    level_of,
    mindcluster_frequency,
    modelarts_frequency,
    needs_recovery,
    prolonged,
    related,
    times_in_a_row,
)
from training.recovery.faults import USER_CAUSED_CODES

DAY_S = 86400.0
HOUR_S = 3600.0
UCE = "80E01801"  # twice
PARITY = "80E18005"  # three times
LINK = "81078603"  # five times
SWITCH = "[0x08520003,na,L2,na]"


def test_the_tables_know_every_code_once():
    codes = [fact.code for fact in chip_facts()]
    assert len(codes) == len(set(codes)) == 936
    assert sum(fact.reporter is Reporter.CHIP for fact in chip_facts()) == 806
    assert {fact.reporter for fact in chip_facts()} == set(Reporter)


def test_every_described_code_is_in_a_group_and_causes_are_short():
    described = [fact for fact in chip_facts() if fact.cause]
    assert len(described) == 256
    assert all(fact.kind is not Kind.UNKNOWN and len(fact.cause) <= 70 for fact in described)
    assert all(fact.cause.isascii() for fact in described)


@pytest.mark.parametrize(
    ("code", "level", "kind"),
    [
        (UCE, ChipLevel.RESTART_JOB, Kind.HARDWARE),
        ("80C98000", ChipLevel.RESTART_REQUEST, Kind.HARDWARE),
        ("80C98002", ChipLevel.RESTART_REQUEST, Kind.USER),
        ("80C98001", ChipLevel.RESET_NOW, Kind.HARDWARE),
        ("80E18402", ChipLevel.SEPARATE, Kind.HARDWARE),
        ("A2301001", ChipLevel.SEPARATE, Kind.UNKNOWN),
        ("8C084E00", ChipLevel.RESET_WHEN_IDLE, Kind.SOFTWARE),
        (LINK, ChipLevel.NOT_HANDLED, Kind.HARDWARE),
        ("81AD8605", ChipLevel.SUB_HEALTHY, Kind.HARDWARE),
        ("0000001D", ChipLevel.NO_NEW_JOBS, Kind.HARDWARE),
        (SWITCH, ChipLevel.NOT_HANDLED, Kind.UNKNOWN),
        ("21000024", ChipLevel.SEPARATE, Kind.HARDWARE),
    ],
)
def test_a_known_code_has_its_level_and_kind(code, level, kind):
    fact = chip_fact(code)
    assert fact is not None
    assert (fact.level, fact.kind) == (level, kind)
    assert all(level_of(code, severity=severity) is level for severity in Severity)


def test_every_level_has_the_name_of_its_source():
    assert set(LEVELS) == set(ChipLevel)
    assert len({facts.source_name for facts in LEVELS.values()}) == len(ChipLevel)


@pytest.mark.parametrize("code", ["DEADBEEF", "81AB8000"])
def test_a_code_without_a_level_is_judged_by_its_severity(code):
    assert [level_of(code, severity=severity) for severity in Severity] == [
        ChipLevel.NOT_HANDLED,
        ChipLevel.NOT_HANDLED,
        ChipLevel.SEPARATE,
        ChipLevel.SEPARATE,
    ]


def test_what_heals_in_place_is_neither_critical_nor_separated():
    assert heals_in_place(None)
    assert heals_in_place("DEADBEEF", severity=Severity.MAJOR)
    assert not heals_in_place(None, severity=Severity.CRITICAL)
    for fact in chip_facts():
        assert heals_in_place(fact.code) == (fact.level not in SEPARATED)
        assert not heals_in_place(fact.code, severity=Severity.CRITICAL)


def test_hints_and_codes_that_are_not_handled_need_no_recovery():
    assert needs_recovery(None)
    assert not needs_recovery(None, severity=Severity.HINT)
    assert needs_recovery(UCE, severity=Severity.MINOR)
    assert not needs_recovery(LINK, severity=Severity.MAJOR)
    assert needs_recovery(LINK, severity=Severity.CRITICAL)


def test_the_codes_that_the_program_causes_are_the_same_everywhere():
    assert modelarts_frequency().excepted == USER_CAUSED_CODES
    assert {f.code for f in chip_facts() if f.kind is Kind.USER} == USER_CAUSED_CODES


def test_every_rule_is_about_known_codes():
    for rule in mindcluster_frequency():
        assert rule.codes
        assert all(chip_fact(code) is not None for code in rule.codes)
    assert [len(rule.codes) for rule in mindcluster_frequency()] == [41, 1, 1]


@pytest.mark.parametrize(("code", "times"), [(UCE, 2), (PARITY, 3), (LINK, 5)])
def test_a_code_escalates_the_nth_time_within_a_day(code, times):
    spread = [index * DAY_S / (times - 1) for index in range(times)]
    assert escalated(code, spread, now_s=DAY_S) is ChipLevel.SEPARATE_BY_HAND
    assert escalated(code, spread[:-1], now_s=DAY_S) is None
    late = [*spread[:-1], DAY_S + 1]
    assert escalated(code, late, now_s=2 * DAY_S) is None
    assert escalated(code, spread, now_s=DAY_S - 1) is None, "the last is still to come"


def test_another_code_never_escalates_by_mindclusters_rules():
    assert escalated("80C98002", [0.0] * 50, now_s=1.0) is None


def test_a_separated_chip_waits_for_a_person_but_a_port_is_released_after_48_hours():
    month_s = 30 * DAY_S
    assert escalated(UCE, [0.0, 1.0], now_s=month_s) is ChipLevel.SEPARATE_BY_HAND
    five = [0.0, 1.0, 2.0, 3.0, 4.0]
    assert escalated(LINK, five, now_s=4.0 + 2 * DAY_S - 1) is ChipLevel.SEPARATE_BY_HAND
    assert escalated(LINK, five, now_s=4.0 + 2 * DAY_S) is None


def test_modelarts_counts_every_code_but_those_that_the_program_causes():
    rules = [modelarts_frequency()]
    three = [0.0, HOUR_S, 2 * HOUR_S]
    assert escalated("80E18402", three, now_s=2 * HOUR_S, rules=rules) is ChipLevel.SEPARATE
    assert escalated("80E18402", three[1:], now_s=2 * HOUR_S, rules=rules) is None
    assert escalated("80C98002", three, now_s=2 * HOUR_S, rules=rules) is None


@given(st.lists(st.floats(0, 10 * DAY_S)), st.floats(0, 10 * DAY_S), st.sampled_from([UCE, PARITY]))
def test_more_occurrences_never_make_it_milder(times_s, more_s, code):
    now_s = 10 * DAY_S
    before = escalated(code, times_s, now_s=now_s)
    assert before is None or escalated(code, [*times_s, more_s], now_s=now_s) is before


def test_a_port_that_is_down_for_over_20_seconds_takes_no_new_jobs_until_60_seconds_after():
    def at(now_s, ended_s=None):
        return prolonged(LINK, began_s=100.0, ended_s=ended_s, now_s=now_s)

    assert at(120.0) is None
    assert at(121.0) is ChipLevel.NO_NEW_JOBS
    assert at(189.0, ended_s=130.0) is ChipLevel.NO_NEW_JOBS
    assert at(190.0, ended_s=130.0) is None
    assert at(125.0, ended_s=115.0) is None, "it was short"
    assert prolonged(UCE, began_s=0.0, ended_s=None, now_s=DAY_S) is None


@pytest.mark.parametrize(
    ("trigger", "other", "level"),
    [
        ("8C1F8609", LINK, ChipLevel.SUB_HEALTHY),
        ("8C1F860B", LINK, ChipLevel.SEPARATE),
        ("8C1F860B", SWITCH, ChipLevel.SEPARATE),
        ("8C1F8608", LINK, ChipLevel.SEPARATE),
        ("4C1F8608", LINK, ChipLevel.SEPARATE),
    ],
)
def test_codes_within_five_minutes_of_each_other_are_related(trigger, other, level):
    assert related([(trigger, 0.0), (other, 300.0)]) is level
    assert related([(other, 0.0), (trigger, 300.0)]) is level
    assert related([(trigger, 0.0), (other, 301.0)]) is None
    assert related([(trigger, 0.0)]) is None


def test_of_several_relations_the_worst_counts():
    events = [("8C1F8609", 0.0), (LINK, 1.0), ("8C1F8608", 2.0)]
    assert related(events) is ChipLevel.SEPARATE


def test_only_the_newest_events_without_another_in_between_are_in_a_row():
    events = [("a", 0.0), ("b", 1.0), ("a", 2.0), ("a", 3.0)]
    assert times_in_a_row(events, "a", now_s=3.0, window_s=10.0) == 2
    assert times_in_a_row(events, "a", now_s=3.0, window_s=0.5) == 1
    assert times_in_a_row(events, "b", now_s=3.0, window_s=10.0) == 0
