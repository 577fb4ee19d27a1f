"""Log lines of Perdure's own processes: `perdure: <text>`, written out at once.

Modules log through the standard library (`logging.getLogger("perdure.agent")`); the start of a
process decides which lines it prints. A program that imports us and sets up nothing sees warnings.
"""

from __future__ import annotations

import logging
import sys


class _LineHandler(logging.Handler):
    def __init__(self, *, is_command: bool) -> None:
        super().__init__()
        self._is_command = is_command

    def emit(self, record: logging.LogRecord) -> None:
        on_stderr = self._is_command or record.levelno >= logging.ERROR
        stream = sys.stderr if on_stderr else sys.stdout  # looked up: redirected in between
        kind = "warning: " if record.levelno == logging.WARNING else ""
        try:
            stream.write(f"perdure: {kind}{self.format(record)}\n")
            stream.flush()
        except (OSError, ValueError):  # a full disk or a closed stream ends no training
            self.handleError(record)


def start_logging(*, is_command: bool = False) -> None:
    """Print the log of Perdure's modules; a second call in a process changes nothing.

    Args:
        is_command: stdout is for results, so every line goes to stderr; else errors alone do.
    """
    logger = logging.getLogger("perdure")
    if not any(isinstance(handler, _LineHandler) for handler in logger.handlers):
        logger.addHandler(_LineHandler(is_command=is_command))
        logger.setLevel(logging.INFO)
        logger.propagate = False  # or a program's own handler on the root would print it again
