"""Operators that HCCL sent again and that then succeeded, from the run logs of CANN.

With operator retry on, HCCL writes each change of a rank's state into its run log, whose level
cannot be set (hicann/hccl operator_retry/opretry_base.h, SetRetryState; hccl_op_retry_pub.h has
the names). A rank that finds an error of its connections passes from AGENT_RUNNING to
RESP_AICPU_ERR, and by RESP_AICPU_RETRYEND back to AGENT_RUNNING when the operator has succeeded.
Its peers repeat the operator, too, without an error of their own: they are not counted. Sizes are
bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

MAX_BYTES = 1 << 20  # of a log in each call: the remainder comes with the next call
# The owner of the state stands in brackets before it, which not every version prints whole.
_CHANGE = re.compile(rb"\[OpRetry\][^\n]*State Transfer, cur state (\w+), next state (\w+)")
_RUNNING = b"RETRY_STATE_AGENT_RUNNING"
_ERROR = b"RETRY_STATE_RESP_AICPU_ERR"
_RETRIED = b"RETRY_STATE_RESP_AICPU_RETRYEND"
_FAILED = b"RETRY_STATE_AGENT_RETRY_FAIL"


@dataclass(slots=True)
class RetryLog:
    """The retries in the log of a process, up to its last line read.

    Attributes:
        num_mended: successful retries after an error of this process itself.
    """

    num_mended: int = 0
    _read_bytes: int = 0
    _has_error: bool = False

    def read_new(self, path: Path) -> None:
        """Parse the new lines; a last line that is not whole waits.

        Raises:
            OSError: it cannot be read.
        """
        with path.open("rb") as file:
            file.seek(self._read_bytes)
            text = file.read(MAX_BYTES)
        whole = text[: text.rfind(b"\n") + 1] or (text if len(text) == MAX_BYTES else b"")
        self._read_bytes += len(whole)
        self.parse(whole)

    def parse(self, text: bytes) -> None:
        """Count the retries in some lines."""
        for old_state, new_state in _CHANGE.findall(text):
            if new_state == _ERROR:
                self._has_error = True
            elif new_state == _FAILED:
                self._has_error = False
            elif (old_state, new_state) == (_RETRIED, _RUNNING):
                self.num_mended += self._has_error
                self._has_error = False


@dataclass(slots=True)
class RetryLogs:
    """The run logs of the ranks of a node."""

    _logs: dict[Path, RetryLog] = field(default_factory=dict)

    def count_mended(self, folder: Path) -> int:
        """Count the successful retries of the processes that log into a folder."""
        for path in sorted(folder.glob("run/plog/*.log")):
            log = self._logs.setdefault(path, RetryLog())
            try:
                if path.is_file() and not path.is_symlink():
                    log.read_new(path)
            except OSError:
                pass  # rotated away meanwhile; what was seen stays
        return sum(
            log.num_mended for path, log in self._logs.items() if path.is_relative_to(folder)
        )
