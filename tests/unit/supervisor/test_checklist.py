"""Whether a job is set up to outlast its faults."""

from __future__ import annotations

import pytest

from perdure.training.preflight.job import checklist
from perdure.training.wire.node import CheckOutcome
from tests.jobs import small_job


def outcomes(**sections):
    job = small_job(**{"data": {"sources": ["/corpus"]}, "steps": 1000, **sections})
    return {check.name: check.outcome for check in checklist(job)}


def test_the_defaults_have_nothing_to_complain_about():
    outcome_of = outcomes()
    assert outcome_of.pop("device_memory") is CheckOutcome.SKIPPED, "this machine has no device"
    assert set(outcome_of.values()) == {CheckOutcome.OK}


@pytest.mark.parametrize(
    ("sections", "name"),
    [
        ({"checkpoint": {"every_steps": 2000}}, "checkpoint_interval"),
        ({"checkpoint": {"every_steps": 400}}, "checkpoint_interval"),
        ({"checkpoint": {"every_s": 7200, "mtbf_s": 3600}}, "checkpoint_interval"),
        ({"checkpoint": {"keep_last": 1}}, "retention"),
        ({"restart": {"unconditional": False}}, "restart_policy"),
        ({"engine": {"spares": 0}}, "spares"),
        ({"parallelism": {"kind": "fsdp2"}}, "replicas"),
    ],
)
def test_what_weakens_recovery_is_a_warning(sections, name):
    by_name = outcomes(**sections)
    assert [n for n, outcome in by_name.items() if outcome is CheckOutcome.WARNING] == [name]


def test_a_sane_interval_of_the_job_s_own_passes():
    assert outcomes(checkpoint={"every_steps": 100})["checkpoint_interval"] is CheckOutcome.OK


def test_of_a_command_only_what_is_known_is_judged():
    by_name = outcomes(worker={"command": ["true"]})
    assert "checkpoint_interval" not in by_name
    assert by_name["replicas"] is CheckOutcome.SKIPPED


@pytest.mark.parametrize(
    ("sizes", "outcome", "words"),
    [
        ({"tensor": 2}, CheckOutcome.OK, "2 copies of every shard: [0, 2] [1, 3]"),
        ({"pipeline": 4}, CheckOutcome.WARNING, "one copy of every shard"),
    ],
)
@pytest.mark.parametrize("worker", [{"command": ["true"]}, {"recipe": "mine:main"}])
def test_a_layout_that_is_given_is_judged_by_its_replicas(worker, sizes, outcome, words):
    batch = {"global_batch_size": 8}
    job = small_job(worker=worker, parallelism=sizes, batch=batch, steps=1000)
    (check,) = (check for check in checklist(job) if check.name == "replicas")
    assert check.outcome is outcome
    assert words in check.seen
