"""Which run a flow run is for, and what it says when it is for none."""

from __future__ import annotations

from contextlib import nullcontext
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, State
from prefect.logging import disable_run_logger

from perdure.tasks import entry
from perdure.tasks.entry import _training, enter, is_same_run, job_of, standing, taken_job
from perdure.training.journal.ledger import Identity
from perdure.training.supervisor.job_registry import remember_job
from perdure.training.supervisor.run_handle import RunHandle
from tests.jobs import job_document, small_job


def flow_run(parameters, name="fuzzy-otter") -> FlowRun:
    return FlowRun(flow_id=uuid4(), parameters=parameters, name=name)


def run_id_of(flow_run) -> str | None:
    job = job_of(flow_run)
    return job.run_id if job is not None else None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (None, "job: is missing: "),
        (7, "job: is missing: "),
        (job_document(steps=-1), "steps: -1: "),
        (job_document(run_id="n" * 64), "run_id: "),
    ],
)
def test_a_flow_run_without_a_job_to_train_fails_with_one_line(given, reason):
    state = enter({"job": given})
    assert isinstance(state, State)
    assert state.is_failed()
    message = str(state.message)
    assert message.startswith(reason)
    assert "\n" not in message


def test_a_job_with_a_name_is_trained_under_it(tmp_path):
    assert enter({"job": job_document(tmp_path)}) == small_job(tmp_path)


def test_the_job_of_a_template_has_the_name_of_the_flow_run():
    document = {"job": job_document(run_id="nightly-{date}")}
    assert run_id_of(flow_run(document, "nightly-2026-11-24")) == "nightly-2026-11-24"
    assert run_id_of(flow_run({"job": job_document()}, "whatever")) == "run"
    assert run_id_of(flow_run({})) is None


def test_a_flow_run_keeps_the_run_that_it_has_taken_whatever_its_variable_holds(
    tmp_path, perdure_home
):
    job = small_job(tmp_path)
    own, other = flow_run({"job": "by-name"}, "run"), flow_run({"job": "by-name"}, "run")
    assert taken_job(own) is None, "no such run yet"
    run = RunHandle(job, home=perdure_home)
    run.ledger.take(Identity.of_this_process(flow_run=str(own.id)))
    remember_job(perdure_home, job)
    assert job_of(own) == taken_job(own) == job  # there is no server here to ask for the Variable
    assert taken_job(other) is None, "it has the name of the run, and has not taken it"
    assert taken_job(own.model_copy(update={"parameters": {"job": job_document()}})) is None


def test_a_variable_may_change_the_settings_of_a_run_but_not_which_run_it_is(tmp_path):
    taken = small_job(tmp_path)
    assert is_same_run(small_job(tmp_path, steps=7), taken)
    assert not is_same_run(small_job(tmp_path, run_id="other"), taken)
    assert not is_same_run(small_job(tmp_path / "other"), taken)


def test_a_run_of_the_same_template_whose_ledger_is_damaged_stops_no_later_tick(
    tmp_path, perdure_home
):
    job = small_job(tmp_path, run_id="nightly-1")
    remember_job(perdure_home, job)
    run = RunHandle(job, home=perdure_home)
    run.ledger.take(Identity.of_this_process(flow_run=str(uuid4())))
    run.store.put("runs/nightly-1/ledger/00000001.json", b"{")
    with disable_run_logger():
        assert _training("nightly-1") is None


def test_where_a_run_stands_names_the_flow_run_that_supervises_it(tmp_path):
    run = RunHandle(small_job(tmp_path, steps=50), home=tmp_path)
    own = str(uuid4())
    run.ledger.take(Identity.of_this_process(flow_run=own))
    text = standing(run, run.refresh())
    assert text.startswith("run run is still training: step 0 of 50 saved, supervised by flow run ")
    assert own in text


class Server:
    """What is asked of a Prefect server about job variables."""

    def __init__(self) -> None:
        self.variables: list[dict[str, object]] = []

    def update_flow_run(self, _flow_run_id: object, *, job_variables: dict[str, object]) -> None:
        self.variables.append(job_variables)


@pytest.mark.parametrize(
    ("image", "given", "expected"),
    [
        ("registry/perdure:1", None, [{"image": "registry/perdure:1"}]),
        (
            "registry/perdure:1",
            {"namespace": "team-a"},
            [{"namespace": "team-a", "image": "registry/perdure:1"}],
        ),
        ("registry/perdure:2", {"image": "registry/perdure:1"}, []),
        ("", None, []),
        (None, {"namespace": "team-a"}, []),
    ],
)
def test_later_processes_of_a_flow_run_start_from_the_image_of_the_first(
    monkeypatch, image, given, expected
):
    server = Server()
    monkeypatch.setattr(entry, "client_without_retries", lambda: nullcontext(server))
    monkeypatch.delenv(entry.IMAGE_ENV, raising=False)
    if image is not None:
        monkeypatch.setenv(entry.IMAGE_ENV, image)
    entry._keep_image(FlowRun(flow_id=uuid4(), name="a", job_variables=given))
    assert server.variables == expected
