"""How long processes live on that the fault of another one has left, as the job has it."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.process, pytest.mark.prefect, pytest.mark.long]

GRACE = "MA_FAILOVER_TERMINATION_GRACE_PERIOD_SECONDS"
# In the first attempt the second node fails, and the first one saves for six seconds when it is
# asked to end; with FOREVER it never ends by itself. In the second attempt all is well.
PROGRAM = """
[ $MA_PROC_START_CNT = 1 ] || exit 0
if [ $VC_TASK_INDEX = 1 ]; then
  until [ -e up ]; do sleep 0.1; done
  exit 7
fi
save() {
  touch saving
  for i in $(seq 60); do sleep 0.1; done
  [ -n "$FOREVER" ] && while :; do sleep 0.1; done
  echo $MA_FAILOVER_TERMINATION_GRACE_PERIOD_SECONDS >saved
  exit 75
}
trap save TERM
touch up
while :; do sleep 0.1; done
"""


@pytest.mark.parametrize(
    ("name", "restart", "given", "saved"),
    [
        ("three-seconds", {"from_platform": {"fault-tolerance/job-retry-num": "8"}}, {}, None),
        ("as-long-as-given", {"failover_grace_s": 300, "from_platform": {GRACE: "10"}}, {}, "10"),
        ("not-by-force", {"failover_grace_s": -1}, {}, "-1"),
        ("until-it-hangs", {"failover_grace_s": -1}, {"FOREVER": "1"}, None),
    ],
)
def test_what_a_fault_has_left_may_save_as_long_as_the_job_says(
    bench, tmp_path, name: str, restart: dict[str, Any], given: dict[str, str], saved: str | None
):
    (tmp_path / "train.sh").write_text(PROGRAM)
    job = {
        "run_id": name,
        "storage": {"address": f"file://{bench.home}/store"},
        "worker": {"command": ["bash", "train.sh"], "cwd": str(tmp_path)},
        "engine": {"nodes": 2, "slots_per_node": 1, "spares": 0, "grace_s": 1},
        "preflight": {"nodes": False},
        "watch": {"command_quiet_s": 20.0},
        "restart": restart,
        "env": given,
    }
    running = bench.start(job)
    assert running.finish(timeout_s=300) == 0, running.out
    assert running.rungs() == ["in_place_restart"]
    assert (tmp_path / "saving").exists(), "it was asked to end"
    found = (tmp_path / "saved").read_text().strip() if (tmp_path / "saved").exists() else None
    assert found == saved
    running.leave_nothing()
