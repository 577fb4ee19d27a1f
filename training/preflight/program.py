"""The checks of a job's program: its scripts and launcher, or its recipe.

A script may hide an exit code behind a pipe, a launcher that nobody waits for, or its output; a
launcher may start ranks again, as Perdure would. Only the scripts that the command itself names
are read, and only their text: a line starts a launcher if it has its name, or a variable that
holds such a name. Lines are counted from 1. A recipe's function is looked up without running its
module, which may need a device.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from perdure.training.commands.arguments import read_script
from perdure.training.errors import InputError
from perdure.training.processes import LAUNCHER

# These name a launcher without starting it.
_NO_START = re.compile(
    r"^\s*(?:echo|printf|pip3?|uv|conda|which|type|command|export|grep|pgrep|pkill|killall|kill|ps"
    r"|cat|source|\.|unset|alias|python3? -m pip)\s"
)
_ASSIGNED = re.compile(r"^\s*(?:export\s+|readonly\s+|local\s+)?(\w+)\+?=")
_COMMENT = re.compile(r"(?:^|\s)#.*$")
_QUOTED = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"")
_PIPE = re.compile(r"(?<![|>])\|(?!\|)")
_BACKGROUND = re.compile(r"(?<![&><|])&(?![&>])")
_WAIT = re.compile(r"(?:^|[;&|]\s*|\s)wait\b")
_TO_FILE = re.compile(r"[\s\d&]>{1,2}\|?\s*(?!/dev/(?:stdout|stderr)\b)[^\s>&(]")
_OWN_RESTARTS = re.compile(r"--max[-_]restarts?[= ]\s*[1-9]\d*")  # torchrun's own: 0
_ERRORS_TO_FILE = re.compile(r"\s2>{1,2}\s*(?!&)\S+")


@dataclass(frozen=True, slots=True)
class Script:
    """A script that a command names.

    Attributes:
        name: for messages.
        has_pipefail: whether its caller sets it.
    """

    name: str
    text: str
    has_pipefail: bool = False


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    text: str


def script_notes(command: Sequence[str], cwd: Path) -> list[str]:
    """Warn of each way in which a script hides how its launcher ends, or starts ranks again.

    Args:
        command: the job's.
        cwd: folder that it starts in.
    """
    scripts = list(_scripts(command, cwd))
    notes = [note for script in scripts for note in _notes(script)]
    words = Script("worker.command", " ".join(command))
    return [
        *notes,
        *_restart_notes([words, *(script for script in scripts if script.name != words.name)]),
    ]


def _restart_notes(scripts: Iterable[Script]) -> Iterator[str]:
    """Warn of a launcher that starts its ranks again: all nodes must answer a fault together."""
    for script in scripts:
        for match in _OWN_RESTARTS.finditer("\n".join(line.text for line in _lines(script.text))):
            yield (
                f"{script.name}: {match[0]} has torchrun start ranks again before Perdure sees a "
                "fault, on the same node and without a look at the cause: leave it out"
            )


def _scripts(command: Sequence[str], cwd: Path) -> Iterator[Script]:
    has_pipefail = "pipefail" in command
    for previous, word in zip(("", *command), command, strict=False):
        if re.fullmatch(r"-\w*c", previous):
            yield Script("worker.command", word, has_pipefail)
        else:
            text = read_script(word, cwd)
            if text is not None:
                yield Script(word, text, has_pipefail)


def _notes(script: Script) -> Iterator[str]:
    lines = list(_lines(script.text))
    names = frozenset(_holders(lines))
    has_pipefail = script.has_pipefail
    for index, line in enumerate(lines):
        has_pipefail = has_pipefail or re.search(r"\bset\b.*\bpipefail\b", line.text) is not None
        launcher = _started(line.text, names)
        if launcher is None:
            continue
        where, bare = f"{script.name}, line {line.number}", _QUOTED.sub('""', line.text)
        if _PIPE.search(bare) and not has_pipefail:
            yield (
                f"{where}: the exit code of {launcher} is lost behind the pipe: begin the script "
                "with 'set -o pipefail'"
            )
        later = "\n".join(line.text for line in lines[index:])
        if _BACKGROUND.search(bare) and not _WAIT.search(later):
            yield (
                f"{where}: nothing waits for {launcher} in the background, which ends with the "
                "script: leave '&' out, or end with 'wait'"
            )
        if _TO_FILE.search(_ERRORS_TO_FILE.sub("", bare)):
            yield (
                f"{where}: the output of {launcher} goes to a file, where a failure is not seen: "
                "use '2>&1 | tee FILE' and 'set -o pipefail'"
            )


def _lines(text: str) -> Iterator[_Line]:
    """Split into lines without comments; continued lines are joined under the first number."""
    begun, parts = 0, []
    for number, raw in enumerate(text.splitlines(), start=1):
        line = _COMMENT.sub("", raw).rstrip()
        begun = begun or number
        parts.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            yield _Line(begun, " ".join(parts))
            begun, parts = 0, []
    if parts:
        yield _Line(begun, " ".join(parts))


def _holders(lines: Sequence[_Line]) -> Iterator[str]:
    """List variables that hold the name of a launcher."""
    for line in lines:
        assigned = _ASSIGNED.match(line.text)
        if assigned is not None and LAUNCHER.search(line.text[assigned.end() :]):
            yield assigned[1]


def _started(line: str, names: frozenset[str]) -> str | None:
    """Find the launcher that a line starts."""
    assigned = _ASSIGNED.match(line)
    # `NAME=value torchrun ...` starts a launcher, `NAME="torchrun ..."` holds its name.
    if assigned is not None and assigned[1] in names:
        command = line[assigned.end() :]
        if command[:1] in "\"'(`" or LAUNCHER.match(command):
            return None
    for part in re.split(r"&&|\|\||;", line):
        if _NO_START.match(part):
            continue
        launcher = LAUNCHER.search(part)
        if launcher is not None:
            return launcher.group()
        held = next((n for n in re.findall(r"\$\{?(\w+)", part) if n in names), None)
        if held is not None:
            return f"${held}"
    return None


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
    """Hint at the new name where Perdure once installed `training` as a package of its own."""
    module = f"{OWN_PACKAGE}.{recipe.partition(':')[0]}"
    return f"; write {OWN_PACKAGE}.{recipe}" if _installed_file(module) is not None else ""


def _file_in(folder: Path, module: str) -> Path | None:
    """Find the source of a module below a folder."""
    path = folder / module.replace(".", "/")
    places = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    return next((place for place in places if place.is_file()), None)


def _installed_file(module: str) -> Path | None:
    """Find the source of a module that this Python can import."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    origin = spec.origin if spec is not None else None
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _is_importable(module: str) -> bool:
    """Whether there is such a module at all, be it compiled."""
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
