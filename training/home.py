"""Where Perdure keeps what belongs to this machine: nodes' scratch folders, the local server."""

from __future__ import annotations

import os
from pathlib import Path

HOME_ENV = "PERDURE_HOME"


def home_folder() -> Path:
    """`$PERDURE_HOME`, else `~/.perdure`; absolute."""
    return Path(os.environ.get(HOME_ENV) or Path.home() / ".perdure").expanduser().resolve()
