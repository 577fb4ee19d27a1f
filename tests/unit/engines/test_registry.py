"""Every engine that a job can name is there."""

from __future__ import annotations

from typing import get_args

from training.engines.registry import ENGINES
from training.specs.engine import AnyEngineSpec, EngineSpec


def test_every_kind_of_engine_in_the_specs_has_an_engine():
    specs = EngineSpec.__subclasses__()
    kinds = {kind for spec in specs for kind in get_args(spec.model_fields["kind"].annotation)}
    assert kinds == set(ENGINES), "training/engines/registry.py: ENGINES needs a line for each kind"


def test_a_job_accepts_the_section_of_every_engine():
    accepted = set(get_args(AnyEngineSpec)) or {AnyEngineSpec}
    missing = set(EngineSpec.__subclasses__()) - accepted
    assert not missing, "training/specs/engine.py: AnyEngineSpec needs every section"
