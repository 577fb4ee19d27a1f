"""Reading speed of the diagnosis beside `grep -E` with the same patterns, in one run.

    python -m benchmarks.diagnose [--size-mb 200] [--rounds 3]

Three logs of the given size: healthy training output, the same with failures of 64 ranks at its
end, and one that repeats a single error line. grep gets the patterns that both sides understand
(extended regular expressions have no lookahead) and counts matching lines; the diagnosis reads,
recognises, orders and names the cause. Both read from the page cache and use one core.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from perdure.training.diagnosis.compiled import wait_for_database
from perdure.training.diagnosis.rules import load_rules
from perdure.training.diagnosis.sources import PathDiagnosis, diagnose_files

MEGABYTE = 1_000_000
TARGET_MB_PER_S = 200.0
_NOT_IN_GREP = re.compile(r"\(\?|\\d|\\w\{|\\S|\\D|[*+?}]\?")

HEALTHY = (
    "[default7]: iteration {n:8d}/  115311 | consumed samples: {n:12d} | elapsed time per "
    "iteration (s): 106.46 | learning rate: 5.279E-05 | lm loss: 2.198845E+00 | grad norm: 0.242\n"
    "2026-11-21 13:18:47,639 INFO data: shard {n} of epoch 1 opened, 4096 samples\n"
)
FAILURE = (
    "[rank{r}]:[E321 02:07:08.408 ProcessGroupNCCL.cpp:607] [Rank {r}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, Timeout(ms)=600000)\n"
)
CAUSE = "[rank3]: TypeError: forward() missing 1 required positional argument: 'targets'\n"
FLOOD = "[rank5]: RuntimeError: HCCL function error: HcclAllReduce, error code is 9\n"


def write_logs(folder: Path, size_bytes: int) -> dict[str, Path]:
    """The three logs, each of about `size_bytes`."""
    healthy = "".join(HEALTHY.format(n=n) for n in range(2000))
    failure = CAUSE + "".join(FAILURE.format(r=rank) for rank in range(64))
    texts = {"healthy": (healthy, ""), "failed": (healthy, failure), "flood": (FLOOD * 4000, "")}
    paths = {}
    for name, (body, end) in texts.items():
        paths[name] = folder / f"{name}.log"
        with paths[name].open("w", encoding="ascii") as file:
            for _ in range(max(1, size_bytes // len(body))):
                file.write(body)
            file.write(end)
    return paths


def grep_patterns() -> list[str]:
    """The rules' patterns that `grep -E` understands, with the classes it lacks spelled out."""
    spelled = (
        rule.spec.pattern.replace(r"\d", "[0-9]").replace(r"\S", "[^ ]").replace(r"\D", "[^0-9]")
        for rule in load_rules()
    )
    plain = [pattern for pattern in spelled if not _NOT_IN_GREP.search(pattern)]
    return [pattern for pattern in plain if _grep([pattern], os.devnull) < 2]


def _grep(patterns: Sequence[str], path: str | Path) -> int:
    options = [word for pattern in patterns for word in ("-e", pattern)]
    command = ["grep", "-E", "-c", "-a", *options, str(path)]
    done = subprocess.run(
        command, env={**os.environ, "LC_ALL": "C"}, capture_output=True, check=False
    )
    return done.returncode


def timed(action: Callable[[], object]) -> float:
    """Seconds that an action takes."""
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s


def main() -> int:
    """Print a line per log. Returns 1 when the healthy or failed log is read too slowly."""
    parser = argparse.ArgumentParser(description="diagnosis beside grep -E")
    parser.add_argument("--size-mb", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    patterns = grep_patterns()
    started_s = timed(wait_for_database)
    print(f"{len(load_rules())} rules, ready in {started_s:.2f} s; grep -E gets {len(patterns)}")
    is_fast = True
    with tempfile.TemporaryDirectory() as name:
        for log, path in write_logs(Path(name), arguments.size_mb * MEGABYTE).items():
            size_mb = path.stat().st_size / MEGABYTE
            ours, greps = [], []
            for _ in range(arguments.rounds):
                ours.append(size_mb / timed(partial(_diagnose, path)))
                greps.append(size_mb / timed(partial(_grep, patterns, path)))
            ratio = median(ours) / median(greps)
            rates = f"ours {_spread(ours)}  grep {_spread(greps)}"
            print(f"{log:8s} {size_mb:5.0f} MB  {rates}  ratio {ratio:5.2f}")
            is_fast = is_fast and (log == "flood" or median(ours) >= TARGET_MB_PER_S)
    print(f"target {TARGET_MB_PER_S:.0f} MB/s: {'met' if is_fast else 'MISSED'}")
    return 0 if is_fast else 1


def _diagnose(path: Path) -> PathDiagnosis:
    return diagnose_files(str(path), [path], at_s=0.0, year=2026)


def _spread(rates: Sequence[float]) -> str:
    """Least, median and most of several rates."""
    return f"{min(rates):6.0f}/{median(rates):6.0f}/{max(rates):6.0f} MB/s"


if __name__ == "__main__":
    sys.exit(main())
