"""Small files that are whole or not there, whenever their writer dies and somebody reads."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Replace a file in one step. Of two writers at a time there must be none.

    Args:
        path: in a folder that is there.
        content: text is written as UTF-8.
        private: readable by the owner alone, for it holds a token.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # left by one that was killed, perhaps for all to read
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666
    )
    with os.fdopen(descriptor, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
    temporary.replace(path)
