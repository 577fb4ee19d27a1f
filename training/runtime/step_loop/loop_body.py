"""The program's loop over steps, read for statements that stand in the wrong place."""

from __future__ import annotations

import ast
import linecache
from types import FrameType


def notice_of(frame: FrameType) -> str | None:
    """Return what to tell the author of a loop that begins in this frame; None: nothing."""
    path, line = frame.f_code.co_filename, frame.f_lineno
    behind = statement_behind("".join(linecache.getlines(path)), line)
    if behind is None:
        return None
    return (
        f"{path}, line {behind}, stands behind `with step:`, so that it also runs for a step that "
        "a fault has undone and that comes again: move it into the block, or an evaluation before "
        "it; what updates state, such as an average of weights, belongs in "
        "session.register(on_applied=...)"
    )


def statement_behind(source: str, line: int) -> int | None:
    """Return the line of the first statement behind `with step:` in the loop at a line.

    Args:
        source: of the program; one that cannot be parsed has none.
        line: of `for step in ...:`.
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:
        return None
    for loop in nodes:
        if isinstance(loop, ast.For) and loop.lineno == line:
            step = ast.unparse(loop.target)
            places = [n for n, part in enumerate(loop.body) if _enters(part, step)]
            behind = loop.body[places[0] + 1 :] if places else []
            return behind[0].lineno if behind else None
    return None


def _enters(statement: ast.stmt, step: str) -> bool:
    return isinstance(statement, ast.With) and any(
        ast.unparse(item.context_expr) == step for item in statement.items
    )
