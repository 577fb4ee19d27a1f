"""A hang as a fault: its limit and field, the advice, and where its rank was in the program. Pure.

Stacks are those of py-spy, whose paths begin behind the import path, or of faulthandler.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from perdure.training.diagnosis.ending import shows_steps
from perdure.training.diagnosis.evidence import Evidence, SilentRank
from perdure.training.diagnosis.plain_fault import build_plain_fault
from perdure.training.liveness.culprit import STOPPED, find_standstill
from perdure.training.liveness.hang_limits import OUTPUT_FIELD
from perdure.training.recovery.faults import IDLE_START, SLOW_START, TRAITS, Fault, FaultClass
from perdure.training.wire.rank_snapshot import RankSnapshot

_THREAD = re.compile(r"^\s*(?:Thread |Current thread )")
_PY_SPY_FRAME = re.compile(
    r"^\s+(?P<function>[\w.<>]+) \((?P<path>[^():\n]+\.pyx?):(?P<line>\d+)\)"
)
_FAULTHANDLER_FRAME = re.compile(
    r'^\s+File "(?P<path>[^"\n]+)", line (?P<line>\d+) in (?P<function>\S+)'
)
_LIBRARIES = frozenset(
    {"accelerate", "datasets", "deepspeed", "lightning", "numpy", "pandas", "perdure",
     "pytorch_lightning", "torch", "torch_npu", "torchdata", "torchrun", "tqdm", "transformers"}
)  # fmt: skip
# What such a function calls differs from moment to moment: its name is the place.
_WORK_BESIDE_STEPS = re.compile(
    r"eval|valid|predict|generate|infer|save|checkpoint|export|upload", re.IGNORECASE
)
_UNINTERRUPTIBLE = "D"  # the kernel's letter: storage or a device, not the program


def blame_silence(evidence: Evidence) -> Iterator[Fault]:
    """Blame ranks that were silent beyond their limit, or the one that they wait for."""
    code = late_start(evidence.silent, evidence.rank_progress)
    is_by_output = any(silent.field == OUTPUT_FIELD for silent in evidence.silent)
    if is_by_output and any(shows_steps(end.log) for end in evidence.workers):
        code = None
    standstill = find_standstill(evidence.rank_progress) if evidence.silent else None
    if standstill is not None and standstill.missing:
        first, silent = standstill.missing[0], evidence.silent[0]
        why = f"The processes live but make no progress. {'; '.join(standstill.ranks)}."
        use = f": {silent.why}" if silent.is_slow_start and silent.why else ""
        line = f"{standstill.line}; {silent.limit}{use}" if silent.field else standstill.line
        fault = build_plain_fault(
            FaultClass.HANG, evidence, line, node=first.node, rank=first.rank, code=code, why=why
        )
        only = first if len(standstill.missing) == 1 else None
        fault = replace(fault, action=advise(silent, only, is_start=code is not None))
        # The step of a whole command may be known while that of this rank is not.
        step = first.step if first.step >= 0 else evidence.step
        yield replace(fault, device=first.device, step=step)
        return
    # A rank whose process a signal has stopped holds the others up.
    for rank in sorted(evidence.silent, key=lambda rank: not rank.stopped):
        why = "The processes live but none of their heartbeats advances."
        if rank.rank is None:
            why = "The program shows no sign of life."
        if standstill is not None:
            why = f"The processes live but make no progress. {standstill.line}."
        fault = build_plain_fault(
            FaultClass.HANG, evidence, rank.line, node=rank.node, rank=rank.rank, code=code, why=why
        )
        action = advise(rank, None, is_start=code is not None)
        yield replace(fault, action=action)


def late_start(silent: Sequence[SilentRank], ranks: Iterable[RankSnapshot]) -> str | None:
    """Return the code of a start without a step, which may only need more time; else None."""
    if any(rank.has_stepped for rank in ranks) or not all(rank.is_slow_start for rank in silent):
        return None
    is_idle = all(rank.is_busy is False for rank in silent)
    return IDLE_START if is_idle else SLOW_START


def advise(silent: SilentRank, missing: RankSnapshot | None, *, is_start: bool) -> str:
    """Say what the user should do about a hang.

    Args:
        silent: the rank that was silent beyond its limit.
        missing: the only rank that the others wait for, if it is known.
        is_start: whether no step of this start is known.
    """
    if silent.stopped or not silent.field or (missing and missing.process_state in STOPPED):
        return TRAITS[FaultClass.HANG].action
    longer = f"raise {silent.field}, {silent.limit_s:.0f} s were too few"
    alone = ""
    if missing is not None and not missing.is_waiting:
        where = f"If rank {missing.rank} evaluates, saves or loads there while the others wait, "
        put = "put that inside `with session.evaluation():` on every rank: the others wait there. "
        beat = "write Phase.EVALUATE into the heartbeats of all ranks before it. "
        alone = where + (put if missing.counts_collectives else beat)
    if is_start:
        return (
            f"{alone}If its start needs that long (skipping data, compiling, an index, a "
            f"download), {longer}; the next starts have more, up to four times the field's value."
        )
    return f"{alone}If it needs longer, {longer}; else compare the stacks of the ranks."


def locate(fault: Fault, stacks: Iterable[tuple[int | None, str]], evidence: Evidence) -> Fault:
    """Add to the fault of a hang where in the program its rank was.

    Args:
        fault: as diagnosed.
        stacks: rank and text of each process, the main process of a rank first.
        evidence: of the same end.
    """
    if fault.fault_class is not FaultClass.HANG:
        return fault
    texts = [text for rank, text in stacks if fault.rank in (None, rank)]
    chains = [chain for text in texts if (chain := list(_program_frames(text)))]
    if not chains or (fault.rank is None and len(chains) > 1):
        return fault
    shown = " > ".join(f"{function} ({file}:{line})" for function, file, line in chains[0])
    explained = replace(fault, explanation=f"{fault.explanation} It was in {shown}.".strip())
    if not _may_be_the_program(fault, evidence):
        return explained
    return replace(explained, frame=" > ".join(_place(chains[0])))


def _may_be_the_program(fault: Fault, evidence: Evidence) -> bool:
    """Whether the rank stood still in its own code; a start that computes may only be slow."""
    states = {rank.rank: rank for rank in evidence.rank_progress}
    rank = states.pop(fault.rank, None) if fault.rank is not None else None
    if fault.code == SLOW_START and not any(other.is_waiting for other in states.values()):
        return False
    if any(silent.stopped for silent in evidence.silent):
        return False
    outside = (*STOPPED, _UNINTERRUPTIBLE)
    return rank is None or not (rank.is_waiting or rank.process_state in outside)


def _place(chain: Sequence[tuple[str, str, int]]) -> Iterator[str]:
    for function, file, _ in chain:
        yield f"{function} ({file})"
        if _WORK_BESIDE_STEPS.search(function):
            return


def _program_frames(text: str) -> Iterator[tuple[str, str, int]]:
    """List function, file and line of the program's frames in the main thread, outermost first."""
    frames = [match for line in _main_thread(text) if (match := _frame(line))]
    for match in reversed(frames):
        path = match["path"]
        if not _is_library(path):
            yield match["function"], path.rpartition("/")[2], int(match["line"])


def _frame(line: str) -> re.Match[str] | None:
    return _PY_SPY_FRAME.match(line) or _FAULTHANDLER_FRAME.match(line)


def _main_thread(text: str) -> list[str]:
    lines = text.splitlines()
    heads = [index for index, line in enumerate(lines) if _THREAD.match(line)]
    if not heads:
        return []
    # faulthandler prints the main thread last; py-spy names it if there are others.
    is_named = [index for index in heads if '"MainThread"' in lines[index]]
    is_dump = "most recent call first" in lines[heads[0]]
    head = is_named[0] if is_named else heads[-1 if is_dump else 0]
    end = next((index for index in heads if index > head), len(lines))
    return lines[head + 1 : end]


def _is_library(path: str) -> bool:
    parts = path.split("/")
    if "site-packages" in parts or "dist-packages" in parts or path.startswith("<"):
        return True
    if re.search(r"/lib/python3\.\d+/", path):
        return True
    top = parts[0].removesuffix(".py").removesuffix(".pyx")
    if top in _LIBRARIES:
        return True
    return not path.startswith("/") and top in sys.stdlib_module_names
