"""A job as a parameter of a flow: given in full, or by the name of a Prefect Variable.

The Variable holds the job as JSON, as `perdure show job.yaml` prints it; it is read when a flow run
starts. Its form in the UI begins with what has no default: the forms go by `position` (3.8.8),
since PostgreSQL does not keep the order of a document.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from prefect import Flow
from prefect.variables import Variable
from pydantic import (
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from perdure.training.config.job import Job, JobTemplate, input_error, parse_template
from perdure.training.errors import InputError, PerdureError

NAME = "^[a-z0-9][a-z0-9_-]*$"  # what Prefect allows for a Variable
VARIABLE = "a Prefect Variable that holds the job, as 'perdure show job.yaml' prints it"
JOB_IS_MISSING = (
    "is missing: give the flow run or its schedule one, as 'perdure show job.yaml' prints it, or "
    "the name of a Prefect Variable that holds one"
)
HOW_TO_SET = 'prefect variable set {name} "$(perdure show job.yaml)"'

Steps = Annotated[int | None, Field(ge=1, description="target step, in place of the job's")]
Nodes = Annotated[int | None, Field(ge=1, description="number of nodes, in place of the job's")]


@dataclass(frozen=True)
class _OrByName:
    """Metadata of a parameter type."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(_validated, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        job = handler(schema)
        _number_fields(job, handler)
        handler.resolve_ref_schema(job)["title"] = "job in full"
        name = {"type": "string", "pattern": NAME, "title": "name of a job"}
        return {"anyOf": [job, {**name, "description": VARIABLE}]}


JobParameter = Annotated[Job, _OrByName()]
TemplateParameter = Annotated[JobTemplate, _OrByName()]


def require_job(flow: Flow[..., Any]) -> None:
    """Have the server and its form ask for `job`, although the flow itself can do without.

    A deployment takes the schema of its parameters from the signature of the flow (3.8.8).
    """
    signature = inspect.signature(flow.fn, eval_str=True)
    parameters = dict(signature.parameters)
    parameters["job"] = parameters["job"].replace(default=inspect.Parameter.empty)
    flow.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=list(parameters.values())
    )


def template_of(parameters: Mapping[str, Any]) -> JobTemplate:
    """The job that the parameters of a flow run stand for: `job`, and `steps` and `nodes` of it.

    Raises:
        InputError: none is given, or it cannot be so: field, value and what is allowed.
    """
    job = parameters.get("job")
    document = job.model_dump() if isinstance(job, Job) else _named(job)
    if not isinstance(document, Mapping):
        raise InputError("job", JOB_IS_MISSING)
    if parameters.get("steps") is not None:
        document = {**document, "steps": parameters["steps"]}
    if parameters.get("nodes") is not None:
        engine = document.get("engine") or {}
        document = {**document, "engine": {**engine, "nodes": parameters["nodes"]}}
    return parse_template(document)


def _validated(job: object, validate: ValidatorFunctionWrapHandler) -> Any:
    """The job that Prefect validates for a flow.

    Raises:
        PerdureError: it cannot be so. No ValueError: of one that pydantic knows, Prefect logs all
            parameters with what is in them (3.8.8).
    """
    try:
        return validate(_named(job))
    except InputError as error:
        raise PerdureError(str(error)) from None
    except ValidationError as error:
        wrong = input_error(error)
        raise PerdureError(f"job.{wrong}" if wrong.field else f"job: {wrong}") from None


def _named(job: object) -> object:
    """The content of a Variable in place of its name; anything else is itself.

    Raises:
        InputError: there is no such Variable, or it holds no document.
    """
    if not isinstance(job, str):
        return job
    if re.fullmatch(NAME, job) is None:  # and not shown: it may be the job itself
        raise InputError("job", "is a text that is no name of a Prefect Variable")
    content: Any = Variable.get(job, default=None)
    if content is None:
        raise InputError("job", f"{job!r}: there is no such Prefect Variable")
    if not isinstance(content, Mapping):
        raise InputError(
            "job", f"{job!r}: this Prefect Variable holds no job; {HOW_TO_SET.format(name=job)}"
        )
    return content


def _number_fields(schema: JsonSchemaValue, handler: GetJsonSchemaHandler) -> None:
    """Give every field, at every depth, its position in its class, and its name in a job file."""
    numbered: set[str] = set()
    open_refs = list(_refs(schema))
    while open_refs:
        ref = open_refs.pop()
        if ref in numbered:
            continue
        numbered.add(ref)
        definition = handler.resolve_ref_schema({"$ref": ref})
        for position, (name, field) in enumerate(definition.get("properties", {}).items()):
            field |= {"position": position, "title": name}
        open_refs += _refs(definition)


def _refs(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for part in schema.values():
            yield from _refs(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _refs(part)
