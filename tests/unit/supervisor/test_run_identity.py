"""Whether a job may go on with the run that has its name."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.training.config.job import Job, parse_job
from perdure.training.errors import RunConflict
from perdure.training.journal.history import RunHistory, replay
from perdure.training.journal.records import (
    AnyRecord,
    CheckpointRecorded,
    RunCreated,
    RunEnded,
    RunReopened,
)
from perdure.training.supervisor.run_identity import (
    REOPEN,
    completed_before,
    is_complete,
    refuse_other_job,
)
from tests.jobs import small_job

COMMAND = {"command": ["bash", "train.sh"]}


def session(**sections: Any) -> Job:
    return small_job(**{"steps": 30, **sections})


def command(**sections: Any) -> Job:
    return small_job(**{"worker": COMMAND, **sections})


def created(job: Job) -> RunCreated:
    return RunCreated(at_s=1.0, epoch=1, job=job.model_dump(mode="json"))


def ended(job: Job, outcome: Any = "completed") -> RunEnded:
    return RunEnded(
        at_s=9.0, epoch=1, outcome=outcome, message="", target_step=job.target_step,
        command=job.worker.command,
    )  # fmt: skip


def saved(step: int) -> CheckpointRecorded:
    return CheckpointRecorded(at_s=5.0, epoch=1, placement=1, attempt=1, step=step)


def history(job: Job, *records: AnyRecord) -> RunHistory:
    return replay([created(job), *records])


@pytest.mark.parametrize(
    ("recorded", "now", "words"),
    [
        ({"seed": 7}, {"seed": 8}, "another seed: 7, here 8;"),
        ({"optimizer": {"lr": 3e-4}}, {"optimizer": {"lr": 1e-3}},
         "another optimizer.lr: 0.0003, here 0.001;"),
        ({}, {"model": {"num_layers": 9}}, "another model.num_layers: 4, here 9;"),
        ({}, {"worker": {"recipe": "own:main"}}, 'another worker.recipe: null, here "own:main";'),
        ({"worker": COMMAND}, {"worker": {"command": ["x" * 200]}},
         'another worker.command: ["bash", "train.sh"], here ["xxxx'),
    ],
)  # fmt: skip
def test_a_job_of_other_weights_is_refused_by_the_value_that_differs(recorded, now, words):
    was = history(small_job(**recorded), saved(10))
    with pytest.raises(RunConflict) as conflict:
        refuse_other_job(small_job(**now), was)
    assert words in str(conflict.value)
    assert len(str(conflict.value)) < 400
    refuse_other_job(small_job(**now), history(small_job(**recorded)))  # nothing depends on it yet


def test_a_command_that_has_saved_checkpoints_of_its_own_may_be_corrected():
    checkpoint = saved(10).model_copy(update={"path": "/out/ckpt.pt"})
    corrected = small_job(worker={"command": ["bash", "other.sh"]})
    refuse_other_job(corrected, history(command(), checkpoint))
    with pytest.raises(RunConflict):
        refuse_other_job(corrected, history(command(), checkpoint, saved(20)))


def test_a_field_that_the_record_of_another_version_lacks_is_no_difference():
    record = created(session())
    del record.job["optimizer"]["grad_clip_norm"]
    refuse_other_job(session(), replay([record, saved(10)]))


def test_a_run_from_before_perdures_recipes_moved_goes_on_with_the_new_name():
    def recipe(name: str) -> Job:
        return session(worker={"recipe": name})

    was = history(recipe("training.trainer.pretrain:main"), saved(10))
    refuse_other_job(recipe("perdure.training.trainer.pretrain:main"), was)
    with pytest.raises(RunConflict, match=r"another worker\.recipe: \"training\.trainer"):
        refuse_other_job(recipe("perdure.training.other:main"), was)


def test_a_session_is_complete_at_its_target_and_a_larger_one_is_not_reached():
    was = history(session(), saved(30), ended(session()))
    assert is_complete(session(), was)
    assert is_complete(session(steps=20), was)
    assert not is_complete(session(steps=40), was)
    assert not is_complete(session(), history(session(), ended(session(), "failed")))
    assert not is_complete(session(), history(session()))


def test_a_command_goes_on_with_a_larger_target_than_it_was_completed_with():
    with_target = history(command(steps=30), ended(command(steps=30)))
    assert is_complete(command(steps=30), with_target)
    assert is_complete(command(), with_target)
    assert not is_complete(command(steps=40), with_target)
    without = history(command(), ended(command()))
    assert is_complete(command(), without)
    assert not is_complete(command(steps=30), without), "it was given a target"
    reopened = history(command(), ended(command()), RunReopened(at_s=10.0, epoch=1))
    assert not is_complete(command(), reopened)
    assert is_complete(command(), history(command(), RunReopened(at_s=10.0, epoch=1),
                                          ended(command())))  # fmt: skip


def test_another_command_of_a_completed_run_is_refused_unless_the_run_goes_on():
    other = {"command": ["bash", "other.sh"]}
    records = (ended(command(steps=30)),)
    was = history(command(steps=30), *records)
    with pytest.raises(RunConflict) as conflict:
        refuse_other_job(command(worker=other, steps=30), was)
    assert 'another worker.command: ["bash", "train.sh"], here ["bash", "other.sh"]' in str(
        conflict.value
    )
    assert "--reopen" in str(conflict.value)
    refuse_other_job(command(worker=other, steps=40), was)
    reopened = history(command(steps=30), *records, RunReopened(at_s=10.0, epoch=1))
    refuse_other_job(command(worker=other, steps=30), reopened)
    refuse_other_job(command(steps=30), was)


def test_a_command_that_changed_before_the_end_is_compared_with_the_last_one():
    other = command(worker={"command": ["bash", "mended.sh"]})
    was = history(command(), ended(other))
    refuse_other_job(other, was)
    with pytest.raises(RunConflict):
        refuse_other_job(command(), was)


def test_a_target_that_nobody_gave_a_command_stays_so_through_documents():
    assert command().target_step is None
    assert parse_job(command().model_dump(mode="json")).target_step is None
    assert '"steps":' not in command().model_dump_json()
    assert parse_job(command(steps=1000).model_dump(mode="json")).target_step == 1000
    assert parse_job(session().model_dump(mode="json")).target_step == 30


def test_how_a_complete_run_goes_on_is_in_its_line():
    assert completed_before(session(), history(session(), saved(30))) == (
        "run run was completed before, at step 30; a larger 'steps' has it go on"
    )
    line = completed_before(command(), history(command()))
    assert line == f"run run was completed before; '{REOPEN}' has it go on"


def test_a_built_in_recipe_under_its_former_name_is_no_difference():
    job = session(worker={"recipe": "perdure.training.trainer.pretrain:main"})
    past = history(job, saved(30))
    recorded = job.model_dump(mode="json")
    recorded["worker"]["recipe"] = "training.trainer.pretrain:main"
    past.job = recorded
    assert "differs" not in completed_before(job, past)


def test_settings_that_a_complete_run_ignores_are_named_without_their_values():
    was = history(command(env={"SIZE": "1", "OLD": "1"}))
    line = completed_before(command(env={"SIZE": "secret", "NEW": "1"}, log_path="/logs"), was)
    assert line.endswith("created with: env.NEW, env.OLD, env.SIZE, log_path")
    assert "secret" not in line
    many = {f"A{number}": "1" for number in range(20)}
    assert completed_before(command(env=many), was).endswith(" and 14 more")
