"""`python -m training.drill.chaos`: runs that are broken at random, and have to come out the same.

A fault of a campaign that did not happen counts as one that was not mended, unless there is a
reason why it could not happen; the reason is printed.

A campaign that fails is written to a file, and can be shrunk to the fewest faults that still
fail. Exit codes: 0 all runs came out as the undisturbed one, 1 one did not, 2 the input is wrong.
Times are seconds.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from storage.errors import StorageError
from training.drill.campaign import Campaign, draw, read_campaign, write_campaign
from training.drill.drilling import KINDS, parallel_kind
from training.drill.driver import RunDriver, RunOutcome
from training.drill.hooks import KillHook
from training.drill.job import drill_job, write_corpus
from training.drill.shrink import shrink
from training.drill.unfired import missed
from training.drill.verdict import differences, recovered
from training.errors import InputError, PerdureError
from training.injection.outside import KillInjector, LocalRun
from training.specs.model import ParallelKind
from training.supervisor.watch import EndKind

LIMIT_S = 900.0  # of one start of a run
NUM_FAULTS = 50
TRIES = 2  # of a part of a campaign: what happens from outside does not hit the same moment again


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one campaign.

    Attributes:
        fired: faults and kills that really happened.
        rungs: recoveries, by the rung that did it.
        rung_s: how long they took together, likewise.
        took_s: from the start of the run to its end.
        excused: faults that could not happen, and why.
        problems: in what the run is not the undisturbed one, and faults that should have happened.
    """

    fired: int
    rungs: Counter[str]
    rung_s: dict[str, float]
    took_s: float
    excused: tuple[str, ...]
    problems: tuple[str, ...]


@dataclass(slots=True)
class Chaos:
    """Plays campaigns below a folder.

    Attributes:
        home: Perdure's folder for their runs.
        say: told what goes on.
    """

    home: Path
    say: Callable[[str], None]
    _undisturbed: dict[tuple[ParallelKind, int], RunOutcome] = field(default_factory=dict)
    _count: int = 0

    def play(self, campaign: Campaign) -> Result:
        """Run a campaign, and the same job without a fault when that has not been run yet.

        Raises:
            PerdureError: a run could not be started.
            StorageError: likewise.
        """
        undisturbed = self._without_faults(campaign)
        self._count += 1
        faults = {"drill": {"faults": [one.model_dump() for one in campaign.faults]}}
        job = drill_job(
            self.home,
            f"chaos-{self._count}-seed-{campaign.seed}",
            kind=campaign.parallelism,
            steps=campaign.steps,
            changes={**campaign.overrides, **faults},
        )
        injector = KillInjector(LocalRun(self.home, job.run_id), campaign.kills)
        began_s = time.monotonic()
        driver = RunDriver(self.home, LIMIT_S)
        played = driver.play(job, person=KillHook(injector), starts=campaign.starts)
        return _result(campaign, played, undisturbed, injector, took_s=time.monotonic() - began_s)

    def shortest(self, campaign: Campaign) -> Campaign:
        """The fewest faults of a failing campaign that still fail."""

        def fails(places: Sequence[int]) -> bool:
            part = campaign.only(places)
            is_bad = any(self.play(part).problems for _ in range(TRIES))
            self.say(f"{part.size} faults: {'fails' if is_bad else 'comes out the same'}")
            return is_bad

        return campaign.only(shrink(range(campaign.size), fails))

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
            self._undisturbed[key] = RunDriver(self.home).play(job)
        return self._undisturbed[key]


def _result(
    campaign: Campaign,
    played: RunOutcome,
    undisturbed: RunOutcome,
    injector: KillInjector,
    *,
    took_s: float,
) -> Result:
    recoveries = recovered(played.history)
    rung_s: dict[str, float] = defaultdict(float)
    for one in recoveries:
        rung_s[one.rung.value] += (one.trains_at_s or one.noticed_at_s) - one.noticed_at_s
    not_there = missed(
        campaign,
        played.history,
        fired=played.fired_s,
        killed=injector.fired_s,
        looks=injector.num_due,
    )
    return Result(
        fired=sum(len(times) for times in played.fired_s.values()) + len(injector.fired_s),
        rungs=Counter(one.rung.value for one in recoveries),
        rung_s=rung_s,
        took_s=took_s,
        excused=tuple(f"{one.what}: {one.reason}" for one in not_there if one.reason),
        problems=(
            *_problems(played, undisturbed),
            *(f"did not happen: {one.what}" for one in not_there if not one.reason),
        ),
    )


def _problems(played: RunOutcome, undisturbed: RunOutcome) -> Iterator[str]:
    if undisturbed.ended != EndKind.COMPLETED:
        yield f"the undisturbed run ended: {undisturbed.ended}"
    if played.ended != EndKind.COMPLETED:
        yield f"the run ended: {played.ended}"
    differing = differences(played.curve, undisturbed.curve)
    if differing:
        yield f"the curve differs at {len(differing)} steps, first at step {differing[0]}"
    elif played.state != undisturbed.state:
        yield "the curve is equal, the final state is not"
    if played.left_over:
        yield f"left over: {', '.join(played.left_over)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for. Returns the exit code."""
    given = _parser().parse_args(arguments)
    try:
        kind = parallel_kind(given.parallelism)
        campaigns = (
            [read_campaign(given.campaign)]
            if given.campaign is not None
            else [draw(seed, num_faults=given.faults, kind=kind) for seed in given.seed]
        )
        return _run(campaigns, out=given.out, shrinks=given.shrink)
    except InputError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 2
    except (PerdureError, StorageError) as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 1


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
    chaos = Chaos(home, say=lambda text: print(text, flush=True))
    num_bad = 0
    for campaign in campaigns:
        result = chaos.play(campaign)
        chaos.say(_line(campaign, result))
        for one in result.excused:
            chaos.say(f"  could not happen: {one}")
        if not result.problems:
            continue
        num_bad += 1
        if shrinks:
            campaign = chaos.shortest(campaign)  # noqa: PLW2901 the one to keep
        path = out / f"chaos-{campaign.parallelism}-{campaign.seed}.json"
        write_campaign(path, campaign)
        chaos.say(f"to play it again: python -m training.drill.chaos --campaign {path}")
    if num_bad:
        chaos.say(f"{num_bad} of {len(campaigns)} campaigns failed; logs and ledgers: {home}")
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
        f"seed {campaign.seed} {campaign.parallelism}: {result.fired} faults happened "
        f"({campaign.size} planned), {rungs or 'no recovery'}; {outcome}; {result.took_s:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
