"""What a name that is no field of a job may stand for: pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

# A field of another section is meant only where the name is nearly its own.
OTHER_SECTION = 0.8
MAX_NAMES = 3


def names_meant(model: type[BaseModel], location: Sequence[int | str]) -> tuple[str, ...]:
    """Fields that a name may be meant for: one of its own section, or where in the job it belongs.

    Args:
        model: of the whole document.
        location: path of the name in it.
    """
    *parents, last = location
    name = str(last)
    own = {field for one in _sections_at([model], parents) for field in one.model_fields}
    close = difflib.get_close_matches(name, own, n=1)
    if close:
        return tuple(close)
    places = sorted(set(_places(model)))  # sections of a union share names
    leaves = {place.rpartition(".")[2] for place in places}
    near = difflib.get_close_matches(name, leaves, n=1, cutoff=OTHER_SECTION)
    found = tuple(place for place in places if place.rpartition(".")[2] in near)
    if len(found) > MAX_NAMES:
        depth = min(place.count(".") for place in found)
        found = tuple(place for place in found if place.count(".") == depth)
    return found if len(found) <= MAX_NAMES else ()


def _sections_at(
    models: Sequence[type[BaseModel]], path: Sequence[int | str]
) -> Sequence[type[BaseModel]]:
    """The classes of the section at a path; keys of dictionaries and indices are no fields."""
    skips_key = False
    for part in path:
        if isinstance(part, int) or skips_key:
            skips_key = False
            continue
        types = [m.model_fields[part].annotation for m in models if part in m.model_fields]
        skips_key = any(get_origin(one) in (dict, Mapping) for one in types)
        models = [section for one in types for section in _sections_of(one)]
    return models


def _sections_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """The classes in a type, such as those of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for one in get_args(annotation):
        yield from _sections_of(one)


def _places(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every field of a document by its path; of lists and dictionaries only the field itself."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        if get_origin(field.annotation) in (dict, Mapping, tuple, list):
            continue
        for section in _sections_of(field.annotation):
            yield from _places(section, f"{prefix}{name}.")
