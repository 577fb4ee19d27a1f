"""The lab is a Slurm cluster, and what breaks in it is really broken."""

from __future__ import annotations

from tests.slurm.lab import NODES
from tests.waiting import wait_for


def test_jobs_run_on_nodes_with_a_network_and_processes_of_their_own(lab):
    printed = lab.slurm(
        "srun", "-N4", "sh", "-c", "hostname; ls /proc | grep -c '^[0-9]'; hostname -I"
    )
    lines = printed.split()
    assert set(NODES) <= set(lines)
    assert {"10.78.0.1", "10.78.0.4"} <= set(lines)


def test_a_node_without_power_is_down_and_comes_back(lab):
    lab.power_off("n2")
    wait_for(lambda: lab.states()["n2"].startswith("down"), what="n2 is down")
    lab.restore()
    assert lab.states() == dict.fromkeys(NODES, "idle")
