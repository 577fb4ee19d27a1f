"""The page docs/job.md: every section and field of a job file, from the JSON schema of `Job`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from perdure.training.config.job import Job

Schema = Mapping[str, Any]

INTRODUCTION = """\
# The job file

A job file describes one run, in YAML or JSON. `run_id` and `storage` are required; the built-in
trainer needs `data` as well, a command or script of your own needs `worker`:

```yaml
run_id: first
storage: {address: file:///data/perdure}
data: {sources: [/data/corpus]}
```

`perdure preflight job.yaml` checks a file without starting the run, and `--set section.field=value`
overrides a field for one command. A wrong file produces one line that names the field, its value
and the values allowed. Unknown fields are errors.

The unit of a field is in its name: `_s` seconds, `_ms` milliseconds, `_bytes` bytes, `_mb`
megabytes, `_percent` percent. Steps are completed optimizer steps. The default `null` means that
the field is not set. This page is the output of `perdure schema --markdown`; `perdure schema`
prints the same as a JSON schema."""

_RANGES = {
    (True, True): "{low} to {high}",
    (True, False): "{low} or more",
    (False, True): "{high} or less",
}
_CONTAINER_NOTES = {
    "": "",
    "list": " The field holds a list of these sections.",
    "map": " The field holds a map of these sections, by name.",
}
_NOT_PROSE = re.compile(r"(\$\{\w+\}|\$+|[\w./-]*\*[\w./-]*\w)")  # variables and file patterns


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the job file.

    Attributes:
        path: dotted name in the file; "" for the fields at the top.
        schema: JSON schema of the section.
        kind: engine that the section is for; None where every job has the same section.
        container: "list" or "map" where the field holds many of these; "" for a single section.
    """

    path: str
    schema: Schema
    kind: str | None = None
    container: str = ""

    @property
    def title(self) -> str:
        """Heading on the page."""
        if not self.path:
            return "Top level"
        return f"`{self.path}`" + (f", kind {self.kind}" if self.kind else "")

    @property
    def anchor(self) -> str:
        """Fragment of a link to the heading, as GitHub makes it."""
        return re.sub(r"[^\w -]", "", self.title.lower()).replace(" ", "-")


def job_page() -> str:
    """The reference of the job file in Markdown."""
    schema = Job.model_json_schema()
    definitions = schema["$defs"]
    sections = list(_sections(Section("", schema), definitions))
    return "\n\n".join(
        [INTRODUCTION, *(_section_text(section, definitions) for section in sections)]
    )


def _sections(section: Section, definitions: Schema) -> Iterator[Section]:
    """A section, and those inside it, in the order of their fields."""
    yield section
    for name, field in section.schema["properties"].items():
        for inner in _inner_sections(_path(section, name), field, definitions):
            yield from _sections(inner, definitions)


def _inner_sections(path: str, field: Schema, definitions: Schema) -> list[Section]:
    """The sections that a field holds: none for a plain value, two for the engines."""
    container, content = _content(field)
    resolved = [_resolve(choice, definitions) for choice in _choices(content)]
    schemas = [choice for choice in resolved if "properties" in choice]
    return [
        Section(
            path=path,
            schema=schema,
            kind=_kind_of(schema) if len(schemas) > 1 else None,
            container=container,
        )
        for schema in schemas
    ]


def _content(field: Schema) -> tuple[str, Schema]:
    """The container of a field, "list", "map" or "", and the schema of its content."""
    for container, keyword in (("list", "items"), ("map", "additionalProperties")):
        content = field.get(keyword)
        if isinstance(content, dict):
            return container, content
    return "", field


def _path(section: Section, name: str) -> str:
    return f"{section.path}.{name}" if section.path else name


def _kind_of(schema: Schema) -> str:
    return str(schema["properties"]["kind"]["const"])


def _resolve(schema: Schema, definitions: Schema) -> Schema:
    reference = schema.get("$ref")
    resolved: Schema = definitions[reference.rpartition("/")[2]] if reference else schema
    return resolved


def _choices(schema: Schema) -> list[Schema]:
    """The alternatives of a field, without null."""
    choices = schema.get("anyOf", [schema])
    return [choice for choice in choices if choice.get("type") != "null"]


def _section_text(section: Section, definitions: Schema) -> str:
    level = "#" * min(2 + section.path.count("."), 4)
    lines = [f"{level} {section.title}", "", _prose(section.schema["description"])]
    lines[-1] += _CONTAINER_NOTES[section.container]
    lines += ["", "| field | type | default | meaning |", "|---|---|---|---|"]
    required = section.schema.get("required", ())
    for name, field in section.schema["properties"].items():
        inner = _inner_sections(_path(section, name), field, definitions)
        kind = ", ".join(f"[{_label(part)}](#{part.anchor})" for part in inner)
        if not inner:
            kind = _type_text(field, definitions)
        default = "required" if name in required else _default_text(field, has_sections=bool(inner))
        lines.append(f"| `{name}` | {kind} | {default} | {_prose(field['description'])} |")
    return "\n".join(lines)


def _label(section: Section) -> str:
    return section.kind or (f"{section.container} of sections" if section.container else "section")


def _default_text(field: Schema, *, has_sections: bool) -> str:
    default = field["default"]
    if has_sections and default:
        return "see section"
    return f"`{json.dumps(default, ensure_ascii=False)}`"


def _type_text(field: Schema, definitions: Schema) -> str:
    return " or ".join(
        _choice_text(_resolve(choice, definitions), definitions) for choice in _choices(field)
    )


def _choice_text(schema: Schema, definitions: Schema) -> str:
    if "const" in schema or "enum" in schema:
        values = schema.get("enum") or [schema["const"]]
        return ", ".join(f"`{value}`" for value in values)
    match schema.get("type"):
        case "array" if "prefixItems" in schema:
            return f"list of {len(schema['prefixItems'])} numbers"
        case "array":
            return f"list of {_plural(schema['items'], definitions)}"
        case "object":
            values = schema.get("additionalProperties")
            return f"map of {_plural(values, definitions)}" if isinstance(values, dict) else "map"
        case kind:
            return ", ".join(filter(None, (str(kind), _range_text(schema))))


def _plural(schema: Schema, definitions: Schema) -> str:
    return " or ".join(f"{word}s" for word in _type_text(schema, definitions).split(" or "))


def _range_text(schema: Schema) -> str:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if "exclusiveMinimum" in schema:
        text = f"above {low:g}"
        return f"{text}, up to {high:,}" if high is not None else text
    if low == 0 and "exclusiveMaximum" in schema:
        return f"0 or more, below {high:,}"
    form = _RANGES.get((low is not None, high is not None), "")
    return form.format(low=low, high=high)


def _prose(text: str) -> str:
    """A description in a cell, in which no sign is taken for Markdown."""
    return _NOT_PROSE.sub(r"`\1`", " ".join(text.split()).replace("|", "\\|"))
