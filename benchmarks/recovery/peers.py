"""How each of the other programs is started, and whether it came to its end.

Times are seconds.
"""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Sequence

from benchmarks.recovery.processes import Programs, beside_python, free_ports, module
from benchmarks.recovery.workload import NUM_RANKS, REPLICA, VARIABLE, Start, Workload

HOST = "127.0.0.1"
MAX_RESTARTS = "3"
# Of torchft's lighthouse, whose own value of 5 s is fifty heartbeats.
SHORT_TIMEOUT = ("--heartbeat_timeout_ms", "500")


def torchrun(workload: Workload) -> None:
    """All ranks are restarted ranks, from a checkpoint of every step."""
    programs = new_programs(workload.model_copy(update={"saves": True}))
    # Of torch 2.13: ranks that are started again find the addresses of those before in the
    # store that all restarts share, and sometimes connect to them.
    programs.start(
        "torchrun",
        [
            *(beside_python("torchrun"), "--standalone", "--max-restarts", MAX_RESTARTS),
            *("--nproc-per-node", str(NUM_RANKS), "-m", "benchmarks.recovery.plain"),
        ],
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )
    programs.wait(is_fine=lambda _, code: code == 0)


def plain(workload: Workload) -> None:
    """Processes without a supervisor."""
    programs = new_programs(workload)
    _start_ranks(programs, "plain", workload.num_ranks)
    programs.wait(is_fine=lambda _, code: code == 0)


def in_process(workload: Workload) -> None:
    """nvidia-resiliency-ext restarts the function in the processes that are left."""
    _in_process(workload, NUM_RANKS)


def in_process_spare(workload: Workload) -> None:
    """Likewise; a fifth process waits for the place of another."""
    _in_process(workload, NUM_RANKS + 1)


def _in_process(workload: Workload, count: int) -> None:
    require("nvidia_resiliency_ext")
    programs = new_programs(workload.model_copy(update={"saves": True}))
    # Not under torchrun, which ends all ranks when one ends.
    _start_ranks(programs, "inprocess", count)
    victim = f"rank-{workload.kill_rank}"
    programs.wait(is_fine=lambda name, code: code == 0 or (name, code) == (victim, -signal.SIGKILL))


def replicas(*options: str) -> Start:
    """The others go on without a killed replica; torchrun, one for each, starts it again.

    Args:
        options: of the lighthouse.
    """
    return lambda workload: _replicas(workload, options)


def _replicas(workload: Workload, options: Sequence[str]) -> None:
    require("torchft")
    programs = new_programs(workload)
    port = free_ports(1)
    lighthouse = ("--bind", f"{HOST}:{port}", "--min_replicas", "2")
    programs.start("lighthouse", [beside_python("torchft_lighthouse"), *lighthouse, *options])
    for rank in range(NUM_RANKS):
        programs.start(
            f"replica-{rank}",
            [
                *(beside_python("torchrun"), "--standalone", "--max-restarts", MAX_RESTARTS),
                *("--nproc-per-node", "1", "-m", "benchmarks.recovery.replicas"),
            ],
            TORCHFT_LIGHTHOUSE=f"http://{HOST}:{port}",
            **{REPLICA: str(rank)},
        )
    # The one that was killed may come back when the others are done; it is not waited for then.
    but = ["lighthouse"]
    if workload.kill_step is not None:
        but.append(f"replica-{workload.kill_rank}")
    programs.wait(is_fine=lambda _, code: code == 0, but=but)


def new_programs(workload: Workload) -> Programs:
    """What runs this workload."""
    variables = {VARIABLE: workload.model_dump_json(), "OMP_NUM_THREADS": "1"}
    return Programs(workload.folder, variables)


def _start_ranks(programs: Programs, name: str, count: int) -> None:
    port = free_ports(2)
    for rank in range(count):
        programs.start(
            f"rank-{rank}",
            module(name),
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(count),
            MASTER_ADDR=HOST,
            MASTER_PORT=str(port),
        )


def require(package: str) -> None:
    """Have the contender's name in the error.

    Raises:
        ImportError: the package is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"{package} is not installed", name=package)
