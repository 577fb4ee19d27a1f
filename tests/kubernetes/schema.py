"""Which fields of a Kubernetes document no schema knows.

The API server drops an unknown field without a word (seen with 1.20.2 and a client that does not
validate), so a misspelt one would have no effect and no error. Core objects are compared with the
models of the official Python client, which come from Kubernetes' own OpenAPI document; custom
resources with their CRDs in `crds/`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from kubernetes.client import models

CRDS = Path(__file__).with_name("crds")
_LIST = re.compile(r"list\[(.+)\]")
_QUANTITIES = re.compile(r"\.(limits|requests)\.[^ ]+$")
_DICT = re.compile(r"dict\(str, (.+)\)")


def unknown_fields(document: Mapping[str, Any]) -> list[str]:
    """The paths of a document that its schema does not have, or has in another shape.

    Args:
        document: one object, as it would be sent to the API server.

    Raises:
        LookupError: neither the client nor a CRD knows its apiVersion and kind.
    """
    api_version, kind = str(document.get("apiVersion")), str(document.get("kind"))
    schema = _custom_schemas().get((api_version, kind))
    if schema is not None:
        return sorted(_in_custom(document, schema))
    name = f"{api_version.rpartition('/')[2].capitalize()}{kind}"
    if not hasattr(models, name):
        raise LookupError(f"no schema is known of {kind} of {api_version}")
    return sorted(_in_model(document, name, ""))


def _in_model(value: Any, kind: str, path: str) -> Iterator[str]:
    """What is wrong below a value that is to be of a type as the client names it."""
    of_list, of_dict = _LIST.fullmatch(kind), _DICT.fullmatch(kind)
    is_map = of_dict is not None or hasattr(models, kind)
    if value is None:
        return
    if of_list is not None and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _in_model(item, of_list[1], f"{path}[{index}]")
    elif of_list is not None:
        yield f"{path} is no list"
    elif is_map and not isinstance(value, Mapping):
        yield f"{path} is no map"
    elif of_dict is not None:
        for key, item in value.items():
            yield from _in_model(item, of_dict[1], f"{path}.{key}")
    elif is_map:
        yield from _in_fields(value, kind, path)
    else:
        yield from _in_plain(value, kind, path)


def _in_fields(value: Mapping[str, Any], kind: str, path: str) -> Iterator[str]:
    model = getattr(models, kind)
    types = {json: model.openapi_types[name] for name, json in model.attribute_map.items()}
    for key, item in value.items():
        below = f"{path}.{key}".lstrip(".")
        if key in types:
            yield from _in_model(item, types[key], below)
        else:
            yield below


def _in_plain(value: Any, kind: str, path: str) -> Iterator[str]:
    """Texts must be texts: YAML makes 8 and true of what a variable or label needs in quotes."""
    wanted = {"str": str, "bool": bool, "int": int}.get(kind)
    if type(value) is int and _QUANTITIES.search(path):
        return  # the API takes a number for a quantity
    if wanted is not None and type(value) is not wanted:
        yield f"{path} is no {kind}"


def _in_custom(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[str]:
    yield from _in_model(document.get("metadata", {}), "V1ObjectMeta", "metadata")
    own = {key: item for key, item in document.items() if key != "metadata"}
    yield from _in_openapi(own, schema, "")


def _in_openapi(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _in_openapi(item, schema.get("items", {}), f"{path}[{index}]")
    if not isinstance(value, Mapping) or schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    if not known and others is None and schema.get("type") != "object":
        return  # a schema that says nothing of its fields takes any
    for key, item in value.items():
        below = f"{path}.{key}".lstrip(".")
        if key in known:
            yield from _in_openapi(item, known[key], below)
        elif others:
            yield from _in_openapi(item, others if isinstance(others, Mapping) else {}, below)
        else:
            yield below


@cache
def _custom_schemas() -> dict[tuple[str, str], Mapping[str, Any]]:
    """The schemas of the CRDs, by apiVersion and kind."""
    found = {}
    for path in sorted(CRDS.rglob("*.yaml")):
        for crd in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            spec = crd["spec"]
            for version in spec["versions"]:
                key = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
                found[key] = version["schema"]["openAPIV3Schema"]
    return found
