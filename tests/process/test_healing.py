"""A chip at fault is checked and reset before processes are started on it again."""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path

import pytest

from perdure.storage.address import open_store
from perdure.training.injection.inside import fired_at_s
from perdure.training.recovery.rungs import Rung
from tests.process.harness import REPO, Running, Workbench
from tests.process.rest import Api

pytestmark = [pytest.mark.process, pytest.mark.prefect, pytest.mark.long]

SAMPLES = REPO / "tests" / "unit" / "telemetry" / "samples"
CODE = "80E18404"  # HBM: storm of uncorrectable errors; level RestartNPU
# The driver's tool. The chip of BAD_NODE has an alarm from the moment on at which the fault of
# its rank fires, until it has been reset so often as MENDS says; a reset asks for confirmation.
NPU_SMI = f"""#!/bin/sh
ill() {{
  case "$(pwd -P)" in */nodes/$BAD_NODE/*) ;; *) return 1 ;; esac
  [ -n "$(ls "$DRILLS" 2>/dev/null)" ] && [ "$(cat "$RESETS" 2>/dev/null | wc -l)" -lt "$MENDS" ]
}}
case "$*" in
info) cat {SAMPLES}/npu-smi-info.txt ;;
*"-t health"*)
  if ill; then
    printf ' Health Status : Alarm\\n Error Code : {CODE}\\n Error Information : HBM UCE storm\\n'
  else
    cat {SAMPLES}/npu-smi-health.txt
  fi ;;
*"-t ecc"*) cat {SAMPLES}/npu-smi-ecc.txt ;;
"set "*)
  read answer
  [ "$answer" = y ] && echo "$*" >>"$RESETS" && printf ' Status : OK\\n Message : reset\\n' ;;
esac
"""
NEVER = "1000"
KILL = ({"kind": "kill", "rank": 1, "step": 25},)


@pytest.fixture
def with_npu_smi(bench, tmp_path):
    """A bench with the driver's tool, for a run whose rank on node-1 dies of its chip."""

    def build(run_id: str, mends: str) -> Workbench:
        tool = tmp_path / "npu-smi"
        tool.write_text(NPU_SMI)
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        env = {
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "BAD_NODE": "node-1",
            "DRILLS": f"{bench.home}/store/runs/{run_id}/drills",
            "RESETS": str(tmp_path / "resets"),
            "MENDS": mends,
        }
        return dataclasses.replace(bench, env=env)

    return build


def start(bench: Workbench, run_id: str, *, faults=KILL, **restart) -> Running:
    """A run whose rank 1, alone on node-1, meets a fault in step 25."""
    policy = {
        "process_replace": False,
        "pod_retries": 0,
        "heal": {"wait_s": 0, "reset_s": 1},
        **restart,
    }
    return bench.start(
        bench.apart(run_id, env={"PACE_S": "0"}, restart=policy, drill={"faults": list(faults)})
    )


def resets(tmp_path: Path) -> list[str]:
    return (tmp_path / "resets").read_text().splitlines()


def message_of(api: Api, run: str, task: str) -> str:
    body = {"task_runs": {"id": {"any_": [api.task_run_ids(run)[task]]}}}
    (found,) = api.ask("POST", "task_runs/filter", body).json()
    return str(found["state"]["message"])


def test_a_chip_that_a_reset_mends_is_trained_on_in_place(
    with_npu_smi, undisturbed_pair, tmp_path, api
):
    running = start(with_npu_smi("mended", "1"), "mended")
    assert running.finish() == 0, running.out
    history = running.history
    first, second = history.attempts
    assert first.ended is not None
    assert first.fault is not None
    assert first.healed is not None
    assert list(fired_at_s(open_store(running.job.storage), "mended")) == [0]
    assert (first.fault.node, first.fault.device) == ("node-1", 0)
    assert running.rungs() == ["in_place_restart"]
    assert (len(history.placements), history.isolated) == (1, ())
    healed = first.healed
    assert (healed.succeeded, healed.node) == (True, "node-1")
    assert [(one.act, one.is_good) for one in healed.acts] == [("reset", True), ("check", True)]
    assert healed.acts[-1].seen.endswith("and computes right")
    assert first.ended.at_s < healed.at_s < second.started.at_s
    assert resets(tmp_path) == ["set -t reset -i 0 -c 0"]
    assert running.curve() == undisturbed_pair
    api.wait_for_tasks("mended", {"attempt 1.1 from step 0": "RestartInPlace"})
    assert "node-1 can be used after" in message_of(api, "mended", "attempt 1.1 from step 0")
    running.leave_nothing()


