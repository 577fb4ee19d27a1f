"""Break runs at random and compare them: `python -m perdure.training.drill.chaos`.

Each run must equal the undisturbed run. A fault of a campaign that did not fire is a failure too,
unless the program can print a reason why it could not.

The program writes a campaign that fails to a file, and can shrink it to the fewest faults that
still fail. Exit codes: 0 all runs equal the undisturbed run, 1 a run does not, 2 the input is
wrong. Times are seconds.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perdure.storage.errors import StorageError
from perdure.training.config.model import ParallelKind
from perdure.training.drill.campaign import Campaign
from perdure.training.drill.device_report import count_devices
from perdure.training.drill.driver import RunDriver, RunOutcome, kill_hook
from perdure.training.drill.evaluation import find_deviations, list_recoveries
from perdure.training.drill.job import drill_job, write_corpus
from perdure.training.drill.runner import KINDS, parallel_kind
from perdure.training.errors import InputError, PerdureError
from perdure.training.injection.outside import KillInjector
from perdure.training.supervisor.watch import EndKind

LIMIT_S = 900.0  # for each start of a run
NUM_FAULTS = 50
TRIES = 2  # for a part of a campaign: a kill from outside never hits the same moment twice


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a campaign.

    Attributes:
        fired: number of faults and kills that really happened.
        rungs: number of recoveries, by rung.
        rung_s: total time of the recoveries, by rung.
        took_s: from the start of the run to its end.
        excused: faults that could not fire, with the reasons.
        problems: deviations from the undisturbed run, and faults that should have fired.
    """

    fired: int
    rungs: Counter[str]
    rung_s: dict[str, float]
    took_s: float
    excused: tuple[str, ...]
    problems: tuple[str, ...]


@dataclass(slots=True)
class Chaos:
    """Runs campaigns below a folder.

    Attributes:
        home: Perdure's folder for the runs.
    """

    home: Path
    _undisturbed: dict[tuple[ParallelKind, int], RunOutcome] = field(default_factory=dict)
    _count: int = 0

    def run(self, campaign: Campaign) -> Result:
        """Run a campaign, preceded by the same job without a fault, once.

        Raises:
            PerdureError: a run could not be started.
            StorageError: the store failed.
        """
        undisturbed = self._without_faults(campaign)
        self._count += 1
        faults = [fault.model_dump() for fault in campaign.faults]
        drill = {"drill": {"faults": faults, "kills": bool(campaign.kills)}}
        job = drill_job(
            self.home,
            f"chaos-{self._count}-seed-{campaign.seed}",
            kind=campaign.parallelism,
            steps=campaign.steps,
            changes={**campaign.overrides, **drill},
        )
        injector = KillInjector(campaign.kills)
        began_s = time.monotonic()
        driver = RunDriver(self.home, LIMIT_S)
        outcome = driver.run(job, hook=kill_hook(injector), starts=campaign.starts)
        return _result(campaign, outcome, undisturbed, injector, took_s=time.monotonic() - began_s)

    def shorten(self, campaign: Campaign) -> Campaign:
        """Shorten a failing campaign to the fewest faults that still fail."""

        def fails(indices: Sequence[int]) -> bool:
            part = campaign.select(indices)
            is_bad = any(self.run(part).problems for _ in range(TRIES))
            print(f"{part.size} faults: {'fails' if is_bad else 'equal'}", flush=True)
            return is_bad

        return campaign.select(shrink(range(campaign.size), fails))

    def _without_faults(self, campaign: Campaign) -> RunOutcome:
        key = (campaign.parallelism, campaign.steps)
        if key not in self._undisturbed:
            write_corpus(self.home)
            name = f"undisturbed-{campaign.parallelism}-{campaign.steps}"
            job = drill_job(
                self.home,
                name,
                kind=campaign.parallelism,
                steps=campaign.steps,
                changes=campaign.overrides,
            )
            self._undisturbed[key] = RunDriver(self.home).run(job)
        return self._undisturbed[key]


def _result(
    campaign: Campaign,
    outcome: RunOutcome,
    undisturbed: RunOutcome,
    injector: KillInjector,
    *,
    took_s: float,
) -> Result:
    recoveries = list_recoveries(outcome.history)
    rung_s: dict[str, float] = defaultdict(float)
    for recovery in recoveries:
        rung_s[recovery.rung.value] += (
            recovery.trains_at_s or recovery.noticed_at_s
        ) - recovery.noticed_at_s
    silent = campaign.find_unfired(
        outcome.history,
        fired=outcome.fired_s,
        killed=injector.fired_s,
        num_due=injector.num_due,
    )
    problems = list(find_deviations(outcome, undisturbed))
    if undisturbed.ended != EndKind.COMPLETED:
        problems.insert(0, f"the undisturbed run ended: {undisturbed.ended}")
    return Result(
        fired=sum(len(times) for times in outcome.fired_s.values()) + len(injector.fired_s),
        rungs=Counter(recovery.rung.value for recovery in recoveries),
        rung_s=rung_s,
        took_s=took_s,
        excused=tuple(
            f"{missing.description}: {missing.reason}" for missing in silent if missing.reason
        ),
        problems=(
            *problems,
            *(f"did not fire: {missing.description}" for missing in silent if not missing.reason),
        ),
    )


