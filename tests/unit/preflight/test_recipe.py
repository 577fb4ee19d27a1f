"""Recipes whose function is not there, seen without running their modules."""

from __future__ import annotations

import pytest

from perdure.training.config.engine import DEFAULT_RECIPE
from perdure.training.errors import InputError
from perdure.training.preflight.program import check_recipe


@pytest.fixture
def cwd(tmp_path):
    (tmp_path / "mine.py").write_text("raise SystemExit('run')\ndef main(job): ...\n")
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("from .inner import main as start\n")
    (package / "inner.py").write_text("async def other(): ...\nclass main: ...\n")
    (tmp_path / "all.py").write_text("from mine import *\n")
    (tmp_path / "training.py").write_text("def main(job): ...\n")
    (tmp_path / "perdure.py").write_text("def main(job): ...\n")
    (tmp_path / "broken.py").write_text("def main(:\n")
    return tmp_path


@pytest.mark.parametrize(
    "recipe",
    [
        DEFAULT_RECIPE,
        "mine:main",
        "pack:start",
        "pack.inner:main",
        "all:main",
        "training:main",
        "json.decoder:scanstring",
    ],
)
def test_a_function_that_is_there_is_found(recipe, cwd):
    check_recipe(recipe, cwd)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("perdure:main", ["Perdure's package has no 'main'", "perdure.py another"]),
        ("perdure.mine:main", ["Perdure's package has no 'mine:main'"]),
        ("perdure.training.trainer.pretrain:train", ["no 'training.trainer.pretrain:train'"]),
        (
            "training.trainer.pretrain:main",
            ["no module named", "write perdure.training.trainer.pretrain:main"],
        ),
        ("mine:train", ["mine.py defines no 'train'"]),
        ("pack:main2", ["__init__.py defines no 'main2'"]),
        ("json:main", ["json", "defines no 'main'"]),
        ("nobody.knows:main", ["no module named 'nobody.knows'"]),
        ("broken:main", ["broken.py", "invalid syntax"]),
    ],
)
def test_one_that_is_not_is_refused_in_one_line(recipe, words, cwd):
    with pytest.raises(InputError) as caught:
        check_recipe(recipe, cwd)
    line = str(caught.value)
    assert line.startswith(f"worker.recipe: {recipe!r}: ")
    assert [word for word in words if word not in line] == []
    assert "\n" not in line
