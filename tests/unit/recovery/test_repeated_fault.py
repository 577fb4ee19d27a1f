"""What a policy comes to: the answers to one fault that comes again and again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.training.errors import InputError
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.ladder import decide
from perdure.training.recovery.repeated_fault import (
    NO_PART,
    NO_SPARE,
    Outlook,
    Terms,
    outlook,
    outlook_markdown,
    outlooks,
)
from perdure.training.recovery.rungs import (
    IN_PROCESS,
    RESCHEDULES,
    Policy,
    RestartCount,
    Rung,
)
from perdure.training.supervisor.job_ladder import fault_of_code, terms_of
from tests.jobs import small_job

TERMS = Terms(Policy(), Policy(), frozenset(Rung), nodes=2, spares=1)
POLICIES = st.builds(
    Policy,
    max_restarts=st.integers(0, 9),
    count=st.sampled_from(RestartCount),
    in_place=st.booleans(),
    in_place_retries=st.integers(1, 5),
    unconditional=st.booleans(),
    hang=st.booleans(),
    pod_retries=st.integers(0, 5),
    allow_without_isolation=st.booleans(),
    process_replace=st.booleans(),
    collective_retry=st.booleans(),
    pod_before_in_place=st.booleans(),
    numeric_retry=st.booleans(),
)


def by_class(terms: Terms) -> dict[FaultClass, Outlook]:
    return {one.fault_class: one for one in outlooks(terms)}


def rungs(found: Outlook) -> list[tuple[Rung, int]]:
    return [(one.rung, one.times) for one in found.answers]


def with_policy(**settings: object) -> Terms:
    policy = Policy(**settings)
    return replace(TERMS, policy=policy, inside=policy)


@given(POLICIES, st.integers(0, 3), st.booleans())
def test_every_class_is_answered_within_its_budgets_and_ends_in_stop(policy, spares, is_command):
    terms = Terms(policy, None if is_command else policy, frozenset(Rung), 2, spares)
    found = outlooks(terms)
    assert [one.fault_class for one in found] == list(FaultClass)
    for one in found:
        assert [answer.rung for answer in one.answers].index(Rung.STOP) == len(one.answers) - 1
        done = [answer for answer in one.answers if answer.failed is None]
        assert sum(a.times for a in done if a.rung in RESCHEDULES) <= policy.max_restarts
        assert sum(a.times for a in done if a.isolates) <= spares
        assert all(a.budget is None or a.times <= a.budget for a in one.answers)
        assert not (is_command and {a.rung for a in one.answers} & IN_PROCESS)
        assert not {a.rung for a in one.answers} & set(one.never)


@given(POLICIES, st.sampled_from(FaultClass))
def test_the_first_answer_is_what_a_run_would_do(policy, fault_class):
    terms = replace(TERMS, policy=policy, inside=policy)
    fault = Fault(fault_class, 0.0, "", node="node-0", rank=0, device=0, step=100)
    asked = {"now_s": 0.0, "history": (), "supported": terms.supported, "policy": policy}
    inside = decide(fault, survivors=True, **asked)
    ended = decide(fault, survivors=False, **asked)
    first = outlook(fault, terms).answers[0].rung
    assert first is (inside.rung if inside.rung in IN_PROCESS else ended.rung)


def test_budgets_of_the_policy_are_how_often_a_rung_comes():
    hang = by_class(TERMS)[FaultClass.HANG]
    assert rungs(hang) == [(Rung.HANG_RESTART, 3), (Rung.STOP, 1)]
    unknown = by_class(with_policy(in_place_retries=5, max_restarts=2))[FaultClass.UNKNOWN]
    assert rungs(unknown) == [(Rung.IN_PLACE_RESTART, 5), (Rung.JOB_RESCHEDULE, 2), (Rung.STOP, 1)]


def test_what_the_policy_switches_off_is_never_done_and_says_so():
    off = by_class(with_policy(process_replace=False, in_place=False))[FaultClass.NATIVE_CRASH]
    assert off.never[Rung.PROCESS_REPLACE] == "switched off"
    assert off.never[Rung.IN_PLACE_RESTART] == "switched off"
    pods = by_class(with_policy(pod_retries=2))[FaultClass.NODE_LOST]
    assert rungs(pods)[0] == (Rung.NODE_REPLACE, 1)
    pods = by_class(with_policy(pod_retries=2, node_replace=False))[FaultClass.NODE_LOST]
    assert rungs(pods)[0] == (Rung.POD_RESCHEDULE, 1)
    assert pods.answers[0].isolates


def test_without_a_spare_the_rung_fails_and_the_ladder_is_asked_again():
    lost = by_class(replace(TERMS, spares=0))[FaultClass.NODE_LOST]
    replaced, first, then, *_ = lost.answers
    assert (replaced.rung, replaced.failed) == (Rung.NODE_REPLACE, NO_SPARE)
    assert (first.rung, first.failed) == (Rung.JOB_RESCHEDULE_ISOLATED, NO_SPARE)
    assert then.rung is Rung.JOB_RESCHEDULE
    table = outlook_markdown(list(by_class(replace(TERMS, spares=0)).values()))
    assert "`job_reschedule_isolated` (fails: no healthy spare is left) -> " in table
    forbidden = replace(with_policy(allow_without_isolation=False), spares=0)
    lost = by_class(forbidden)[FaultClass.NODE_LOST]
    assert [one.rung for one in lost.answers] == [
        *(Rung.NODE_REPLACE, Rung.JOB_RESCHEDULE_ISOLATED, Rung.STOP),
    ]


def test_a_command_has_no_recovery_inside_its_processes():
    job = small_job(worker={"command": ["sh", "-c", "true"]})
    crash = by_class(terms_of(job))[FaultClass.NATIVE_CRASH]
    assert crash.never[Rung.PROCESS_REPLACE] == NO_PART
    assert crash.answers[0].rung is Rung.IN_PLACE_RESTART


def test_a_layout_without_replicas_never_copies_a_state():
    job = small_job(parallelism={"kind": "fsdp2"})
    crash = by_class(terms_of(job))[FaultClass.NATIVE_CRASH]
    assert crash.never[Rung.PROCESS_REPLACE].startswith("no replica")


def test_what_is_only_reported_or_not_looked_for_has_no_answer():
    found = by_class(terms_of(small_job(watch={"hang_action": "alert"})))
    assert found[FaultClass.HANG].unanswered == "an alert only (watch.hang_action=alert)"
    assert found[FaultClass.FAIL_SLOW].answers == ()
    found = by_class(terms_of(small_job(restart={"hang": False})))
    assert found[FaultClass.HANG].unanswered == "not looked for (restart.hang=false)"
    found = by_class(terms_of(small_job(watch={"isolate_fail_slow": True})))
    assert found[FaultClass.HANG].answers
    assert found[FaultClass.FAIL_SLOW].answers[0].isolates


def test_a_code_of_a_chip_is_answered_as_the_diagnosis_has_it():
    separate = outlook(fault_of_code("80E18402"), TERMS)  # level SeparateNPU
    assert separate.answers[0].rung is Rung.NODE_REPLACE
    restart = outlook(fault_of_code("0x80e01801"), TERMS)  # level RestartBusiness
    assert restart.code == "80E01801"
    assert restart.answers[0].rung is Rung.STEP_RETRY
    users = outlook(fault_of_code("80C98002"), TERMS)  # the program's own
    assert not any(one.isolates for one in users.answers)
    with pytest.raises(InputError, match="'FFFF' is no known code"):
        fault_of_code("FFFF")


def test_the_table_has_a_row_for_each_and_as_many_cells_in_every_row():
    found = [*outlooks(TERMS), outlook(fault_of_code("80E18402"), TERMS)]
    lines = outlook_markdown(found).splitlines()
    assert len(lines) == len(found) + 2
    assert len({line.count("|") for line in lines}) == 1
    assert lines[-1].startswith("| `device_memory_error` 80E18402 |")


def test_a_look_at_the_ladder_of_a_launched_job_makes_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    job = small_job(engine={"kind": "launched", "nodes": 2}, worker={"command": ["train"]})
    assert terms_of(job).supported
    assert list(tmp_path.rglob("*secret*")) == []
