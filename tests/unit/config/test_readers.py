"""No setting is accepted that changes nothing: every field of a job, and every entry, has a reader.

A field that has none is removed, or refused, or gets one; what is listed here instead has a reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from perdure.training.config.engine import EngineSpec
from perdure.training.config.job import Job
from perdure.training.platforms.forms import ENTRIES, NO_LIMIT, Platform, read_platform
from perdure.training.platforms.settings import PAIRS
from perdure.training.recovery.rungs import JobPolicy
from tests.unit.config.readers import Product, product, with_reader

# What only shows settings, to people.
ADVICE = frozenset(
    {
        ("perdure.training.config.recommendations", "*"),
        ("perdure.training.preflight.job", "*"),
        ("perdure.training.platforms.printing", "*"),
        ("perdure.preflight", "*"),
    }
)
# Fields without a reader of their own.
EXCEPTIONS: Mapping[str, str] = {
    "CommSpec.chip": "says what is there: op_retry.enabled is refused without a3",
    "CommSpec.mc2": "says what the program does: op_retry.enabled is refused with it",
    "RestartSpec.from_platform": "sets the other fields, before the job is made",
    "WorkerSpec.mindformers": "sets other fields, before the job is made",
}
# Those of the product: a test may have made one of its own.
ENGINES = [one for one in EngineSpec.__subclasses__() if one.__module__.startswith("perdure.")]


def sections(model: type[BaseModel] = Job) -> Iterator[type[BaseModel]]:
    """The classes of a job's schema, of the engines all of them."""
    yield model
    for field in model.model_fields.values():
        for kind in _mentioned(field.annotation):
            if issubclass(kind, EngineSpec):
                for engine in ENGINES:
                    yield from sections(engine)
            else:
                yield from sections(kind)


def _mentioned(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for one in get_args(annotation):
        yield from _mentioned(one)


def qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@pytest.fixture(scope="module")
def source() -> Product:
    return product()


@pytest.fixture(scope="module")
def unread(source: Product) -> set[str]:
    """Fields of the job's schema that nothing acts on."""
    found = set(sections())
    settings = {qualified(JobPolicy), qualified(EngineSpec), *map(qualified, found)}
    live = with_reader(source, settings=settings, advice=ADVICE)
    dead = set()
    for kind in found:
        for name in kind.model_fields:
            owner = source.owner(qualified(kind), name)
            assert owner is not None, f"{kind.__qualname__}.{name}"
            if (owner.name, name) not in live:
                dead.add(f"{owner.name.rpartition('.')[2]}.{name}")
    return dead


def test_every_field_of_a_job_has_a_reader(unread):
    assert unread <= EXCEPTIONS.keys()


PROGRAM = {
    "settings.py": """
        class Spec:
            acted_on: int
            only_checked: int
            only_shown: int
            handed_over: int
            handed_to_nobody: int
            in_a_used_property: int
            in_an_unused_property: int
            never_named: int

            def _check(self):
                if self.only_checked < 0:
                    raise ValueError(self.only_checked)

            @property
            def used(self) -> int:
                return self.in_a_used_property + 1

            @property
            def unused(self) -> int:
                return self.in_an_unused_property + 1

        class Job:
            spec: Spec
    """,
    "program.py": """
        from dataclasses import dataclass
        from product.settings import Job, Spec

        @dataclass
        class Config:
            one: int
            two: int

        class Agent:
            def __init__(self, config: Config) -> None:
                self._config = config

            def run(self) -> int:
                return self._config.one

        def start(job: Job) -> Agent:
            specs = [job.spec for _ in range(2)]
            for spec in specs:
                print(spec.acted_on, spec.used)
            return Agent(Config(one=job.spec.handed_over, two=job.spec.handed_to_nobody))

        def advise(spec: Spec) -> None:
            print(spec.only_shown)

        def unrelated(other: object) -> None:
            print(other.never_named)
    """,
}


def test_a_field_that_nothing_acts_on_is_found(tmp_path):
    """The search itself: what is checked, shown or handed on is not yet read."""
    folder = tmp_path / "product"
    folder.mkdir()
    for name, text in PROGRAM.items():
        (folder / name).write_text("\n".join(line[8:] for line in text.splitlines()))
    found = product(tmp_path, ["product"])
    spec = "product.settings.Spec"
    settings = {spec, "product.settings.Job"}
    live = with_reader(found, settings=settings, advice={("product.program", "advise")})
    read = {name for owner, name in live if owner == spec}
    assert read == {"acted_on", "handed_over", "in_a_used_property", "used"}


def samples(name: str) -> list[str]:
    """Values that an entry of a platform may have, as its row describes them."""
    allowed = ENTRIES[name].allowed
    if name == "MS_ENABLE_TFT":
        return [f"{{{key}:1}}" for key in ("TTP", "UCE", "HCCE", "ARF", "TRE", "TSP", "RSC")]
    if allowed == "a number above 0":
        return ["0.5", "44"]
    limits = re.fullmatch(r"(-?\d+) to (\d+)", allowed)
    if limits is not None:
        return list(limits.groups())
    return [word.strip() for word in allowed.rpartition(":")[2].split(",")]


# ModelArts refuses its other annotations without the first.
BESIDE = {"fault-tolerance/job-retry-num": "8"}
ABSENT = frozenset({"false", "False", str(NO_LIMIT)})  # the same as no entry


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_of_a_platform_changes_something_or_says_that_it_does_not(name, unread):
    facts = {pair.name for pair in PAIRS} | {pair.other for pair in PAIRS}
    dead = {field.partition(".")[2] for field in unread - EXCEPTIONS.keys()}
    others = BESIDE if ENTRIES[name].platform is Platform.MODELARTS else {}
    without = read_platform({one: text for one, text in others.items() if one != name})
    for text in samples(name):
        reading = read_platform(others | {name: text})
        found = [one for one in ENTRIES[name].read(name, text) if not isinstance(one, str)]
        is_fact = any(one.name in facts for one in found)
        seen = (reading.fields, reading.warnings)
        differs = seen != (without.fields, without.warnings)
        assert differs or is_fact or text in ABSENT, text
        assert dead.isdisjoint(reading.fields)
