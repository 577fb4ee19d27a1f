"""Recovery beside other programs, and its cost without a fault, in one run on one machine.

    python -m benchmarks.recovery [--rounds 3] [--steps 48] [--only SECTION] [--contender NAME]

Section "recovery": each round runs every contender once, with four ranks on gloo, until one rank is
killed in the middle of a step (or has the fault that a step retry is for); what counts is the
log of completed steps that every process keeps. Section "node-lost" measures the same with the
ranks on two nodes, of which one is killed as a whole while the agent of a third one waits; a node
is an agent and its processes. Section "overhead": the same training without a fault, by a plain
loop and in a session, in turns. By default, each section takes about twenty minutes on
two cores; `--only node-lost --rounds 1` takes about six.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping

from benchmarks.recovery import overhead
from benchmarks.recovery.contenders import (
    NODE_LOST,
    RANK_KILLED,
    UNDISTURBED,
    Section,
    beside_equal,
    targets,
)
from benchmarks.recovery.measuring import Curve, Recovery
from benchmarks.recovery.running import NotRunError, run
from benchmarks.recovery.tables import recovery_table, verdicts
from benchmarks.recovery.workload import MODEL, NUM_RANKS, VOCABULARY, Start, Workload

QUIET = "quiet"
OVERHEAD = "overhead"
FAULTS: Mapping[str, Section] = {"recovery": RANK_KILLED, "node-lost": NODE_LOST}
SECTIONS = (*FAULTS, OVERHEAD)
_SESSIONS = tuple(name for name in overhead.CONTENDERS if name != overhead.PLAIN)
_STARTS: Mapping[str, Mapping[str, Start]] = {
    **{s.kind: {n: one.start for n, one in s.contenders.items()} for s in FAULTS.values()},
    QUIET: UNDISTURBED,
    overhead.KIND: overhead.CONTENDERS,
}


def main() -> int:
    """Print a table per section. Returns 1 when a target is missed or a contender did not run."""
    arguments = _parser().parse_args()
    if arguments.run is not None:
        return _run_here(*arguments.run)
    known = {name for one in FAULTS.values() for name in one.contenders} | set(_SESSIONS)
    unknown = [name for name in arguments.contender or () if name not in known]
    if unknown:
        print(f"--contender: {unknown[0]!r}: there are {', '.join(sorted(known))}", file=sys.stderr)
        return 2
    parameters = MODEL.num_parameters(VOCABULARY) / 1e6
    print(f"{os.cpu_count()} cores, {NUM_RANKS} ranks, {parameters:.1f} M parameters")
    met = True
    for name, section in FAULTS.items():
        if arguments.only in (None, name):
            met = _recovery(arguments, section) and met
    if arguments.only in (None, OVERHEAD):
        met = _overhead(arguments) and met
    return 0 if met else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="recovery beside other programs, and its cost")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=48, help="of a run with a fault")
    parser.add_argument("--blocks", type=int, default=41, help="of a session without a fault")
    parser.add_argument("--only", choices=SECTIONS)
    parser.add_argument("--contender", action="append", help="default: all of the sections")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    return parser


def _run_here(kind: str, name: str, workload: str) -> int:
    """The child: one run of one contender."""
    try:
        _STARTS[kind][name](Workload.model_validate_json(workload))
    except ImportError as exc:
        print(f"{exc.name} is not installed", file=sys.stderr)
        return 1
    except RuntimeError as exc:
        print(f"failed: {exc}", file=sys.stderr)
        return 1
    return 0


def _recovery(arguments: argparse.Namespace, section: Section) -> bool:
    """A section with faults. Whether all targets are met."""
    contenders, steps = section.contenders, arguments.steps
    names = _chosen(arguments, contenders)
    found: dict[str, list[Recovery]] = {name: [] for name in names}
    missing: dict[str, str] = {}
    curves: dict[str, Curve | NotRunError] = {}
    load = _load()
    for _ in range(arguments.rounds):
        for name in names:
            try:
                curve = _undisturbed(contenders[name].undisturbed, steps, curves)
                logs = run(
                    section.kind,
                    name,
                    steps=steps,
                    kill_step=steps // 3,
                    loses_node=section.loses_node,
                )
                found[name].append(Recovery.of(logs, curve))
            except (NotRunError, ValueError) as exc:
                missing[name] = str(exc)
    results = targets(section, found)
    table = recovery_table(section.title, found, missing, reference=section.reference)
    print(table, beside_equal(section, found), verdicts(results), sep="\n")
    print(f"load {load} to {_load()}")
    return _all_ran(missing) and all(one.is_met for one in results)


def _undisturbed(name: str, steps: int, curves: dict[str, Curve | NotRunError]) -> Curve:
    """The loss of a program without a fault; it runs once."""
    if name not in curves:
        try:
            curves[name] = run(QUIET, name, steps=steps).curve()
        except NotRunError as exc:
            curves[name] = exc
    curve = curves[name]
    if isinstance(curve, NotRunError):
        raise curve
    return curve


def _overhead(arguments: argparse.Namespace) -> bool:
    """The second section. Whether all targets are met."""
    load = _load()
    costs = {}
    missing: dict[str, str] = {}
    for name in _chosen(arguments, _SESSIONS):
        try:
            costs[name] = overhead.measure(name, rounds=arguments.blocks)
        except NotRunError as exc:
            missing[name] = str(exc)
    results = overhead.targets(costs)
    print(overhead.table(costs), verdicts(results), f"load {load} to {_load()}", sep="\n")
    return _all_ran(missing) and all(one.is_met for one in results)


def _chosen(arguments: argparse.Namespace, known: Iterable[str]) -> list[str]:
    """Who of a section takes part."""
    return [name for name in known if arguments.contender is None or name in arguments.contender]


def _all_ran(missing: Mapping[str, str]) -> bool:
    """Whether every contender reached its end each time; prints why others did not."""
    if missing:
        text = "; ".join(f"{name}: {why}" for name, why in missing.items())
        print(f"bench-recovery: not all contenders ran: {text}", file=sys.stderr)
    return not missing


def _load() -> str:
    """Mean number of running processes in the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    sys.exit(main())
