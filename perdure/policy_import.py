"""`perdure policy import`: another platform's document of fault tolerance as sections of a job."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from perdure.console import AsJson, print_json, warn
from perdure.training.config.job import parse_job
from perdure.training.config.job_file import read_document
from perdure.training.errors import InputError
from perdure.training.platforms.checklist import CHECKLIST, import_fields
from perdure.training.platforms.mindformers import import_configuration, is_configuration

MAX_BYTES = 1 << 20


def import_policy(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="annotations as JSON or YAML, or a Python file with the dictionary"
        ),
    ],
    *,
    as_json: AsJson = False,
) -> None:
    """Print a platform's document of fault tolerance as sections of a job file.

    FILE holds annotations, labels and variables, in a manifest or alone, the checklist
    `fault_tolerance_config = {...}`, or the YAML configuration of MindSpore Transformers. A comment
    says what became of each field.
    """
    document = read_foreign_document(file)
    read = import_configuration if is_configuration(document) else import_fields
    imported = read(document)
    if not imported.fields:
        raise InputError(str(file), "has no field")
    check_sections(imported.sections)
    if as_json:
        fields = [asdict(field) for field in imported.fields]
        print_json({"job": imported.sections, "fields": fields, "warnings": imported.warnings})
        return
    for line in imported.warnings:
        warn(line)
    print("\n".join(f"# {field.text}" for field in imported.fields))
    if imported.sections:
        print(yaml.safe_dump(imported.sections, sort_keys=False, allow_unicode=True).rstrip())


def read_foreign_document(path: Path) -> Mapping[str, Any]:
    """Read a mapping from JSON, YAML, or a dictionary that a Python text assigns.

    Raises:
        InputError: the file cannot be read, or holds none.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode()
    except OSError as error:
        raise InputError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(str(path), f"is not UTF-8 text: {error.reason}") from error
    if len(content) > MAX_BYTES:
        raise InputError(str(path), f"has more than {MAX_BYTES} bytes")
    dictionary = _python_dictionary(text)
    document = dictionary if dictionary is not None else read_document(text, where=str(path))
    if not isinstance(document, dict) or not document:
        raise InputError(str(path), "must hold a mapping of names to values")
    return document


def _python_dictionary(text: str) -> dict[str, Any] | None:
    """Read the dictionary that a Python text assigns, the checklist before others; it runs none."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    dictionaries: dict[str, dict[str, Any]] = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=expression):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as expression):
                pass
            case _:
                continue
        try:
            value = ast.literal_eval(expression)
        except (ValueError, TypeError, RecursionError, MemoryError):
            continue  # an expression, which only running it would show
        if isinstance(value, dict):
            dictionaries[name] = value
    return dictionaries.get(CHECKLIST) or next(iter(dictionaries.values()), None)


def check_sections(sections: Mapping[str, Any]) -> None:
    """Check the sections as those of a job, which names a field that is out of range.

    Raises:
        InputError: the first problem.
    """
    needed = {"run_id": "imported", "storage": {"address": "file:///imported"}}
    worker = {"command": ["imported"], **sections.get("worker", {})}
    # The sizes of a program need as many ranks as only its own job has.
    checked = {name: section for name, section in sections.items() if name != "parallelism"}
    parse_job({**needed, **checked, "worker": worker})
