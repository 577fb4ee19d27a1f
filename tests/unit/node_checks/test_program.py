"""The program that checks a node, with a gang of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from perdure.training.config.job import Job
from perdure.training.config.recovery import CommSpec, RankTableForm
from perdure.training.node_checks.program import merge_checks
from perdure.training.node_checks.runner import NodeProgram, check_this_machine
from perdure.training.node_checks.verdict import verdict_of
from perdure.training.telemetry import device_addresses
from perdure.training.telemetry.device_addresses import HCCN_CONF, check_rank_table, query_of
from perdure.training.wire.node import VISIBLE, Check, CheckOutcome, NodeTask, PingTarget
from tests.jobs import small_job
from tests.unit.telemetry.driver_tools import SAMPLES, install, only_tools_of


@pytest.fixture
def job(tmp_path):
    return small_job(
        tmp_path,
        worker={"command": ["true"]},
        engine={"nodes": 1, "slots_per_node": 2},
        preflight={"burn_in_s": 0.0, "timeout_s": 100},
    )


def task_of(job: Job, folder: Path, *, is_new: bool = False, **changes: Any) -> NodeTask:
    """The check of a node with one slot, whose gang is that node alone."""
    fields: dict[str, Any] = {"world_size": 1, "gang_host": None, **changes}
    return NodeTask(
        job=job, node="node-0", folder=str(folder), node_folder=None, slots=1, first_rank=0,
        is_new=is_new, timeout_s=240.0, **fields,
    )  # fmt: skip


def test_this_machine_is_checked_as_a_node_with_a_gang_of_processes(job):
    checks = {
        check.name: check
        for check in check_this_machine(job, state_bytes=None, environment=os.environ)
    }
    expected = (
        "burn_in",
        "join",
        "all_reduce",
        "disk",
        "store_disk",
        "memory",
        "store",
        "versions",
    )
    assert [
        name
        for name in expected
        if checks[name].outcome not in (CheckOutcome.OK, CheckOutcome.WARNING)
    ] == []
    assert checks["all_reduce"].seen.startswith("gloo, 2 ranks: ")
    assert checks["all_reduce"].figures["bus_bandwidth_mb_s"] > 0
    assert checks["burn_in"].figures["gflop_s"] > 0
    assert {check.node for check in checks.values()} == {checks["disk"].node}


def test_a_rank_that_does_not_come_is_named_by_the_others(job, tmp_path):
    hurried = job.preflight.model_copy(update={"timeout_s": 21.0})
    document = job.model_copy(update={"preflight": hurried})
    task = task_of(document, tmp_path, world_size=2, gang_host="127.0.0.1", gang_port=0)
    joined, reduced = NodeProgram().run(task, os.environ)
    assert (joined.name, joined.outcome) == ("join", CheckOutcome.OK)
    assert reduced.outcome is CheckOutcome.WARNING
    assert reduced.seen == "no answer from ranks 1 within 7 s"


def test_a_node_that_stays_checks_its_ports_against_the_other_nodes(job, tmp_path, monkeypatch):
    tools = only_tools_of(tmp_path / "tools", monkeypatch)
    install(tools, "npu-smi", f"cat {SAMPLES}/npu-smi-info.txt")
    answers = """case "$*" in
*-tls*) echo "dev_id:0, tls switch[1](0:disable, 1:enable), tls preconfigured[1]" ;;
*"-ping -g address 10.1.1.0") echo "6 packets transmitted, 0 received, 100.00% packet loss" ;;
esac"""
    install(tools, "hccn_tool", answers)
    pings = (PingTarget(device=0, member=1, address="10.1.1.0"),)
    task = task_of(job, tmp_path, gang_host="127.0.0.1", pings=pings)
    checks = NodeProgram().run(task, os.environ)
    assert [(c.name, c.outcome, c.seen) for c in checks if c.name.startswith("device_")] == [
        ("device_tls", CheckOutcome.OK, "TLS on"),
        ("device_ping", CheckOutcome.FAILED, "device 0 to node 1 (10.1.1.0): 100% lost"),
    ]


def test_a_node_whose_rank_table_cannot_be_written_is_found_before_an_attempt(job, tmp_path):
    assert not HCCN_CONF.exists(), "this machine has NPUs"
    wanted = job.model_copy(update={"comm": CommSpec(rank_table=RankTableForm.V1_0)})
    task = task_of(wanted, tmp_path, is_new=True, with_store=False)
    checks = {check.name: check for check in NodeProgram().run(task, os.environ)}
    check = checks["rank_table"]
    assert (check.node, check.outcome) == ("node-0", CheckOutcome.FAILED)
    assert check.seen == "/etc/hccn.conf has no address_0"
    assert check.allowed == "comm.rank_table=v1.0: an address for each of 2 ranks"
    assert verdict_of([check]).refused == {"node-0": f"rank_table: {check.seen}"}


def test_a_node_is_asked_for_the_devices_that_its_workers_will_see(job, tmp_path, monkeypatch):
    conf = tmp_path / "hccn.conf"
    conf.write_text("address_4=10.0.0.4\naddress_6=10.0.0.6\n")
    monkeypatch.setattr(device_addresses, "HCCN_CONF", conf)
    comm = CommSpec(rank_table=RankTableForm.V1_0)
    job_with_table = job.model_copy(update={"comm": comm, "env": {VISIBLE: "6,4"}})
    query = query_of(job_with_table)
    assert query is not None
    check = check_rank_table(query, "node-0")
    assert (check.outcome, check.seen) == (CheckOutcome.OK, "6: 10.0.0.6, 4: 10.0.0.4")
    assert query_of(job) is None


def test_a_program_that_gives_no_result_is_a_failed_check(job, tmp_path):
    without_python = {**os.environ, "PYTHONHOME": str(tmp_path)}
    (check,) = NodeProgram().run(task_of(job, tmp_path, is_new=True), without_python)
    assert (check.node, check.outcome) == ("node-0", CheckOutcome.FAILED)
    assert check.seen == "the program ended with exit code 1 and no result"


def test_the_worst_rank_decides_for_its_node():
    fine = Check(name="burn_in", outcome=CheckOutcome.OK, seen="fine", figures={"gflop_s": 10})
    ill = Check(name="burn_in", outcome=CheckOutcome.FAILED, seen="wrong", figures={"gflop_s": 20})
    joined = Check(name="join", outcome=CheckOutcome.OK, seen="joined", seconds=2)
    burnt, gang = merge_checks([[fine, joined], [ill, joined], [fine, joined]])
    assert (burnt.outcome, burnt.seen, round(burnt.figures["gflop_s"], 1)) == (
        CheckOutcome.FAILED, "wrong", 13.3,
    )  # fmt: skip
    assert (gang.seen, gang.seconds) == ("joined", 2)