def shrink(items: Sequence[int], fails: Callable[[Sequence[int]], bool]) -> list[int]:
    """Find a part of `items` that fails, and does not without any of its items: delta debugging.

    Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input" (IEEE TSE 28,
    2002): drops ever smaller pieces, as long as the remainder fails.

    Args:
        items: they fail together.
        fails: whether a part of them, in their order, still fails; calls are costly.
    """
    left = list(items)
    if fails([]):
        return []
    num_pieces = 2
    while len(left) > 1:
        pieces = _cut(left, num_pieces)
        smaller = next((piece for piece in pieces if len(pieces) > 1 and fails(piece)), None)
        if smaller is not None:
            left, num_pieces = smaller, 2
            continue
        complements = (_without(pieces, number) for number in range(len(pieces)))
        # With two pieces, each is the complement of the other.
        smaller = next(
            (complement for complement in complements if num_pieces > 2 and fails(complement)), None
        )
        if smaller is not None:
            left, num_pieces = smaller, max(num_pieces - 1, 2)
        elif num_pieces >= len(left):
            break
        else:
            num_pieces = min(num_pieces * 2, len(left))
    return left


def _cut(items: list[int], num_pieces: int) -> list[list[int]]:
    bounds = [len(items) * n // num_pieces for n in range(num_pieces + 1)]
    return [items[a:b] for a, b in itertools.pairwise(bounds)]


def _without(pieces: list[list[int]], number: int) -> list[int]:
    return [item for n, piece in enumerate(pieces) if n != number for item in piece]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaigns of the command line. Returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return _run(_campaigns(options), out=options.out, shrinks=options.shrink)
    except InputError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 2
    except (PerdureError, StorageError) as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 1


def _campaigns(options: argparse.Namespace) -> list[Campaign]:
    if options.campaign is not None:
        return [Campaign.read(options.campaign)]
    kind, is_of_gloo = parallel_kind(options.parallelism), count_devices() == 0
    return [
        Campaign.draw(seed, num_faults=options.faults, kind=kind, is_of_gloo=is_of_gloo)
        for seed in options.seed
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="chaos", description="Break runs at random.")
    parser.add_argument("--seed", type=int, nargs="+", default=[1], help="campaigns to draw")
    parser.add_argument("--faults", type=int, default=NUM_FAULTS, help="in each of them")
    parser.add_argument("--parallelism", default=KINDS[0].value, help=", ".join(KINDS))
    parser.add_argument("--campaign", type=Path, help="a file instead of seeds")
    parser.add_argument("--shrink", action="store_true", help="shorten a campaign that fails")
    parser.add_argument(
        "--out", type=Path, default=Path.cwd(), help="folder for campaigns that failed"
    )
    return parser


def _run(campaigns: Sequence[Campaign], *, out: Path, shrinks: bool) -> int:
    home = Path(tempfile.mkdtemp(prefix="perdure-chaos-")).resolve()
    try:
        return _run_below(home, campaigns, out=out, shrinks=shrinks)
    except (KeyboardInterrupt, SystemExit):
        shutil.rmtree(home, ignore_errors=True)  # its run has ended
        raise


def _run_below(home: Path, campaigns: Sequence[Campaign], *, out: Path, shrinks: bool) -> int:
    chaos = Chaos(home)
    num_bad = 0
    for campaign in campaigns:
        result = chaos.run(campaign)
        print(_line(campaign, result), flush=True)
        for excuse in result.excused:
            print(f"  could not fire: {excuse}", flush=True)
        if not result.problems:
            continue
        num_bad += 1
        if shrinks:
            campaign = chaos.shorten(campaign)  # noqa: PLW2901 the shorter campaign is written
        path = out / f"chaos-{campaign.parallelism}-{campaign.seed}.json"
        campaign.write(path)
        print(
            f"to run it again: python -m perdure.training.drill.chaos --campaign {path}", flush=True
        )
    if num_bad:
        print(f"{num_bad} of {len(campaigns)} campaigns failed; logs and ledgers: {home}")
        return 1
    shutil.rmtree(home, ignore_errors=True)
    return 0


def _line(campaign: Campaign, result: Result) -> str:
    rungs = ", ".join(
        f"{count} {rung} ({result.rung_s[rung]:.1f} s)"
        for rung, count in result.rungs.most_common()
    )
    outcome = "; ".join(result.problems) or "curve and final state equal, nothing left over"
    return (
        f"seed {campaign.seed} {campaign.parallelism}: {result.fired} faults fired "
        f"({campaign.size} planned), {rungs or 'no recovery'}; {outcome}; {result.took_s:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
