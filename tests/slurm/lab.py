"""A Slurm cluster of four nodes on this machine: real daemons of Debian's packages.

Everything, the tests included, is in one process namespace that ends with its first process; each
node has a network, a host name and processes of its own in it. So nothing can be left over, and
to power a node off is to kill its first process. Times are seconds.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socketserver
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from socket import SHUT_WR, create_connection, socket

import psutil

from tests.values import not_none
from tests.waiting import wait_for

FOLDER_ENV = "PERDURE_SLURM_LAB"
NODES = ("n1", "n2", "n3", "n4")
HUB_IP = "10.78.0.254"
SWITCH = "br0"
COMMAND_S = 120.0
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "ip", "unshare", "mount")
# 12 s until a silent node is down (300 s by default), and 5 s before a requeued job starts (120 s).
# SIGKILL comes 120 s after SIGTERM (30 s): this machine may be busy.
CONFIGURATION = """\
ClusterName=lab
SlurmctldHost=hub({hub})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=12
SlurmctldTimeout=30
KillWait=120
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=5,sched_interval=5
{nodes}
PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# The disk's /dev/shm is the node's own: names there have numbers of processes, which nodes share.
NODE_SCRIPT = """\
hostname {name}
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
until ip addr add {ip}/24 dev eth0 2>/dev/null; do sleep 0.05; done
ip link set eth0 up
ip route add default via {hub}
slurmd -D -N {name} -f {folder}/slurm.conf &
wait $!  # as any first process, the shell takes the ends of orphans
"""
APART = ("--mount", "--uts", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")


def obstacle() -> str:
    """Explain why there can be no lab here; "": there can."""
    if os.geteuid() != 0:
        return "its network needs root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def address_of(node: str) -> str:
    """Its address on the lab's network."""
    return f"10.78.0.{NODES.index(node) + 1}"


@dataclass
class Lab:
    """The cluster, from inside its namespace.

    Attributes:
        folder: where its daemons keep everything.
        nodes: the first process of each node that has power.
    """

    folder: Path
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        """Start everything, and wait until all nodes are idle."""
        (self.folder / "state").mkdir()
        rows = [f"NodeName={n} NodeAddr={address_of(n)} CPUs=2 State=UNKNOWN" for n in NODES]
        self._configuration.write_text(
            CONFIGURATION.format(hub=HUB_IP, folder=self.folder, nodes="\n".join(rows))
        )
        os.environ["SLURM_CONF"] = str(self._configuration)
        _run("hostname", "hub")
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", SWITCH, "type", "bridge")
        _run("ip", "addr", "add", f"{HUB_IP}/24", "dev", SWITCH)
        _run("ip", "link", "set", SWITCH, "up")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = [
            f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "log", "pid", "seed")
        ]
        self._start("munged", "--foreground", f"--socket={self.folder}/munge.socket", *files)
        wait_for((self.folder / "munge.socket").exists, what=f"munged; see {self.folder}")
        self.controller_up("-c")
        self.restore()

    @property
    def _configuration(self) -> Path:
        return self.folder / "slurm.conf"

    def _start(self, program: str, *arguments: str) -> None:
        self._daemons[program] = self._spawn(program, [program, *arguments])

    def _spawn(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.out").open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def controller_up(self, *options: str) -> None:
        """Start slurmctld."""
        self._start("slurmctld", "-D", "-f", str(self._configuration), *options)
        wait_for(self.states, what=f"slurmctld; see {self.folder}")

    def controller_down(self) -> None:
        """End slurmctld; killed, it might forget the newest job."""
        controller = self._daemons["slurmctld"]
        controller.terminate()
        controller.wait()

    def power_on(self, node: str) -> None:
        """Start a node, and connect it."""
        values = {"name": node, "ip": address_of(node), "hub": HUB_IP, "folder": self.folder}
        command = ["unshare", *APART, "sh", "-c", NODE_SCRIPT.format(**values)]
        first = self.nodes[node] = self._spawn(node, command)
        network, own = Path(f"/proc/{first.pid}/ns/net"), Path("/proc/self/ns/net")
        wait_for(lambda: not network.samefile(own), what=f"the network of {node}")
        peer = ("peer", "name", "eth0", "netns", str(first.pid))
        _run("ip", "link", "add", f"to-{node}", "type", "veth", *peer)
        _run("ip", "link", "set", f"to-{node}", "master", SWITCH, "up")

    def power_off(self, node: str) -> None:
        """End a node with all that runs there; nobody hears of it."""
        _run("ip", "link", "set", f"to-{node}", "down")
        first = self.nodes.pop(node)
        first.kill()
        first.wait()
        wait_for(lambda: not Path(f"/sys/class/net/to-{node}").exists(), what=f"the end of {node}")

    def processes(self, node: str) -> list[psutil.Process]:
        """The processes of a node but for the shell that is its first one, and Slurm's."""
        _, *others = _inside(self.nodes[node])
        return [process for process in others if process.name() not in ("slurmd", "slurmstepd")]

    def slurm(self, *command: str) -> str:
        """A command of Slurm; what it prints."""
        return _run(*command).strip()

    def field(self, job_id: str, name: str) -> str:
        """A field of a job, as Slurm shows it."""
        shown = self.slurm("scontrol", "-o", "show", "job", job_id)
        return not_none(re.search(rf"\b{name}=(\S*)", shown))[1]

    def states(self) -> dict[str, str]:
        """The state of every node, as sinfo has it."""
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%N %T"], capture_output=True, text=True, check=False
        )
        return dict(line.split(None, 1) for line in done.stdout.splitlines())

    def restore(self) -> None:
        """Have all nodes on and idle again, and no job."""
        if self._daemons["slurmctld"].poll() is not None:
            self.controller_up()
        jobs = self.slurm("squeue", "-h", "-o", "%i").split()
        if jobs:
            self.slurm("scancel", *jobs)
        for node in NODES:
            if node in self.nodes and self.nodes[node].poll() is not None:
                del self.nodes[node]
            if node not in self.nodes:
                self.power_on(node)
        for node, state in self.states().items():
            if "drain" in state:  # a node that was down comes back by itself
                self.slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")
        wait_for(
            lambda: self.states() == dict.fromkeys(NODES, "idle"),
            what=f"idle nodes: {self.states()}",
        )

    def stop(self) -> None:
        """End all daemons."""
        for process in (*self.nodes.values(), *self._daemons.values()):
            process.kill()
            process.wait()


def _inside(unshare: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The processes in a namespace, the first one first."""
    (first,) = psutil.Process(unshare.pid).children()
    return [first, *first.children(recursive=True)]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}".strip())
    return done.stdout


class _Forward(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        _, port = self.request.getsockname()
        with create_connection(("127.0.0.1", port)) as far:
            back = threading.Thread(target=_copy, args=(far, self.request), daemon=True)
            back.start()
            _copy(self.request, far)
            back.join()


def _copy(source: socket, sink: socket) -> None:
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(SHUT_WR)
    except OSError:  # either side has gone
        return


class _Forwarder(socketserver.ThreadingTCPServer):
    daemon_threads = True


def offer(port: int) -> None:
    """Have nodes reach a port of the hub's loopback at the hub's address, from now on."""
    server = _Forwarder((HUB_IP, port), _Forward)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def reap_until(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process as the first one of a namespace does. Returns its exit status."""
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while True:
        pid, status = os.wait()
        if pid == process.pid:
            return os.waitstatus_to_exitcode(status)
