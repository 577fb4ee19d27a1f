"""The text of a job file as a document: YAML, without what YAML passes over in silence.

No message holds the text itself: it may be that of a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from perdure.training.errors import InputError

_NAME = re.compile(r"[A-Za-z_][\w/-]*")
_MERGE = "tag:yaml.org,2002:merge"


def read_document_file(path: Path) -> Any:
    """The document of a YAML or JSON file.

    Raises:
        InputError: it cannot be read, is none, or gives a field twice.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        problem = f"byte 0x{error.object[error.start]:02x} is not UTF-8, line {line}"
        raise InputError(str(path), f"is not YAML: {problem}") from None
    return read_document(text, where=str(path))


def read_document(text: str, *, where: str) -> Any:
    """The document of a YAML text.

    Args:
        text: YAML or JSON.
        where: what it is, for the message.

    Raises:
        InputError: it is none, or gives a field twice.
    """
    loader: yaml.SafeLoader | None = None
    try:
        loader = yaml.SafeLoader(text)  # looks at every character
        node = loader.get_single_node()
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
    """Fields that a mapping gives twice, with the lines: of two values the second would count."""
    open_nodes, seen = [("", root)], set[int]()
    while open_nodes:
        path, node = open_nodes.pop(0)
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            open_nodes += [(f"{path}{index}.", one) for index, one in enumerate(node.value)]
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
    """What is wrong and where."""
    if isinstance(error, yaml.reader.ReaderError):
        line = text[: error.position].count("\n") + 1
        return f"character {error.character:#06x} is not allowed, line {line}"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return "cannot be read"
    mark = error.problem_mark
    problem = re.sub(r"(alias|anchor|tag) .*", r"\1", error.problem or "cannot be read")
    return f"{problem}, line {mark.line + 1}, column {mark.column + 1}"
