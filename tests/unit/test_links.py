"""Every link of the documentation leads to a heading that is there, and every test it names is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_heading(page):
    for target, anchor in _LINK.findall(page.read_text(encoding="utf-8")):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors_of(file), f"{page.name} links to {target}#{anchor}"


def test_every_capability_names_tests_that_are_there():
    page = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")
    section = page.partition("## Capabilities and the tests that show them")[2].partition("\n## ")[
        0
    ]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 50
    for row in rows:
        named = _TEST.findall(row)
        assert named, row
        assert [
            f"{file}::{test}" for file, test in named if test not in functions_of(file)
        ] == [], row


def functions_of(file: str) -> set[str]:
    """The functions of a file below tests/; none where there is no such file."""
    path = ROOT / "tests" / file
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.exists() else ()
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_an_anchor_is_made_of_the_words_of_a_heading(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A `worker.resume`, twice\n\n```bash\n# a comment\n```\n## Nodes' disks\n")
    assert anchors_of(page) == {"a-workerresume-twice", "nodes-disks"}


def anchors_of(page: Path) -> set[str]:
    """The names that forges give to headings."""
    text = re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }
