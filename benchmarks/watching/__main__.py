"""What watching costs, each part alone and all of it in a run.

    python -m benchmarks.watching [--rounds 5] [--pairs 800]

The run stops and starts its watching block by block. As many ranks train as leave one core free,
and once as many as there are cores, so that what watches has to take its time from them.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from statistics import median

from benchmarks.estimates import median_interval
from benchmarks.watching import paired, parts
from benchmarks.watching.parts import LIMIT


def main() -> int:
    """Print the figures. Returns 1 when a target is missed."""
    parser = argparse.ArgumentParser(description="cost of watching a run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=800, help="of blocks, watched and not")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run is not None:
        num_ranks, pairs, folder = arguments.run
        return paired.run(int(num_ranks), int(pairs), Path(folder))
    cores = os.cpu_count() or 1
    are_met = [parts.measure(arguments.rounds), _paired(max(1, cores - 1), arguments.pairs)]
    _paired(cores, arguments.pairs)
    return 0 if all(are_met) else 1


def _paired(num_ranks: int, pairs: int) -> bool:
    """Print what a watched step pays in pairs of blocks. Returns whether the target is met."""
    found = paired.measure(num_ranks, pairs)
    low, high = median_interval(found.costs)
    cost = median(found.costs)
    text = "/".join(f"{one:+.2%}" for one in (min(found.costs), cost, max(found.costs)))
    is_met = high < LIMIT
    print(
        f"{num_ranks} ranks on {os.cpu_count()} cores, steps of {median(found.plain_s):.4f} s, "
        f"{len(found.costs)} pairs: watching costs {text}, "
        f"the median with 95 % confidence {low:+.2%} to {high:+.2%}; "
        f"under {LIMIT:.1%}: {'met' if is_met else 'MISSED'}"
    )
    return is_met


if __name__ == "__main__":
    raise SystemExit(main())