@pytest.mark.parametrize(
    ("pods", "rung", "state"),
    [
        (0, Rung.JOB_RESCHEDULE_ISOLATED, "RescheduleIsolated"),
        (1, Rung.POD_RESCHEDULE, "ReschedulePod"),
    ],
)
def test_a_chip_that_stays_ill_is_left_and_the_restart_in_place_is_on_record_as_failed(
    with_npu_smi, undisturbed_pair, tmp_path, api, pods, rung, state
):
    name = f"ill-{pods}"
    running = start(with_npu_smi(name, NEVER), name, pod_retries=pods)
    assert running.finish() == 0, running.out
    history = running.history
    first = history.attempts[0]
    assert first.decision is not None
    assert first.healed is not None
    assert first.failed_rungs == (Rung.IN_PLACE_RESTART,)
    assert first.decision.rung is rung
    assert "in_place_restart: the last one failed" in first.decision.reason
    assert first.healed.succeeded is False
    assert [(one.act, one.is_good) for one in first.healed.acts] == [
        ("reset", True),
        ("check", False),
    ]
    assert resets(tmp_path) == ["set -t reset -i 0 -c 0"]
    assert history.isolated == ("node-1",)
    assert f"device 0: Alarm ({CODE})" in history.isolated_nodes[0].why
    assert [m.node for m in history.placements[-1].members] == ["node-0", "node-2"]
    assert running.curve() == undisturbed_pair
    task = "attempt 1.1 from step 0"
    api.wait_for_tasks(name, {task: state})
    message = message_of(api, name, task)
    assert f"{rung} (" in message
    assert "in_place_restart failed; node-1 cannot be used after" in message
    report = api.artifacts(f"{name}-")[f"{name}-fault-p1-a1"]["data"]
    assert "was tried first and failed" in report
    running.leave_nothing()


def test_a_process_is_not_replaced_on_an_ill_chip_and_the_restart_in_place_after_it_resets_the_chip(
    with_npu_smi, undisturbed_pair, tmp_path
):
    # Its memory is damaged while it lives, with nothing but a new process to answer that.
    fault = {"kind": "device_memory", "rank": 1, "step": 25}
    running = start(
        with_npu_smi("replaced", "1"),
        "replaced",
        faults=[fault],
        process_replace=True,
        memory_retry=False,
    )
    assert running.finish() == 0, running.out
    history = running.history
    first, second = history.attempts
    assert list(fired_at_s(open_store(running.job.storage), "replaced")) == [0]
    assert running.rungs() == ["process_replace", "in_place_restart"]
    (recovery,) = first.recoveries
    assert recovery.ended is not None
    assert not recovery.succeeded
    assert recovery.ended.why.startswith("rank 1 is not replaced: node-1 cannot be used after")
    assert f"device 0: Alarm ({CODE})" in recovery.ended.why
    assert first.last_save is not None
    assert first.last_save.step == 24, "what the survivor had completed"
    assert second.from_step == 24
    assert first.healed is not None
    assert first.healed.succeeded
    assert [(one.act, one.is_good) for one in first.healed.acts] == [
        ("reset", True),
        ("check", True),
    ]
    assert resets(tmp_path) == ["set -t reset -i 0 -c 0"], "once: no chip is reset beside a rank"
    assert (len(history.placements), history.isolated) == (1, ())
    assert running.curve() == undisturbed_pair
    running.leave_nothing()
