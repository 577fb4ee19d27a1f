"""What a session costs while nothing fails, beside a plain DDP loop on gloo.

Each kind of session trains in turns with a plain loop; a ratio is between neighbouring blocks.
A core for each rank: with more ranks than cores, when a step ends is the scheduler's choice, and
varies by more than a session costs.
Times are seconds, sizes bytes.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from benchmarks.estimates import median_interval
from benchmarks.recovery import ours, peers
from benchmarks.recovery.contenders import Target
from benchmarks.recovery.measuring import Completed, Logs
from benchmarks.recovery.tables import spread
from benchmarks.recovery.turns import Group, in_turns
from benchmarks.recovery.workload import NUM_RANKS, Start, Workload, state_bytes

KIND = "cost"
PLAIN = "plain DDP loop"
SESSION = "perdure"
SNAPSHOTS = "perdure, numeric_retry"
LINK_RETRY = "perdure, link_retry"
# The first step of a block is not measured; ten are, and one of ten is followed by a snapshot.
BLOCK_STEPS = 11
LIMIT = 0.01
MEBIBYTE = 2**20

CONTENDERS: Mapping[str, Start] = {
    PLAIN: peers.plain,
    SESSION: ours.session(),
    SNAPSHOTS: ours.session(restart={"numeric_retry": True}),
    LINK_RETRY: ours.session(comm={"link_retry": True}),
}


@dataclass(frozen=True, slots=True)
class Block:
    """The measured steps of a block.

    Attributes:
        median_s: of the steps of the first rank.
        mean_s: of all steps, with the work that is done only every few steps.
        fast_s: the fastest of them: what others do to the machine has little part in it.
        cpu_s: of all ranks in a step, mean.
    """

    median_s: float
    fast_s: float
    mean_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Cost:
    """A session beside its plain loop.

    Attributes:
        plain: its blocks, without the first, which warms up.
        own: those of the session, in the same order.
        helper_cores: of the processes that train nothing, while the session trained or waited.
        memory_bytes: of one rank, plain loop and session.
    """

    plain: Sequence[Block]
    own: Sequence[Block]
    helper_cores: float
    memory_bytes: tuple[float, float]

    def ratios(self, value: Callable[[Block], float]) -> list[float]:
        """Of neighbouring blocks."""
        return [value(own) / value(plain) for own, plain in zip(self.own, self.plain, strict=True)]

    @property
    def fast_ratio(self) -> float:
        """Of the median fastest steps."""
        return median(one.fast_s for one in self.own) / median(one.fast_s for one in self.plain)


def num_ranks() -> int:
    """That train in this section."""
    return max(2, min(NUM_RANKS, os.cpu_count() or 1))


def measure(name: str, *, rounds: int) -> Cost:
    """Have a session and a plain loop train in turns.

    Raises:
        NotRunError: one of them failed.
    """
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as text:
        groups: dict[str, Group] = {}
        try:
            for one in (PLAIN, name):
                folder = Path(text) / str(len(groups))
                folder.mkdir()
                steps = BLOCK_STEPS * rounds
                workload = Workload(
                    folder=folder, steps=steps, block_steps=BLOCK_STEPS, num_ranks=num_ranks()
                )
                groups[one] = Group.start(KIND, one, workload)
            for group in groups.values():
                group.await_ranks()
            before_s = groups[name].helpers_cpu_s()
            in_turns(groups, rounds=rounds - 1)
            used_s = groups[name].helpers_cpu_s() - before_s
            in_turns(groups, rounds=1)
            logs = {one: group.finish() for one, group in groups.items()}
        finally:
            for group in groups.values():
                group.close()
    return _cost(logs[PLAIN], logs[name], used_s)


def _cost(plain: Logs, own: Logs, helpers_cpu_s: float) -> Cost:
    lasted_s = own.completed[-1].at_s - own.completed[0].at_s
    return Cost(
        plain=_blocks(plain),
        own=_blocks(own),
        helper_cores=helpers_cpu_s / lasted_s,
        memory_bytes=(_memory(plain), _memory(own)),
    )


def _blocks(logs: Logs) -> list[Block]:
    by_rank: dict[int, list[Completed]] = {}
    for one in logs.completed:
        by_rank.setdefault(one.rank, []).append(one)
    count = logs.newest // BLOCK_STEPS
    return [_block([rank[n * BLOCK_STEPS :] for rank in by_rank.values()]) for n in range(1, count)]


def _block(ranks: Sequence[Sequence[Completed]]) -> Block:
    own = [rank[:BLOCK_STEPS] for rank in ranks]
    first = next(rank for rank in own if rank[0].rank == 0)
    times = [after.at_s - before.at_s for before, after in itertools.pairwise(first)]
    cpu_s = sum(rank[-1].cpu_s - rank[0].cpu_s for rank in own)
    return Block(median(times), min(times), fmean(times), cpu_s / len(times))


def _memory(logs: Logs) -> float:
    return fmean(one.memory_bytes for one in logs.completed if one.memory_bytes is not None)


def targets(costs: Mapping[str, Cost]) -> list[Target]:
    """A session costs next to nothing, whatever it keeps."""
    results = []
    for name, cost in costs.items():
        ratios = cost.ratios(lambda one: one.median_s)
        low, high = median_interval(ratios)
        share = median(ratios) - 1
        text = (
            f"{name} costs under {LIMIT:.0%} of the median step: {share:+.2%}, "
            f"with 95 % confidence {low - 1:+.2%} to {high - 1:+.2%}"
        )
        results.append(Target(text, share < LIMIT))
    return results


def table(costs: Mapping[str, Cost]) -> str:
    """A row per session and what it is compared with: least, median and most of the blocks."""
    head = (
        f"{'':24s} {'plain step s':>17s} {'step s':>17s} {'ratio':>17s} {'fast':>5s} "
        f"{'ratio of means':>17s} {'ratio of CPU s':>17s} {'MiB a rank':>12s} {'helpers':>10s}"
    )
    title = f"steps without a fault, {num_ranks()} ranks: a session and a plain DDP loop, in turns"
    lines = ["", title, head]
    for name, cost in costs.items():
        plain, own = (f"{size / MEBIBYTE:.0f}" for size in cost.memory_bytes)
        lines.append(
            f"{name:24s} {spread([one.median_s for one in cost.plain], 3):>17s} "
            f"{spread([one.median_s for one in cost.own], 3):>17s} "
            f"{spread(cost.ratios(lambda one: one.median_s), 3):>17s} {cost.fast_ratio:5.3f} "
            f"{spread(cost.ratios(lambda one: one.mean_s), 3):>17s} "
            f"{spread(cost.ratios(lambda one: one.cpu_s), 3):>17s} {plain + ' -> ' + own:>12s} "
            f"{cost.helper_cores:4.2f} cores"
        )
    twice = 2 * state_bytes() / MEBIBYTE
    lines.append(f"numeric_retry keeps the state of a rank twice: {twice:.0f} MiB of its memory")
    return "\n".join(lines)
