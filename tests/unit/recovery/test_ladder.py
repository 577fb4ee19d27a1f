"""The ladder's tables, and what is printed of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.training.config.recovery import RestartSpec
from perdure.training.platforms.settings import POLICY_FIELDS
from perdure.training.recovery.faults import TRAITS, FaultClass, RecoverableBy
from perdure.training.recovery.guards import _GUARDS
from perdure.training.recovery.ladder import decide, ladder_markdown
from perdure.training.recovery.ladder_rules import RULES
from perdure.training.recovery.rungs import (
    IN_PROCESS,
    ISOLATES,
    LADDER,
    RESCHEDULES,
    RUNGS,
    Policy,
    Rung,
    Scope,
    restarts_in_a_row,
)
from tests.unit.recovery import ladder_invariants, test_ladder_rules
from tests.unit.recovery.test_ladder_rules import CRASH

PAGE = Path(__file__).parents[3] / "docs" / "ladder.md"


def test_a_fault_class_needs_its_traits_and_its_ladder():
    assert set(TRAITS) == set(FaultClass), "training/recovery/faults.py: TRAITS needs each class"
    assert set(LADDER) == set(FaultClass), "training/recovery/rungs.py: LADDER needs each class"
    assert list(TRAITS) == list(LADDER) == list(FaultClass), "in the order of FaultClass"


@pytest.mark.parametrize("fault_class", LADDER)
def test_every_ladder_gets_costlier_and_ends_in_stop(fault_class):
    costs = [rung.cost for rung in LADDER[fault_class]]
    assert costs == sorted(set(costs))
    assert LADDER[fault_class][-1] is Rung.STOP


@pytest.mark.parametrize("fault_class", [met for met in LADDER if LADDER[met] == (Rung.STOP,)])
def test_only_what_the_user_must_fix_has_nothing_but_stop(fault_class):
    assert TRAITS[fault_class].recoverable_by is RecoverableBy.USER_FIX


def test_a_rung_needs_its_row_and_its_guard_and_answers_some_class():
    assert set(RUNGS) == set(Rung), "training/recovery/rungs.py: RUNGS needs a row for each rung"
    assert set(_GUARDS) == set(Rung), "training/recovery/guards.py: _GUARDS needs each rung"
    assert list(RUNGS) == list(_GUARDS) == list(Rung), "in the order of Rung"
    used = {rung for rungs in LADDER.values() for rung in rungs}
    assert used == set(Rung), "training/recovery/rungs.py: LADDER needs each rung in some ladder"


def test_what_starts_more_of_a_run_again_costs_more():
    scopes = [row.scope for row in RUNGS.values()]
    assert scopes == sorted(scopes, key=list(Scope).index), (
        "training/recovery/rungs.py: Rung is in the order of cost, so of scope"
    )


def test_the_scope_of_a_rung_decides_what_its_row_has():
    assert RESCHEDULES | {Rung.NODE_REPLACE} > ISOLATES, "what stays on a node isolates none"
    for rung, row in RUNGS.items():
        assert (row.state_name == "") == (rung in IN_PROCESS), f"{rung}: others end an attempt"
        assert (row.spent_on == row.colour == "") == (rung is Rung.STOP), rung
        assert (row.scope is Scope.RUN) == (rung is Rung.STOP), rung
        is_retry = row.scope is Scope.CONTAINERS
        assert row.budget is not None or not is_retry, f"{rung}: Prefect's retries are budgets"


def test_a_job_can_set_every_switch_of_the_policy():
    elsewhere = {"operator_retry"}  # comm.op_retry and comm.link_retry turn it on
    missing = POLICY_FIELDS - elsewhere - set(RestartSpec.model_fields)
    assert not missing, "training/recovery/rungs.py: the field of a switch belongs in JobPolicy"


def test_the_call_of_a_supervisor_needs_no_more_than_it_did():
    decision = decide(CRASH, now_s=0.0, history=(), supported=frozenset(Rung), policy=Policy())
    assert decision.rung is Rung.IN_PLACE_RESTART
    assert decision.reason == "native_crash at rank 3 on node-1: in_place_restart"
    assert not decision.end_of_life_checkpoint


def test_every_rule_has_a_test_by_example_and_an_invariant_named_after_it():
    without_test = [name for name in RULES if not hasattr(test_ladder_rules, f"test_{name}")]
    assert not without_test, "tests/unit/recovery/test_ladder_rules.py needs test_<rule>"
    without_invariant = [name for name in RULES if not hasattr(ladder_invariants, name)]
    assert not without_invariant, "tests/unit/recovery/ladder_invariants.py needs <rule>"


def test_the_printed_ladder_names_every_rung_class_and_rule():
    text = ladder_markdown()
    assert all(f"| `{rung}` | {row.source_name} |" in text for rung, row in RUNGS.items())
    assert all(f"\n| `{fault_class}` | `" in text for fault_class in FaultClass)
    assert all(f"| {rule.sentence} |" in text for rule in RULES.values())


def test_the_printed_tables_have_as_many_cells_in_every_row():
    for table in ladder_markdown().split("\n\n"):
        lines = table.splitlines()
        assert len({line.count("|") for line in lines}) == 1
        assert set(lines[1]) == {"|", "-"}


def test_the_page_about_the_ladder_holds_exactly_the_printed_tables():
    page = PAGE.read_text(encoding="utf-8")
    introduction, _, tables = page.partition("| rung |")
    assert introduction.startswith("# ")
    assert f"| rung |{tables}".strip() == ladder_markdown(), (
        "docs/ladder.md is out of date: keep its introduction and replace everything from the "
        "first table on with the output of `perdure ladder --markdown`"
    )


def test_a_policy_allows_as_many_restarts_in_place_in_a_row_as_their_budgets():
    assert restarts_in_a_row(Policy(in_place=False)) == 3
    assert restarts_in_a_row(Policy(hang=False, in_place_retries=5)) == 5
    # Each other restart ends a row of three hangs: hhh o hhh o hhh.
    assert restarts_in_a_row(Policy(in_place_retries=2)) == 3 + 1 + 3 + 1 + 3
    assert restarts_in_a_row(Policy(hang=False, in_place=False)) == 0
