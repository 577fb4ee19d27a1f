"""Find variables whose names name nothing: `python -m tests.plain_names`, part of `make check`.

A name is a noun for the thing (`worker`, `checkpoint`), never a pronoun, participle or adverb.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("perdure", "flows", "tasks", "training", "storage")
WORDS = """
    one ones found own seen told kept made gone given taken known met heard left_over whatever who
    whom whose what others rest both same such it its them they here there before after another
    again so
"""
VAGUE = frozenset(WORDS.split())
# Fields of documents that are sent, stored or printed as JSON keep their names.
FIELDS = {
    "training/commands/megatron.py": "before",
    "training/drill/evaluation.py": "left_over",
    "training/recovery/healing.py": "seen",
    "training/reporting/rows.py": "what",
    "training/wire/node.py": "seen",
}


def product_files(root: Path = ROOT) -> Iterator[Path]:
    """The product's modules; a search does not follow the links in perdure/."""
    for folder in FOLDERS:
        yield from sorted((root / folder).rglob("*.py"))


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Variables, parameters and targets of loops, each with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


def vague_names(path: Path) -> Iterator[tuple[str, int]]:
    """The names of a module that name nothing, each with its line."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    field = FIELDS.get(path.relative_to(ROOT).as_posix())
    for name, line in bound_names(tree):
        if name.lstrip("_") in VAGUE and name != field:
            yield name, line


def main() -> int:
    """Print each place; the exit code is 1 if there is any."""
    places = [
        f"{path.relative_to(ROOT)}:{line}: {name!r} names nothing: name the thing"
        for path in product_files()
        for name, line in vague_names(path)
    ]
    sys.stdout.write("".join(f"{place}\n" for place in places))
    return 1 if places else 0


if __name__ == "__main__":
    sys.exit(main())
