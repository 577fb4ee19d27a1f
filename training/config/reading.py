"""Problems of a job, in words: the field, its value and what is allowed.

A name that is no field is compared with the fields that it may stand for.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from perdure.storage.address import Credentials
from perdure.training.config.run_name import NAME, TEMPLATE, problem_of

SECRET_FIELDS = frozenset(Credentials.model_fields)  # ledger and Prefect show a job in clear text
SECRET_SECTIONS = (("env",), ("env_from",))  # no message shows a value that was given there
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def field_of(location: tuple[int | str, ...]) -> str:
    """Name the field of a problem, dotted; without values from where secrets may be."""
    if location[:1] in SECRET_SECTIONS and len(location) > 1:
        # The text in `env: {TOKEN=value}` is the name of a variable that has no value.
        location = (location[0], *(part for part in location[1:] if _VARIABLE.fullmatch(str(part))))
    return ".".join(str(part) for part in location)


# Messages in place of pydantic's for a value of the wrong shape.
_SHAPES = {
    "tuple_type": "must be a list, [a, b, ...]",
    "model_type": "must be a section with fields of its own",
}


def message_of(error: Mapping[str, Any], kind: type[BaseModel]) -> str:
    """Describe a problem on a line: the value in the job and what is allowed instead.

    Args:
        error: as pydantic lists it.
        kind: the model that was validated.
    """
    if SECRET_FIELDS.intersection(error["loc"]):
        return (
            "keys do not belong into a job: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in "
            "the environment, or name a Prefect block in credentials_block"
        )
    is_secret = error["loc"][:1] in SECRET_SECTIONS
    match error["type"]:
        case "model_type" | "dict_type" if error["loc"][:1] == ("env_from",):
            message = (
                "must name where the value is kept: {secret: VARIABLE}, {file: PATH}, {block: NAME}"
            )
        case "dict_type" if is_secret:
            message = "must be a section of variables, {NAME: VALUE}"
        case "string_type" if is_secret:
            message = "must be a text, in quotes"
        case "extra_forbidden":
            meant = " or ".join(names_meant(kind, error["loc"]))
            hint = f"did you mean {meant}?" if meant else "'perdure schema' lists the fields"
            message = f"no such field; {hint}"
        case "missing":
            message = "is missing"
        case "string_pattern_mismatch" if error["ctx"]["pattern"] in (NAME, TEMPLATE):
            message = problem_of(str(error["input"]), error["ctx"]["pattern"])
        case "value_error":
            message = str(error["msg"]).removeprefix("Value error, ")
        case _ if is_secret:
            message = str(error["msg"])
        case shape:
            value = json.dumps(error["input"], default=str)[:120]
            message = f"{value}: {_SHAPES.get(shape, error['msg'])}"
    return message


# A field of another section is meant only where the name is nearly its own.
OTHER_SECTION = 0.8
MAX_NAMES = 3


def names_meant(model: type[BaseModel], location: Sequence[int | str]) -> tuple[str, ...]:
    """Find fields that a name may stand for: in its own section, or elsewhere in the job.

    Args:
        model: class of the whole document.
        location: path of the name in it.
    """
    *parents, last = location
    name = str(last)
    fields = {field for section in _sections_at([model], parents) for field in section.model_fields}
    close = difflib.get_close_matches(name, fields, n=1)
    if close:
        return tuple(close)
    places = sorted(set(_places(model)))  # sections of a union share names
    leaves = {place.rpartition(".")[2] for place in places}
    near = difflib.get_close_matches(name, leaves, n=1, cutoff=OTHER_SECTION)
    matches = tuple(place for place in places if place.rpartition(".")[2] in near)
    if len(matches) > MAX_NAMES:
        depth = min(place.count(".") for place in matches)
        matches = tuple(place for place in matches if place.count(".") == depth)
    return matches if len(matches) <= MAX_NAMES else ()


def _sections_at(
    models: Sequence[type[BaseModel]], path: Sequence[int | str]
) -> Sequence[type[BaseModel]]:
    """Find the classes of the section at a path; keys of dictionaries and indices are no fields."""
    skips_key = False
    for part in path:
        if isinstance(part, int) or skips_key:
            skips_key = False
            continue
        types = [m.model_fields[part].annotation for m in models if part in m.model_fields]
        skips_key = any(get_origin(kind) in (dict, Mapping) for kind in types)
        models = [section for kind in types for section in _sections_of(kind)]
    return models


def _sections_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the classes in a type, such as those of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections_of(argument)


def _places(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every field by its path; lists and dictionaries count as a field."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        if get_origin(field.annotation) in (dict, Mapping, tuple, list):
            continue
        for section in _sections_of(field.annotation):
            yield from _places(section, f"{prefix}{name}.")
