"""How the time of a node replacement grows with the number of ranks.

    python -m benchmarks.scale [--only SECTION] [--ranks N ...] [--rounds 3] [--warm-spares N]

Section "messages": the state machine alone, with simulated ranks: messages in and out, their
bytes, its own CPU time. Section "coordinator": the real coordinator and a real connection for
each rank, which one process answers for; from it follows what a message costs, and the estimate
for a number of ranks that no machine has. Section "processes": real ranks, on this machine. The
first two take about a minute together, the last one about ten on two cores.
"""

from __future__ import annotations

import argparse
import os
import sys
from statistics import median

from benchmarks.recovery.tables import spread
from benchmarks.scale import coordinator, ranks, state_machine
from benchmarks.scale.estimate import Costs, protocol_s
from perdure.training.recovery.repair import StepPhase

SECTIONS = ("messages", "coordinator", "processes")
RANKS = (64, 512, 2048, 8192)
RANKS_PER_NODE = 8
ROUND_TRIP_S = 0.001  # assumed, of a management network; on loopback it is a tenth of it


def main() -> int:
    """Print a table per section."""
    arguments = _parser().parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    chosen = (arguments.only,) if arguments.only else SECTIONS
    if "messages" in chosen:
        _messages(arguments.ranks)
    if "coordinator" in chosen:
        _coordinator(arguments.ranks, arguments.rounds)
    if "processes" in chosen:
        _processes(arguments.rounds, arguments.warm_spares)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="node replacement with many ranks")
    parser.add_argument("--only", choices=SECTIONS)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="simulated ones")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-spares", type=int, default=0, help="of the real ranks' engine")
    return parser


def _messages(sizes: list[int]) -> None:
    print("\nthe state machine alone; the second row of a size: a step that all had voted for")
    print(f"{'ranks':>6s} {'in':>7s} {'out':>7s} {'per rank':>9s} {'B/rank in':>10s} "
          f"{'out':>6s} {'largest out':>12s} {'CPU s':>8s}")  # fmt: skip
    for size in sizes:
        for phase in (StepPhase.RUN, StepPhase.VOTED):
            one = state_machine.Replacement(size, RANKS_PER_NODE, phase=phase).run()
            print(
                f"{size:6d} {one.received.total():7d} {one.sent.total():7d} "
                f"{one.num_messages / size:9.2f} {one.received_bytes / size:10.0f} "
                f"{one.sent_bytes / size:6.0f} {one.largest_bytes:10d} B {one.machine_s:8.3f}"
            )


def _coordinator(sizes: list[int], rounds: int) -> None:
    print("\nthe coordinator with a connection for each rank, which train nothing")
    print(f"{'ranks':>6s} {'messages':>9s} {'wall s':>19s} {'coordinator CPU s':>19s} "
          f"{'us/message':>11s} {'memory MB':>10s}")  # fmt: skip
    largest = None
    for size in sizes:
        runs = [coordinator.measure(size, ranks_per_node=RANKS_PER_NODE) for _ in range(rounds)]
        cost_s = median(one.message_s for one in runs)
        print(
            f"{size:6d} {runs[0].num_messages:9d} {spread([one.wall_s for one in runs], 2):>19s} "
            f"{spread([one.coordinator_s for one in runs], 2):>19s} {cost_s * 1e6:11.0f} "
            f"{max(one.memory_bytes for one in runs) / 1e6:10.0f}"
        )
        largest = min(runs, key=lambda one: abs(one.message_s - cost_s))
    if largest is not None:
        _estimate(largest)


def _estimate(served: coordinator.Served) -> None:
    costs = Costs.of(served, round_trip_s=ROUND_TRIP_S)
    course = state_machine.Replacement(max(RANKS), RANKS_PER_NODE).run()
    print(
        f"estimate for {course.num_ranks} ranks: {course.num_messages} messages of "
        f"{costs.message_s * 1e6:.0f} us ({costs.source}) and two round trips of "
        f"{costs.round_trip_s * 1e3:g} ms (assumed): {protocol_s(course, costs):.2f} s"
    )


def _processes(rounds: int, warm_spares: int) -> None:
    print("\nreal ranks on this machine; CPU from the decision to the end, by whose it is")
    names = [f"{part.value:>12s}" for part in ranks.Part]
    print(f"{'ranks':>6s} {'nodes':>6s} {'noticed s':>10s} {'resume s':>19s} {'recovery s':>19s}"
          f" {'lost':>5s} {' '.join(names)}")  # fmt: skip
    for shape in ranks.SHAPES:
        runs = [ranks.measure(shape, warm_spares=warm_spares) for _ in range(rounds)]
        cpu = [f"{median(one.cpu_s[part] for one in runs):12.2f}" for part in ranks.Part]
        print(
            f"{shape.num_ranks:6d} {shape.nodes:6d} {median(one.noticed_s for one in runs):10.2f} "
            f"{spread([one.resume_s for one in runs], 1):>19s} "
            f"{spread([one.recovery_s for one in runs], 1):>19s} "
            f"{max(one.steps_lost for one in runs):5d} {' '.join(cpu)}",
            flush=True,
        )
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    sys.exit(main())
