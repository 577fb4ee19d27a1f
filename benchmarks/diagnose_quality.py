"""How right the diagnosis is on labelled logs, without each of its mechanisms, and how sure.

    python -m benchmarks.diagnose_quality [--logs FOLDER]

The labelled logs are those of `data/diagnosis_samples.toml`; FOLDER holds others, with an
`index.jsonl` that has id, fault_class, key_line and recoverable_by of each `<id>.log`. A mechanism
that is switched off and costs nothing brings nothing. Prints one line per mechanism, then a
reliability table: how often diagnoses of each confidence are right.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from perdure.training.diagnosis import (
    cause,
    codes,
    exceptions,
    scan,
    series,
    silence,
    sources,
)
from perdure.training.diagnosis.cause import Diagnosis
from perdure.training.recovery.ladder import decide
from perdure.training.recovery.rungs import Policy, Rung

_SAMPLES = Path(__file__).with_name("data") / "diagnosis_samples.toml"
_CODES = codes.load_codes()


@dataclass(frozen=True, slots=True)
class Sample:
    """A log with its label: several values where it leaves them open, none where all is well."""

    path: Path
    classes: Sequence[str]
    answers: Sequence[str]
    keys: Sequence[str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the diagnosis of a sample has right."""

    has_class: bool
    has_key: bool
    has_answer: bool
    is_false_stop: bool
    confidence: float | None


def read_samples(folder: Path, logs: Path | None) -> list[Sample]:
    """Read the project's samples, which are written below `folder`, and those of `logs`."""
    samples = []
    for row in tomllib.loads(_SAMPLES.read_text("utf-8"))["sample"]:
        path = folder / f"{row['id']}.log"
        path.write_text(row["log"], "utf-8")
        samples.append(Sample(path, row["class"], row["recoverable_by"], row["key"]))
    if logs is not None:
        rows = map(json.loads, (logs / "index.jsonl").read_text("utf-8").splitlines())
        samples += [
            Sample(
                logs / f"{row['id']}.log",
                [row["fault_class"]],
                [row["recoverable_by"]],
                [row["key_line"]],
            )
            for row in rows
            if row.get("strict", True)
        ]
    return samples


def judge(sample: Sample) -> Outcome:
    """Diagnose a sample and compare the answer with its label."""
    case = sources.diagnose_files(str(sample.path), [sample.path], at_s=0.0, year=2026)
    if case.diagnosis is None:
        is_right = not sample.classes
        return Outcome(is_right, is_right, is_right, is_false_stop=False, confidence=None)
    fault = case.diagnosis.fault
    line = " ".join(fault.evidence.split())
    keys = [" ".join(key.split()) for key in sample.keys]
    return Outcome(
        fault.fault_class in sample.classes,
        any(key in line or (line and line in key) for key in keys),
        fault.recoverable_by in sample.answers,
        "user-fix" not in sample.answers and _stops(case.diagnosis),
        fault.confidence,
    )


def _stops(diagnosis: Diagnosis) -> bool:
    decision = decide(
        diagnosis.fault, now_s=0.0, history=(), supported=frozenset(Rung), policy=Policy()
    )
    return decision.rung is Rung.STOP


def _codes_alone() -> Mapping[str, Mapping[str, Sequence[codes.CodeSpec]]]:
    return {
        table: {code: [s for s in specs if s.beside is None] for code, specs in meanings.items()}
        for table, meanings in _CODES.items()
    }


def _no(*_arguments: object, **_options: object) -> None:
    return None


def _false(*_arguments: object) -> bool:
    return False


# What each mechanism is replaced by: module, name, and a stand-in that does nothing.
MECHANISMS: Mapping[str, Sequence[tuple[Any, str, Any]]] = {
    "a suspicious line where none names a failure": [(sources, "_name_suspect", _no)],
    "native stacks": [(sources, "find_native_stack", _no)],
    "texts that were logged as quoted strings": [(scan, "_unquote", lambda match: match[0])],
    "a stated failure voids a stated end": [
        (module, "states_failure", _false) for module in (series, silence)
    ],
    "the subsystem that raised an exception": [(exceptions, "find_raiser", _no)],
    "evidence before an exception of the user": [(cause, "follows_evidence", _false)],
    "what stands beside a code": [(codes, "load_codes", _codes_alone)],
    "families of codes rank last": [(cause, "FAMILY_RULE", "")],
}


@contextmanager
def without(mechanism: str) -> Iterator[None]:
    """Switch a mechanism off."""
    with ExitStack() as stack:
        for module, name, stand_in in MECHANISMS[mechanism]:
            stack.enter_context(patch.object(module, name, stand_in))
        yield


def summarize(outcomes: Sequence[Outcome]) -> str:
    """Summarize outcomes in one line."""
    count = len(outcomes)
    shares = [
        sum(getattr(outcome, name) for outcome in outcomes) / count
        for name in ("has_class", "has_key", "has_answer")
    ]
    stops = sum(outcome.is_false_stop for outcome in outcomes)
    return "class {:.3f}  key line {:.3f}  answer {:.3f}  ".format(*shares) + f"false stops {stops}"


def reliability(outcomes: Sequence[Outcome]) -> tuple[list[tuple[float, int, float]], float]:
    """Compute the share of right diagnoses for each confidence, and the mean error of them."""
    groups: dict[float, list[bool]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.confidence is not None:
            groups[round(outcome.confidence, 2)].append(outcome.has_class and outcome.has_key)
    rows = [(level, len(g), sum(g) / len(g)) for level, g in sorted(groups.items(), reverse=True)]
    total = sum(count for _, count, _ in rows)
    return rows, sum(count * abs(level - share) for level, count, share in rows) / max(1, total)


def main() -> int:
    """Print the quality, the ablation and the reliability."""
    parser = argparse.ArgumentParser(description="quality of the diagnosis on labelled logs")
    parser.add_argument("--logs", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        samples = read_samples(Path(name), arguments.logs)
        whole = [judge(sample) for sample in samples]
        print(f"{len(samples)} labelled logs")
        print(f"{'all mechanisms':46s} {summarize(whole)}")
        for mechanism in MECHANISMS:
            with without(mechanism):
                print(f"without {mechanism:46s} {summarize([judge(s) for s in samples])}")
    rows, error = reliability(whole)
    print("confidence  diagnoses  right")
    for level, count, share in rows:
        print(f"{level:10.2f} {count:10d} {share:6.2f}")
    print(f"mean error {error:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
