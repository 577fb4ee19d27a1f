"""What is wrong with a job, in words: the field, the value that was given and what is allowed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from perdure.storage.address import Credentials
from perdure.training.specs.field_names import names_meant
from perdure.training.specs.run_name import NAME, TEMPLATE, problem_of

SECRET_FIELDS = frozenset(Credentials.model_fields)  # ledger and Prefect show a job in clear text
SECRET_SECTIONS = (("env",), ("env_from",))  # no message shows a value that was given there
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def field_of(location: tuple[int | str, ...]) -> str:
    """The field of a problem, with dots between sections; no value from where secrets may be."""
    if location[:1] in SECRET_SECTIONS and len(location) > 1:
        # Of `env: {TOKEN=value}` the text is the name of a variable that has no value.
        location = (location[0], *(one for one in location[1:] if _VARIABLE.fullmatch(str(one))))
    return ".".join(str(part) for part in location)


# Messages in place of pydantic's for a value of the wrong shape.
_SHAPES = {
    "tuple_type": "must be a list, [a, b, ...]",
    "model_type": "must be a section with fields of its own",
}


def message_of(error: Mapping[str, Any], kind: type[BaseModel]) -> str:
    """One line: the value that was given and what is allowed instead.

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
            hint = f"did you mean {meant}?" if meant else "`perdure schema` lists the fields"
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
            given = json.dumps(error["input"], default=str)[:120]
            message = f"{given}: {_SHAPES.get(shape, error['msg'])}"
    return message
