"""Every engine that a job can name is there, and another one needs no more than its own places."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pytest
from pydantic import Field, create_model

from perdure.training.config import engine as specs
from perdure.training.config.engine import AnyEngineSpec, EngineSpec, LocalEngineSpec
from perdure.training.config.job import Job, parse_job
from perdure.training.engines.registry import ENGINES, make_engine
from perdure.training.errors import InputError
from tests.jobs import job_document, small_job

KINDS = {
    spec.model_fields["kind"].default: spec
    for spec in EngineSpec.__subclasses__()
    if spec.__module__ == specs.__name__
}


def test_every_engine_has_its_section_and_every_section_its_engine():
    without_engine, without_section = set(KINDS) - set(ENGINES), set(ENGINES) - set(KINDS)
    assert not without_engine, "training/engines/registry.py: ENGINES needs a line for each kind"
    assert not without_section, "training/config/engine.py: each kind needs a section"


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_accepts_the_section_of_every_engine(kind):
    section, _ = get_args(AnyEngineSpec)
    assert KINDS[kind] in (get_args(section) or {section}), (
        "training/config/engine.py: AnyEngineSpec needs every section"
    )
    needed = {"kubernetes": {"image": "perdure"}}.get(kind, {})
    assert type(small_job(engine={"kind": kind, **needed}).engine) is KINDS[kind]


def test_a_kind_without_an_engine_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.delitem(ENGINES, "local")
    with pytest.raises(InputError, match=r"engine\.kind: 'local' has no engine in the registry"):
        make_engine(small_job(), home=tmp_path, epoch=1, secrets_env={}, created_s=0.0)


class OtherEngineSpec(EngineSpec):
    """The section of a second engine."""

    kind: Literal["other"] = Field("other", description="engine")
    queue: str = Field("all", description="of the nodes")


@pytest.fixture
def with_two_engines(monkeypatch) -> type[Job]:
    """A job that may name either."""
    either: Any = Annotated[LocalEngineSpec | OtherEngineSpec, get_args(AnyEngineSpec)[1]]
    job: type[Job] = create_model("Job", __base__=Job, engine=(either, LocalEngineSpec()))
    monkeypatch.setattr("perdure.training.config.job.Job", job)
    return job


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, LocalEngineSpec()),
        ({"nodes": 1}, LocalEngineSpec(nodes=1)),
        ({"kind": "local", "nodes": 1}, LocalEngineSpec(nodes=1)),
        ({"kind": "other", "queue": "a"}, OtherEngineSpec(queue="a")),
    ],
)
def test_a_second_engine_is_chosen_by_its_kind(with_two_engines, section, expected):
    job = parse_job(job_document(Path("/nowhere"), engine=section))
    assert job.engine == expected
    assert with_two_engines.model_validate_json(job.model_dump_json()) == job
    assert parse_job(job_document(Path("/nowhere"), engine=expected)) == job


@pytest.mark.parametrize(
    ("section", "error"),
    [
        ({"kind": "magic"}, "engine.kind: 'magic' is no engine, choose local or "),
        ({"kind": []}, "engine.kind: []: Input should be a valid string"),
        ({"nodes": 0}, "engine.nodes: 0: Input should be greater than or equal to 1"),
        ({"kind": "other", "queue": 5}, "engine.queue: 5: Input should be a valid string"),
        ({"kind": "other", "nods": 5}, "engine.nods: no such field; did you mean nodes?"),
        ({"queue": "a"}, "engine.queue: no such field; did you mean queue?"),
        (5, "engine: 5: must be a section with fields of its own"),
        (None, "engine: null: must be a section with fields of its own"),
    ],
)
@pytest.mark.usefixtures("with_two_engines")
def test_errors_of_a_second_engine_name_its_fields(section, error):
    with pytest.raises(InputError) as caught:
        parse_job(job_document(engine=section))
    assert str(caught.value).startswith(error)


def test_the_form_of_a_second_engine_is_one_that_prefect_shows(with_two_engines):
    schema = with_two_engines.model_json_schema()["properties"]["engine"]
    assert [schema_ref["$ref"] for schema_ref in schema["anyOf"]] == [
        "#/$defs/LocalEngineSpec",
        "#/$defs/OtherEngineSpec",
    ]
