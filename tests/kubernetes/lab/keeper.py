"""The first process of the hub: keeps the control plane and the nodes running.

What is named in the folder of what is off is killed and stays ended until its file is removed. All
ends with this process, nodes and pods as well: their processes are in namespaces below its own.
"""

from __future__ import annotations

import os
import subprocess

from tests.kubernetes.lab.places import LOGS, OFF, STATE, VOLUMES
from tests.kubernetes.lab.programs import DNS_HOSTS, hub_programs
from tests.kubernetes.lab.supervise import Supervisor


def main() -> None:
    """Set the hub up, and stay."""
    os.umask(0)  # the folders of volumes are made for any user of a pod
    own = STATE / "volumes"
    for folder in (own, VOLUMES, OFF):
        folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "--bind", str(own), str(VOLUMES)], check=True)
    # Packets between nodes only pass the switch: the hub's own rules for services are not for them.
    subprocess.run(["sysctl", "-qw", "net.bridge.bridge-nf-call-iptables=0"], check=False)
    DNS_HOSTS.touch()
    supervisor = Supervisor(LOGS, is_off=lambda name: (OFF / name).exists())
    for program in hub_programs():
        supervisor.add(program)
    supervisor.run()


if __name__ == "__main__":
    main()
