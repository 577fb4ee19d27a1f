"""Job files: YAML or JSON, with overrides from the command line, and without secrets.

Fields that YAML would pass over in silence, such as a second value, are refused. No message holds
the text itself: it may be that of a secret.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from perdure.training.config import pod_rules
from perdure.training.config.document import why_unbounded
from perdure.training.config.engine import KubernetesEngineSpec
from perdure.training.config.intervals import check_intervals
from perdure.training.config.job import Job, JobTemplate, parse_job, parse_template
from perdure.training.config.secrets import why_secret
from perdure.training.errors import InputError
from perdure.training.masking import has_key
from perdure.training.platforms.mindformers import import_configuration, is_configuration

_NAME = re.compile(r"[A-Za-z_][\w/-]*")
_MERGE = "tag:yaml.org,2002:merge"
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
MAX_FILE_BYTES = 1 << 20

AnyJob = TypeVar("AnyJob", bound=Job)


class _Loader(yaml.SafeLoader):
    """YAML whose numbers are those of JSON: 1:30 is no 90, 010 no 8, and 1e-4 is a number."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?(?:0|[1-9][0-9_]*)\Z"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"[-+]?(?:(?:0|[1-9][0-9_]*)(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?\Z"
        r"|[-+]?\.(?:inf|Inf|INF)\Z|\.(?:nan|NaN|NAN)\Z"
    ),
    list("-+.0123456789"),
)


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """Read a YAML or JSON job file; `overrides` are `dotted.key=value` (value is YAML).

    Raises:
        InputError: the first problem found, naming field, value and what is allowed.
    """
    return _load(parse_job, Path(path), overrides)


def load_template(path: Path, overrides: Sequence[str] = ()) -> JobTemplate:
    """Read the job file of a deployment, whose run_id may have fields."""
    return _load(parse_template, path, overrides)


def _load(
    parse: Callable[[Mapping[str, Any]], AnyJob], path: Path, overrides: Sequence[str]
) -> AnyJob:
    document = read_document_file(path)
    if not isinstance(document, dict):
        raise InputError(str(path), "must be a mapping of job fields")
    for override in overrides:
        _set_override(document, override)
    job = parse(_with_configuration(document))
    refuse_secrets(job)
    check_intervals(job)
    return job


def _with_configuration(document: dict[str, Any]) -> dict[str, Any]:
    """Add to a job the fields that the configuration of its program gives, and it itself does not.

    Raises:
        InputError: the configuration cannot be read.
    """
    worker = document.get("worker")
    name = worker.get("mindformers") if isinstance(worker, dict) else None
    if not isinstance(worker, dict) or not isinstance(name, str):
        return document
    file = Path(str(worker.get("cwd") or ".")) / name
    try:
        configuration = read_document_file(file)
    except InputError as error:
        raise InputError("worker.mindformers", str(error)) from None
    if not isinstance(configuration, dict) or not is_configuration(configuration):
        raise InputError(
            "worker.mindformers", f"{file} is no configuration of MindSpore Transformers"
        )
    sections = import_configuration(configuration).sections
    if "checkpoints" in worker:
        del sections["worker"]["checkpoints"], sections["worker"]["resume"]
    return _merge_below(document, sections)


