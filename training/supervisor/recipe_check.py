"""Whether a recipe's function is there, without running its module, which may need a device."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

from perdure.training.errors import InputError

# A worker imports it before its program, which therefore cannot have a module of that name.
OWN_PACKAGE = "perdure"
_OPAQUE = (ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom, ast.If, ast.Try)


def check_recipe(recipe: str, cwd: Path) -> None:
    """Check that workers will find the function of a recipe.

    Args:
        recipe: as module:function.
        cwd: folder that the workers start in.

    Raises:
        InputError: they will not.
    """
    module, _, function = recipe.partition(":")
    package = module.partition(".")[0]
    file, in_cwd = _installed_file(module), _file_in(cwd, module)
    if package != OWN_PACKAGE:
        file = in_cwd or file
        if file is None and not _is_importable(module):
            raise InputError(
                "worker.recipe", f"{recipe!r}: no module named {module!r}{_new_name(recipe)}"
            )
    elif file is None or not _may_define(file, function, recipe):
        why = f"Perdure's package has no {recipe.removeprefix(OWN_PACKAGE)[1:]!r}"
        hint = f"; give {in_cwd} another name" if in_cwd is not None else ""
        raise InputError("worker.recipe", f"{recipe!r}: {why}{hint}")
    if file is not None and not _may_define(file, function, recipe):
        raise InputError("worker.recipe", f"{recipe!r}: {file} defines no {function!r}")


def _new_name(recipe: str) -> str:
    """A hint for recipes from when Perdure installed `training` as a package of its own."""
    module = f"{OWN_PACKAGE}.{recipe.partition(':')[0]}"
    return f"; write {OWN_PACKAGE}.{recipe}" if _installed_file(module) is not None else ""


def _file_in(folder: Path, module: str) -> Path | None:
    """The source of a module below a folder."""
    path = folder / module.replace(".", "/")
    places = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    return next((place for place in places if place.is_file()), None)


def _installed_file(module: str) -> Path | None:
    """The source of a module that this Python finds."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    origin = spec.origin if spec is not None else None
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _is_importable(module: str) -> bool:
    """Whether there is such a module at all, compiled ones among them."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _may_define(file: Path, name: str, recipe: str) -> bool:
    """Whether a module has a name, as far as that shows without running it."""
    body = _parse(file, recipe).body
    if name in {getattr(node, "name", None) for node in body}:
        return True
    # A name that is bound otherwise than by def may well be a function: only running it shows.
    texts = [ast.unparse(node) for node in body if isinstance(node, _OPAQUE)]
    return any(re.search(rf"\b{name}\b|\bimport \*", text) for text in texts)


def _parse(file: Path, recipe: str) -> ast.Module:
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError) as error:
        raise InputError("worker.recipe", f"{recipe!r}: {file}: {error}") from error
