"""How each of the other programs is started on two nodes and a spare one, one of which is lost.

A node is what carries its name as a marker: the program's agent and the workers that it starts. All
of it is killed at once. The spare's agent runs and waits when that happens. Times are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.recovery.peers import HOST, MAX_RESTARTS, new_programs, require
from benchmarks.recovery.processes import Programs, beside_python, free_ports
from benchmarks.recovery.workload import (
    COLLECTIVE_S,
    LIMIT,
    NUM_NODES,
    NUM_RANKS,
    REPLICA,
    SPARES,
    Start,
    Workload,
)

RANKS_PER_NODE = NUM_RANKS // NUM_NODES
LOST = f"node-{NUM_NODES - 1}"  # of the rank that the workload kills; never the rendezvous'
SPARE = f"node-{NUM_NODES}"
# A node counts as lost after three heartbeats that did not come: torch's own number, a second
# apart and not five. Nothing waits for a third node beyond the two.
SHORT_KEEP_ALIVE = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"
# Of torchft: a survivor whose own connections are whole waits so long for a dead replica. Steps of
# six replicas on two cores take up to a second.
SHORT_COLLECTIVE_S = 2.0
MONITOR_S = "0.1"  # how often an agent looks at its workers: torchrun's own value
SETTLE_S = 2.0  # from the spare's connection to its place on the list of those that wait
POLL_S = 0.05


def torchrun(*rdzv_conf: str) -> Start:
    """Agents of torchrun meet through a store on the first node; the third one is redundant.

    Args:
        rdzv_conf: of the rendezvous.
    """
    # As in peers.py: ranks that are started again may find addresses of those before.
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return lambda workload: _elastic(workload, "torchrun", rdzv_conf, (), variables)


def ft_launcher(workload: Workload) -> None:
    """Likewise nvidia-resiliency-ext's, which comes from torchrun; its hot spare is the third.

    Of 0.4: three heartbeats 5 s apart that did not come are a constant of its rendezvous
    (fault_tolerance/_ft_rendezvous.py), and no setting.
    """
    require("nvidia_resiliency_ext")
    options = ("--ignore-missing-fault-tol-cfg",)
    _elastic(workload, "ft_launcher", (), options, {})


def _elastic(
    workload: Workload,
    launcher: str,
    rdzv_conf: Sequence[str],
    options: Sequence[str],
    variables: dict[str, str],
) -> None:
    programs = new_programs(workload.model_copy(update={"saves": True}))
    port = free_ports(1)
    command = [
        *(beside_python(launcher), "--nnodes", str(NUM_NODES)),
        *("--nproc-per-node", str(RANKS_PER_NODE), "--max-restarts", MAX_RESTARTS),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{HOST}:{port}", "--rdzv-id", "bench"),
        *(("--rdzv-conf", ",".join(rdzv_conf)) if rdzv_conf else ()),
        *("--monitor-interval", MONITOR_S, *options, "-m", "benchmarks.recovery.plain"),
    ]
    for index in range(NUM_NODES):
        programs.start_on(f"node-{index}", f"node-{index}", command, **variables)
        # In this order: the first has the store, and ranks follow the pids of the agents.
        programs.await_connection(f"node-{index}", port)
    _await_ranks(workload)
    programs.start_on(SPARE, SPARE, command, **variables)
    programs.await_connection(SPARE, port)
    time.sleep(SETTLE_S)
    workload.arm()
    programs.wait(is_fine=lambda name, code: code == 0 or name == LOST)


def torchft(*options: str, collective_s: float = COLLECTIVE_S) -> Start:
    """Two replicas a node, and two more that wait: they follow along and contribute nothing.

    Args:
        options: of the lighthouse.
        collective_s: limit of one collective.
    """

    def start(workload: Workload) -> None:
        require("torchft")
        programs = new_programs(workload)
        port = free_ports(1)
        lighthouse = ("--bind", f"{HOST}:{port}", "--min_replicas", str(NUM_RANKS))
        program = beside_python("torchft_lighthouse")
        programs.start_on("head", "lighthouse", [program, *lighthouse, *options])
        for replica in range(NUM_RANKS + RANKS_PER_NODE):
            _start_replica(programs, replica, port, collective_s)
        _await_ranks(workload)
        workload.arm()
        lost = {f"replica-{one}" for one in range(NUM_RANKS) if _node_of(one) == LOST}
        programs.wait(is_fine=lambda name, code: code == 0 or name in lost, but=["lighthouse"])

    return start


def _start_replica(
    programs: Programs, replica: int, lighthouse_port: int, collective_s: float
) -> None:
    programs.start_on(
        _node_of(replica),
        f"replica-{replica}",
        [
            *(beside_python("torchrun"), "--standalone", "--max-restarts", MAX_RESTARTS),
            *("--nproc-per-node", "1", "-m", "benchmarks.recovery.replicas"),
        ],
        TORCHFT_LIGHTHOUSE=f"http://{HOST}:{lighthouse_port}",
        **{REPLICA: str(replica), SPARES: str(RANKS_PER_NODE), LIMIT: f"{collective_s:g}"},
    )


def _node_of(replica: int) -> str:
    return f"node-{replica // RANKS_PER_NODE}"


def _await_ranks(workload: Workload) -> None:
    """Wait for the first completed step; the run's own time limit ends it."""
    while not any(path.stat().st_size for path in workload.folder.glob("steps-*.jsonl")):
        time.sleep(POLL_S)