def _merge_below(document: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Merge defaults into a document, whose own fields win."""
    merged = dict(document)
    for key, value in defaults.items():
        present = merged.setdefault(key, value)
        if isinstance(present, dict) and isinstance(value, Mapping):
            merged[key] = _merge_below(present, value)
    return merged


def refuse_secrets(job: Job) -> None:
    """Check that the job, which others read, holds no secret.

    Raises:
        InputError: it does; names the variable, never the value.
    """
    for name, value in job.env.items():
        why = why_secret(name, value)
        if why is not None:
            raise InputError(
                f"env.{name}",
                f"{why}, and a job holds no secrets: name where it is kept, env_from: "
                f"{{{name}: {{secret: VARIABLE}}}}, or {{file: PATH}}, or {{block: NAME}}",
            )
    if isinstance(job.engine, KubernetesEngineSpec):
        for name, value in pod_rules.literal_variables(job.engine.pod):
            why = why_secret(name, value)
            if why is not None:
                raise InputError(
                    f"engine.pod: {name}",
                    f"{why}, and a job holds no secrets: name a Secret of the cluster, "
                    "valueFrom: {secretKeyRef: ...}, or engine.env_secrets",
                )
    if any(has_key(part) for part in job.worker.command or ()):
        raise InputError(
            "worker.command", "holds a key: use env_from, and read the variable in the program"
        )


def _set_override(document: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise InputError("--set", f"{override!r} is not of the form key=value")
    *parents, leaf = key.split(".")
    target = document
    for parent in parents:
        child = target.setdefault(parent, {})
        if not isinstance(child, dict):
            raise InputError("--set", f"{key}: {parent} is not a section")
        target = child
    target[leaf] = read_document(text, where=f"--set: {key}")


def read_document_file(path: Path) -> Any:
    """Read the document in a YAML or JSON file.

    Raises:
        InputError: it cannot be read, is none, or gives a field twice.
    """
    try:
        with path.open("rb") as file:  # which may be a pipe of the shell, or have no end
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise InputError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        problem = f"byte 0x{error.object[error.start]:02x} is not UTF-8, line {line}"
        raise InputError(str(path), f"is not YAML: {problem}") from None
    if len(data) > MAX_FILE_BYTES:
        raise InputError(str(path), f"has more than {MAX_FILE_BYTES} bytes, which no job needs")
    return read_document(text, where=str(path))


def read_document(text: str, *, where: str) -> Any:
    """Parse a YAML text.

    Args:
        text: YAML or JSON.
        where: what it is, for the message.

    Raises:
        InputError: it is none, or gives a field twice.
    """
    loader: _Loader | None = None
    try:
        loader = _Loader(text)  # looks at every character
        node = loader.get_single_node()
        why = why_unbounded(node)
        if why is not None:
            raise InputError(where, why)
        for field, (first, second) in _repeated(node):
            places = f"lines {first} and {second}" if first != second else f"line {first}"
            raise InputError(where, f"{field} is given twice, in {places}")
        return None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise InputError(where, f"is not YAML: {_problem(error, text)}") from None
    except RecursionError:
        raise InputError(where, "is not YAML: it is nested too deeply") from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        # SafeLoader makes dates and numbers of what looks like them, such as 2026-13-01.
        raise InputError(where, "holds a date or number that there is not; quote it") from None
    finally:
        if loader is not None:
            loader.dispose()


def _repeated(root: yaml.Node | None) -> Iterator[tuple[str, tuple[int, int]]]:
    """Find fields that a mapping has twice, with the lines: the second value would count."""
    open_nodes, visited = [("", root)], set[int]()
    while open_nodes:
        path, node = open_nodes.pop(0)
        if id(node) in visited:  # an alias
            continue
        visited.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            open_nodes += [(f"{path}{index}.", child) for index, child in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            continue
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            identity, line = (key.tag, key.value), key.start_mark.line + 1
            name = key.value if _NAME.fullmatch(key.value) else "a field"
            if identity in lines:
                yield f"{path}{name}", (lines[identity], line)
            lines[identity] = line
            open_nodes.append((f"{path}{name}.", value))


def _problem(error: yaml.YAMLError, text: str) -> str:
    """Describe the problem and its place."""
    if isinstance(error, yaml.reader.ReaderError):
        line = text[: error.position].count("\n") + 1
        return f"character {error.character:#06x} is not allowed, line {line}"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return "cannot be read"
    mark = error.problem_mark
    problem = re.sub(r"(alias|anchor|tag) .*", r"\1", error.problem or "cannot be read")
    return f"{problem}, line {mark.line + 1}, column {mark.column + 1}"
