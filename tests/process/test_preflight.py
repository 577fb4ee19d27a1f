"""Checks before the first step: nodes that really fail them are left for a spare."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from pathlib import Path

import psutil
import pytest
import yaml

from tests.process.harness import REPO, Workbench
from tests.waiting import wait_for

pytestmark = pytest.mark.process

CHECKS = {"burn_in_s": 0}
SAMPLES = REPO / "tests" / "unit" / "telemetry" / "samples"
# The driver's tool, as it answers for a node whose chip has an alarm, and for one that is well.
NPU_SMI = f"""#!/bin/sh
case "$(pwd -P)" in
*/nodes/$BAD_NODE/*) health=npu-smi-health-alarm.txt ;;
*) health=npu-smi-health.txt ;;
esac
case "$*" in
info) cat {SAMPLES}/npu-smi-info.txt ;;
*"-t health"*) cat {SAMPLES}/$health ;;
*"-t ecc"*) cat {SAMPLES}/npu-smi-ecc.txt ;;
esac
"""


@pytest.fixture
def with_npu_smi(bench, tmp_path):
    """A bench whose machine has the driver's tool; it has an alarm for one node."""

    def build(bad_node: str) -> Workbench:
        tool = tmp_path / "npu-smi"
        tool.write_text(NPU_SMI)
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        return dataclasses.replace(bench, env={"PATH": path, "BAD_NODE": bad_node})

    return build


def attempts_of(running, node: str) -> list[Path]:
    """What processes of the training have left on a node."""
    return list(running.folder.glob(f"nodes/{node}/*/attempts/*"))


def test_a_node_with_an_alarm_is_isolated_before_the_first_step(with_npu_smi, undisturbed_pair):
    bench = with_npu_smi("node-1")
    running = bench.start(bench.apart("alarm-at-start", env={"PACE_S": "0"}, preflight=CHECKS))
    assert running.finish() == 0, running.out
    history = running.history
    (refusal,) = history.refusals
    assert (refusal.node, refusal.placement) == ("node-1", 1)
    assert "device 0: Alarm (A4025021 8C03A000 8C084E00)" in refusal.why
    assert history.isolated == ("node-1",)
    assert [[m.node for m in p.members] for p in history.placements] == [
        ["node-0", "node-1"],
        ["node-0", "node-2"],
    ]
    (attempt,) = history.attempts
    assert (attempt.started.placement, attempt.started.at_s > refusal.at_s) == (2, True)
    assert attempts_of(running, "node-1") == []
    assert running.curve() == undisturbed_pair
    assert running.rungs() == []
    running.leave_nothing()


@pytest.mark.long
def test_without_a_spare_the_run_ends_with_the_words_of_the_check(with_npu_smi):
    bench = with_npu_smi("node-1")
    engine = {"nodes": 2, "slots_per_node": 1, "spares": 0, "grace_s": 10}
    job = bench.apart(
        "alarm-no-spare", engine=engine, restart={"spare_wait_s": 0}, preflight=CHECKS
    )
    running = bench.start(job)
    assert running.finish() == 1, running.out
    out = " ".join(running.out.split())
    assert "no healthy spare among 2 nodes; isolated: node-1" in out
    assert "node-1 failed its checks: devices: device 0: Alarm" in out
    assert running.history.attempts == []
    running.leave_nothing()


@pytest.mark.long
def test_a_node_whose_check_dies_is_isolated(bench, undisturbed_pair):
    job = bench.apart(
        "check-dies", env={"PACE_S": "0"}, preflight={"burn_in_s": 3, "timeout_s": 60}
    )
    running = bench.start(job)

    def checker():
        for process in running.local.processes("node-1"):
            try:
                leads = os.getsid(process.pid) == process.pid  # its ranks are forks of it
                if leads and "perdure.training.node_checks.program" in process.cmdline():
                    return process
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        return None

    found = wait_for(checker, what="the check of node-1")
    found.kill()
    running.complete(undisturbed_pair)
    (refusal,) = running.history.refusals
    assert (refusal.node, refusal.why) == (
        "node-1",
        "node: the program ended with exit code -9 and no result",
    )
    assert attempts_of(running, "node-1") == []


HCCN_TOOL = f"""#!/bin/sh
case "$(pwd -P)" in */nodes/$BAD_NODE/*) tls=1 ;; *) tls=0 ;; esac
case "$*" in
*-optical*) cat {SAMPLES}/hccn-optical.txt ;;
*-ip*) echo ipaddr:10.1.1.9 ;;
*-tls*) echo "dev_id:0, tls switch[$tls](0:disable, 1:enable), tls preconfigured[1]" ;;
esac
"""


@pytest.mark.long
def test_a_node_whose_devices_alone_have_tls_is_left_before_a_command_starts(
    with_npu_smi, tmp_path
):
    bench = with_npu_smi("of no alarm")
    tool = tmp_path / "hccn_tool"
    tool.write_text(HCCN_TOOL)
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    bench = dataclasses.replace(bench, env={**bench.env, "BAD_NODE": "node-1"})
    table = tmp_path / "npu-smi"
    table.write_text(
        NPU_SMI.replace("health=npu-smi-health-alarm.txt", "health=npu-smi-health.txt")
    )
    job = {
        "run_id": "tls-differs",
        "storage": {"address": f"file://{bench.home}/store"},
        "worker": {"command": ["sleep", "1"]},
        "preflight": CHECKS,
        "engine": {"nodes": 3, "slots_per_node": 1, "spares": 1, "grace_s": 2},
    }
    running = bench.start(job)
    assert running.finish() == 0, running.out
    (refusal,) = running.history.refusals
    assert (refusal.node, refusal.why) == (
        "node-1",
        "device_tls: TLS on; most nodes have TLS off",
    )
    (attempt,) = running.history.attempts
    assert attempt.started.placement == 2
    assert running.rungs() == []
    running.leave_nothing()


def preflight(bench, document, *options):
    path = bench.home / f"{document['run_id']}.yaml"
    path.write_text(yaml.safe_dump(document))
    return bench.python("-m", "perdure", "preflight", str(path), *options)


@pytest.mark.long
def test_the_command_checks_this_machine_and_that_the_program_starts_twice(bench):
    done = preflight(
        bench, bench.apart("checked", env={"PACE_S": "0"}, preflight=CHECKS), "--json", "--reentry"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    outcomes = {check["name"]: check["outcome"] for check in report["checks"]}
    assert report["ok"]
    assert [outcomes[n] for n in ("burn_in", "all_reduce", "store", "reentry")] == ["ok"] * 4
    reentry = next(check for check in report["checks"] if check["name"] == "reentry")
    assert reentry["seen"].startswith("losses ")


@pytest.mark.long
def test_the_command_fails_where_a_device_has_an_alarm(with_npu_smi, tmp_path):
    bench = with_npu_smi("node-1")
    tool = tmp_path / "npu-smi"
    tool.write_text(tool.read_text().replace('"$(pwd -P)"', "/nodes/node-1/"))
    done = preflight(bench, bench.apart("checked-ill", preflight=CHECKS))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "8C084E00" in done.stdout


@pytest.mark.long
def test_a_command_that_cannot_be_started_again_is_found(bench, tmp_path):
    lock = tmp_path / "lock"
    script = f"test ! -e {lock} || {{ echo stale lock; exit 3; }}; touch {lock}; exec sleep 60"
    job = {
        "run_id": "not-again",
        "storage": {"address": f"file://{tmp_path}/store"},
        "worker": {"command": ["sh", "-c", script]},
        "preflight": {"nodes": False},
    }
    done = preflight(bench, job, "--json", "--reentry", "--reentry-s", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    (check,) = [c for c in json.loads(done.stdout)["checks"] if c["name"] == "reentry"]
    assert check["seen"] == "start 2 ended with exit code 3: stale lock"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["command", "session"])
def test_a_program_that_is_started_twice_gets_the_value_of_a_block(bench, kind):
    keep = f"Secret(value='of-a-block').save('for-{kind}')"
    kept = bench.python("-c", f"from prefect.blocks.system import Secret; {keep}")
    assert kept.returncode == 0, kept.stderr
    job = bench.apart(f"{kind}-twice", env={"PACE_S": "0"})
    if kind == "command":
        worker = {"command": ["sh", "-c", "test $$X = of-a-block"]}
        job = {"run_id": job["run_id"], "storage": job["storage"], "worker": worker}
    sections = {"preflight": {"nodes": False}, "env_from": {"X": {"block": f"for-{kind}"}}}
    done = preflight(bench, {**job, **sections}, "--json", "--reentry", "--reentry-s", "1")
    (check,) = [c for c in json.loads(done.stdout)["checks"] if c["name"] == "reentry"]
    assert check["outcome"] == "ok", check
