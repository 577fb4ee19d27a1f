"""What no part of a job may be, whichever field it is in, and how far YAML may multiply itself."""

from __future__ import annotations

import math
from typing import Any

import yaml

MAX_DEPTH = 50
MAX_VALUES = 100_000  # of a document, counted as often as its aliases repeat them
MAX_PATH_CHARS = 80


def check_document(document: Any) -> None:
    """Check the values at all depths of a job.

    Raises:
        ValueError: a number is not finite, a text has a zero byte, or it is nested too deeply.
    """
    open_values: list[tuple[str, int, Any]] = [("", 0, document)]
    while open_values:
        path, depth, value = open_values.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"{path[:MAX_PATH_CHARS]}: nested more than {MAX_DEPTH} deep")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{path}: {value} is not finite, give a finite number")
        if isinstance(value, str) and "\0" in value:
            raise ValueError(f"{path}: holds a zero byte, which no text of a job may")
        if isinstance(value, dict):
            open_values += [
                (f"{path}.{str(name)[:MAX_PATH_CHARS]}" if path else str(name), depth + 1, part)
                for name, part in value.items()
            ]
            open_values += [(path, depth + 1, name) for name in value]
        elif isinstance(value, list | tuple):
            open_values += [
                (f"{path}.{index}", depth + 1, part) for index, part in enumerate(value)
            ]


def why_unbounded(root: yaml.Node | None) -> str | None:
    """Explain why a YAML document is not a finite one of some size; None: it is."""
    sizes: dict[int, int] = {}  # of each node, with all that its aliases repeat
    entered: set[int] = set()
    open_nodes = [root] if root is not None else []
    while open_nodes:
        node = open_nodes[-1]
        if id(node) in sizes:
            open_nodes.pop()
            continue
        parts = _parts(node)
        missing = [part for part in parts if id(part) not in sizes]
        if not missing:
            sizes[id(node)] = 1 + sum(sizes[id(part)] for part in parts)
            open_nodes.pop()
            continue
        entered.add(id(node))
        if any(id(part) in entered for part in missing):
            return f"an alias contains itself, line {node.start_mark.line + 1}"
        open_nodes += missing
    total = sizes[id(root)] if root is not None else 0
    return f"more than {MAX_VALUES} values, its aliases included" if total > MAX_VALUES else None


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return []
