"""Chip fault codes: what the tables say, and how codes escalate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.training.recovery.chips import (
    BY_LEVEL,
    BY_SEVERITY,
    ChipAnswer,
    ChipLevel,
    CodeKind,
    Severity,
    _facts,
    _frequency,
    chip_answer,
    chip_fact,
    escalated,
    times_in_a_row,
)
from perdure.training.recovery.faults import USER_CAUSED_CODES
from tests.values import not_none

DAY_S = 86400.0
UCE = "80E01801"  # twice
PARITY = "80E18005"  # three times
LINK = "81078603"  # five times
FACTS = tuple(_facts().values())
SWITCH = "[0x08520003,na,L2,na]"


def test_the_tables_know_every_code_once():
    codes = [fact.code for fact in FACTS]
    assert len(codes) == len(set(codes)) == 936


def test_every_described_code_is_in_a_group_and_causes_are_short():
    described = [fact for fact in FACTS if fact.cause]
    assert len(described) == 256
    assert all(fact.kind is not CodeKind.UNKNOWN and len(fact.cause) <= 70 for fact in described)
    assert all(fact.cause.isascii() for fact in described)


@pytest.mark.parametrize(
    ("code", "level", "kind"),
    [
        (UCE, ChipLevel.RESTART_JOB, CodeKind.HARDWARE),
        ("80C98000", ChipLevel.RESTART_REQUEST, CodeKind.HARDWARE),
        ("80C98002", ChipLevel.RESTART_REQUEST, CodeKind.USER),
        ("80C98001", ChipLevel.RESET_NOW, CodeKind.HARDWARE),
        ("80E18402", ChipLevel.SEPARATE, CodeKind.HARDWARE),
        ("A2301001", ChipLevel.SEPARATE, CodeKind.UNKNOWN),
        ("8C084E00", ChipLevel.RESET_WHEN_IDLE, CodeKind.SOFTWARE),
        (LINK, ChipLevel.NOT_HANDLED, CodeKind.HARDWARE),
        ("81AD8605", ChipLevel.SUB_HEALTHY, CodeKind.HARDWARE),
        ("0000001D", ChipLevel.NO_NEW_JOBS, CodeKind.HARDWARE),
        (SWITCH, ChipLevel.NOT_HANDLED, CodeKind.UNKNOWN),
        ("21000024", ChipLevel.SEPARATE, CodeKind.HARDWARE),
    ],
)
def test_a_known_code_has_its_level_and_kind(code, level, kind):
    fact = not_none(chip_fact(code))
    assert (fact.level, fact.kind) == (level, kind)


def test_hint_and_critical_decide_alone_and_a_level_that_separates_outdoes_minor_and_major():
    assert chip_answer(None, None) is chip_answer("DEADBEEF", Severity.MAJOR) is ChipAnswer.HEAL
    for fact in FACTS:
        by_level = BY_LEVEL[fact.level] if fact.level is not None else ChipAnswer.HEAL
        assert chip_answer(fact.code, None) is by_level
        assert chip_answer(fact.code, Severity.HINT) is ChipAnswer.NOTHING
        assert chip_answer(fact.code, Severity.CRITICAL) is ChipAnswer.SEPARATE
        separates = by_level is ChipAnswer.SEPARATE
        answer = ChipAnswer.SEPARATE if separates else ChipAnswer.HEAL
        assert chip_answer(fact.code, Severity.MINOR) is answer
    assert BY_LEVEL.keys() == set(ChipLevel)
    assert BY_SEVERITY.keys() == set(Severity)


def test_the_codes_that_the_program_causes_are_the_same_everywhere():
    assert {f.code for f in FACTS if f.kind is CodeKind.USER} == USER_CAUSED_CODES


def test_every_rule_is_about_known_codes():
    for rule in _frequency():
        assert rule.codes
        assert all(chip_fact(code) is not None for code in rule.codes)
    assert [len(rule.codes) for rule in _frequency()] == [41, 1, 1]


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


@given(st.lists(st.floats(0, 10 * DAY_S)), st.floats(0, 10 * DAY_S), st.sampled_from([UCE, PARITY]))
def test_more_occurrences_never_make_it_milder(times_s, more_s, code):
    now_s = 10 * DAY_S
    before = escalated(code, times_s, now_s=now_s)
    assert before is None or escalated(code, [*times_s, more_s], now_s=now_s) is before


def test_only_the_newest_events_without_another_in_between_are_in_a_row():
    events = [("a", 0.0), ("b", 1.0), ("a", 2.0), ("a", 3.0)]
    assert times_in_a_row(events, "a", now_s=3.0, window_s=10.0) == 2
    assert times_in_a_row(events, "a", now_s=3.0, window_s=0.5) == 1
    assert times_in_a_row(events, "b", now_s=3.0, window_s=10.0) == 0
