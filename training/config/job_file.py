"""Job files: YAML or JSON, with overrides from the command line, and without secrets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from perdure.training.config import pod_rules
from perdure.training.config.engine import KubernetesEngineSpec
from perdure.training.config.job import Job, JobTemplate, parse_job, parse_template
from perdure.training.config.reading import read_document, read_document_file
from perdure.training.config.secrets import why_secret
from perdure.training.errors import InputError
from perdure.training.masking import has_key

AnyJob = TypeVar("AnyJob", bound=Job)


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
    job = parse(document)
    refuse_secrets(job)
    return job


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
