"""A wrong launch on a node with the driver's tools, up to the archive for whoever helps."""

from __future__ import annotations

import dataclasses
import os
import tarfile

import pytest

from perdure.training.recovery.faults import FaultClass
from tests.unit.telemetry.driver_tools import SAMPLES, install
from tests.values import not_none

pytestmark = [pytest.mark.process, pytest.mark.prefect, pytest.mark.long]

KEY = "hunter2hunter2"
PROGRAM = """
import os, pathlib
folder = pathlib.Path(os.environ["ASCEND_PROCESS_LOG_PATH"]) / "debug" / "plog"
folder.mkdir(parents=True, exist_ok=True)
(folder / "plog-1_20261121.log").write_text("[INFO] HCCL: of the process\\n")
pathlib.Path(os.environ["HCCL_LOGS"], "hccl-1.log").write_text("of the node\\n")
print("password =", os.environ["MY_PASSWORD"], flush=True)
raise RuntimeError("rank 9 is not in group")
"""


def test_the_logs_of_a_wrong_launch_go_to_whoever_helps_in_one_archive(bench, tmp_path, api):
    tools, hccl = tmp_path / "tools", tmp_path / "hccl"
    tools.mkdir()
    hccl.mkdir()
    table = SAMPLES / "npu-smi-info.txt"
    install(tools, "npu-smi", f'[ $# = 1 ] && cat {table} || echo "readings: $*"')
    install(tools, "msnpureport", "mkdir slog; echo of the chip > slog/device-0.log; echo exported")
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    there = dataclasses.replace(bench, env={"PATH": path})
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    job = {
        "run_id": "supported",
        "storage": {"address": f"file://{bench.home}/store"},
        "worker": {"command": ["python", str(script)]},
        "env": {"MY_PASSWORD": KEY, "HCCL_LOGS": str(hccl)},
        "watch": {"system_logs": [str(hccl)]},
        "preflight": {"nodes": False},
        "engine": {"nodes": 1, "slots_per_node": 1, "spares": 0, "grace_s": 2},
    }
    running = there.start(job)
    assert running.finish() == 1
    (view,) = running.history.attempts
    fault = not_none(view.fault)
    assert fault.fault_class is FaultClass.LAUNCH_MISCONFIGURED
    assert "RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT" in fault.action
    assert running.rungs() == ["stop"]
    assert api.state("supported") == "Failed"
    archive = tmp_path / "supported.tar.gz"
    bench.perdure("support", "supported", "--output", str(archive))
    with tarfile.open(archive) as packed:
        texts = {
            name.partition("/")[2]: not_none(packed.extractfile(name)).read().decode()
            for name in packed.getnames()
        }
    everything = "\n".join(texts.values())
    for text in (
        "readings: info -t common",
        "of the chip",
        "of the process",
        "of the node",
        "rank 9 is not in group",
    ):
        assert text in everything, sorted(texts)
    assert KEY not in everything
    assert all(f"| `{name}` |" in texts["CONTENTS.md"] for name in texts if name != "CONTENTS.md")
    running.leave_nothing()
