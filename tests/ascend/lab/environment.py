"""The environment in which torch_npu finds the emulator instead of CANN."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path


def environment(built: Path, given: Mapping[str, str]) -> dict[str, str]:
    """What `given` becomes for a process that runs on emulated devices.

    Args:
        built: the folder that `build` returned.
        given: the environment that the process would have had.
    """

    def before(name: str, *paths: Path) -> str:
        return os.pathsep.join([*map(str, paths), *filter(None, [given.get(name)])])

    cann = built / "cann"
    return {
        **given,
        "ASCEND_HOME_PATH": str(cann),
        "ASCEND_OPP_PATH": str(cann / "opp"),
        "ASCEND_EMULATOR": str(built),
        "LD_LIBRARY_PATH": before("LD_LIBRARY_PATH", built / "lib"),
        # `python` and programs beside it are those of this environment.
        "PATH": before("PATH", Path(sys.executable).parent),
        "PYTHONPATH": before("PYTHONPATH", built / "site"),
    }
