"""A stand-in for npu-smi: one chip of one node reports a code once a run has left a mark."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

SAMPLES = Path(__file__).parent / "unit" / "telemetry" / "samples"
NODE, DEVICE, RANK = "node-1", 1, 3  # of two nodes with two devices each
_CARD = 7  # the second of the table
# From the first mark on until its reset, and only as the agent of the node sees it.
_NPU_SMI = f"""#!/bin/sh
ill() {{
  case "$(pwd -P)" in */nodes/{NODE}/*) ;; *) return 1 ;; esac
  [ -n "$(ls "$CHIP_MARKS" 2>/dev/null)" ] && [ ! -e "$CHIP_RESETS" ]
}}
case "$*" in
info) cat {SAMPLES}/npu-smi-info.txt ;;
*"-t health -i {_CARD} "*)
  if ill; then
    printf ' Health Status : Alarm\\n Error Code : %s\\n Error Information : NA\\n' "$CHIP_CODE"
  else
    cat {SAMPLES}/npu-smi-health.txt
  fi ;;
*"-t health"*) cat {SAMPLES}/npu-smi-health.txt ;;
*"-t ecc"*) cat {SAMPLES}/npu-smi-ecc.txt ;;
"set "*)
  read answer
  [ "$answer" = y ] && echo "$*" >>"$CHIP_RESETS" && printf ' Status : OK\\n Message : reset\\n' ;;
esac
"""


@dataclass(frozen=True)
class IllChip:
    """The tool in its folder, and the commands that have reset the chip."""

    folder: Path

    @property
    def resets(self) -> str:
        file = self.folder / "resets"
        return file.read_text() if file.exists() else ""

    def environment(self, code: str, marks: Path) -> dict[str, str]:
        """The variables of a run.

        Args:
            code: that the chip reports.
            marks: folder in which the run leaves its mark.
        """
        return {
            "PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}",
            "CHIP_CODE": code,
            "CHIP_MARKS": str(marks),
            "CHIP_RESETS": str(self.folder / "resets"),
        }


def ill_chip(folder: Path) -> IllChip:
    """Put the tool into a folder."""
    tool = folder / "npu-smi"
    tool.write_text(_NPU_SMI)
    tool.chmod(0o755)
    return IllChip(folder)
