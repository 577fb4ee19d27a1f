"""What a program leaves about its end in the file of torch elastic's `record`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_error(path: Path) -> dict[str, Any]:
    """What torch elastic's `record` wrote: the exception's first line, and when."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))["message"]
        if isinstance(document, str):
            return {"message": _first_line(document)}
        at_s = document.get("extraInfo", {}).get("timestamp")
        return {
            "message": _first_line(str(document.get("message", ""))),
            "at_s": float(at_s) if at_s is not None else None,
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # the program may have written anything there


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")
