"""The lab is a Slurm cluster, and what breaks in it is really broken."""

from __future__ import annotations

import pytest

from tests.slurm.lab import NODES, address_of
from tests.waiting import wait_for


def test_jobs_run_on_nodes_with_a_network_and_processes_of_their_own(lab):
    show = "hostname; hostname -I; ps -e -o comm="
    lines = lab.slurm("srun", "-N4", "--label", "sh", "-c", show).splitlines()
    for number, node in enumerate(NODES):
        printed = [
            line.partition(": ")[2].strip() for line in lines if line.startswith(f"{number}:")
        ]
        assert printed[:2] == [node, address_of(node)]
        assert printed.count("slurmd") == 1


@pytest.mark.long
def test_a_node_without_power_is_down_and_comes_back(lab):
    lab.power_off("n2")
    wait_for(lambda: lab.states()["n2"].startswith("down"), what="n2 is down")
    lab.restore()
    assert lab.states() == dict.fromkeys(NODES, "idle")
