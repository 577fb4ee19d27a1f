"""Checkpoints that a command of a run could not load, and the answer to that.

A program that has trained before, and dies before its first step on the way back, dies of what lies
between: the checkpoint. Only damaged data shows that, or a path inside a checkpoint; a layout that
does not fit the program is the user's. Pure.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from perdure.training.diagnosis.ending import fault_of_command
from perdure.training.diagnosis.exceptions import TRACEBACK
from perdure.training.recovery.faults import Fault, FaultClass, RecoverableBy

# Classes that an exception gets by its type alone.
_BY_TYPE = frozenset(
    {
        FaultClass.CHECKPOINT_CORRUPT,
        FaultClass.DATALOADER_ERROR,
        FaultClass.LAUNCH_MISCONFIGURED,
        FaultClass.UNKNOWN,
        FaultClass.USER_CODE_ERROR,
    }
)
_PATH = re.compile(r"[^\s'\"<>|:;,()\[\]=]*/[^\s'\"<>|:;,()\[\]]+")
_DATA = re.compile(r"\.(?:bin|ckpt|distcp|json|npy|npz|pkl|pt|pth|safetensors)$")
_STEP_FOLDER = re.compile(
    r"/(?:checkpoint[-_]\d+|iter_\d{7,}|global_step\d+|step[-_=]?\d+|ckpt[-_]\d+"
    r"|epoch[-_=]?\d+[^/]*)(?=/|$|\.)|/ckpt\.pt$|\.ckpt(?=/|$)"
)
_FRAME = re.compile(r'\bFile "[^"]*", line \d+, in (\w+)')
_LOADS = re.compile(r"load|resume|restore|checkpoint|ckpt|state_dict", re.IGNORECASE)
_DAMAGE = re.compile(
    # Launchers put a rank before each line.
    r"^(?:\[[^\]\n]{1,24}\]:? ?)*(?:[\w.]+\.)?"
    r"(?:EOFError|UnpicklingError|BadZipFile|BadGzipFile|JSONDecodeError|UnicodeDecodeError"
    r"|SafetensorError|LZMAError|error)\b",
    re.MULTILINE,
)
_MAX_TEXT_CHARS = 8_000
_POINTER_ACTION = (
    "Let the program look for its newest whole checkpoint, or correct the name of it that it "
    "keeps, for example in a file `latest`."
)


@dataclass(frozen=True, slots=True)
class Resumed:
    """The state of a command's run when an attempt ended.

    Attributes:
        has_trained: whether an earlier attempt completed a step.
        has_stepped: whether this attempt did.
        path: the checkpoint that Perdure gave it; None: none, or it is not known.
        step: step of that checkpoint.
        other_steps: steps with another checkpoint on record.
        set_aside: paths of checkpoints before they were renamed.
    """

    has_trained: bool
    has_stepped: bool
    path: str | None = None
    step: int | None = None
    other_steps: Collection[int] = ()
    set_aside: Collection[str] = ()

    @property
    def step_before(self) -> int | None:
        """Step of the newest checkpoint before that one; 0: the command starts anew."""
        if self.step is None:
            return None
        earlier = [step for step in self.other_steps if step < self.step]
        return max(earlier) if earlier else None if self.other_steps else 0


def judge_loading(fault: Fault, outputs: Collection[str], resumed: Resumed) -> Fault:
    """Judge whether a command died of a checkpoint, and which answer helps.

    Args:
        fault: by its output.
        outputs: the ends of the output of the processes that failed.
        resumed: state of the run.
    """
    if resumed.has_stepped or fault.fault_class not in _BY_TYPE:
        return fault_of_command(fault)
    texts = [part for text in (*outputs, fault.evidence) for part in _tracebacks(text)]
    paths = [path for text in texts for path in find_checkpoint_paths(text, resumed.path)]
    is_damage = resumed.has_trained and any(map(_shows_damage, texts))
    is_corrupt = fault.fault_class is FaultClass.CHECKPOINT_CORRUPT
    if not (is_corrupt or is_damage or (paths and resumed.has_trained)):
        return fault
    fault = _as_corrupt(fault, paths[0] if paths else None)
    # The run may have written the chosen checkpoint again, under a name that was set aside once.
    aside = [old for old in resumed.set_aside if old != resumed.path]
    moved = [old for old in aside if any(_is_at(path, path, old) for path in paths)]
    if moved:
        return _blame_pointer(fault, moved[0], resumed)
    earlier_step = resumed.step_before
    is_chosen = resumed.path in paths or not (paths or any(map(_names_data, texts)))
    if resumed.path is None or earlier_step is None or not is_chosen:
        return fault_of_command(fault)
    goes_on = f"from step {earlier_step}" if earlier_step else "anew"
    why = (
        f"The checkpoint {resumed.path} of step {resumed.step} could not be loaded. It is set "
        f"aside and kept, and the next start goes on {goes_on}."
    )
    return replace(
        fault,
        explanation=f"{why} {fault.explanation}".strip(),
        recoverable_by=RecoverableBy.RETRY,
        user_fault=False,
    )


def _blame_pointer(fault: Fault, path: str, resumed: Resumed) -> Fault:
    """Blame the name that a program keeps of a checkpoint which was set aside."""
    whole = f" The newest whole one is {resumed.path}." if resumed.path is not None else ""
    why = f"{path} was set aside because it is not whole, and the program still asks for it.{whole}"
    return replace(
        fault.of_class(FaultClass.CHECKPOINT_CORRUPT),
        explanation=f"{why} {_POINTER_ACTION}",
        action=_POINTER_ACTION,
        recoverable_by=RecoverableBy.USER_FIX,
        user_fault=True,
    )


def find_checkpoint_paths(text: str, chosen: str | None) -> list[str]:
    """Find the checkpoints that a text names, by the paths of their files.

    Args:
        text: the end of a program's output.
        chosen: path of the checkpoint that it was given.
    """
    checkpoints: list[str] = []
    for path in _read_paths(text):
        inside = _STEP_FOLDER.search(f"/{path}")
        whole = path[: inside.end() - 1] if inside is not None else path
        if path[len(whole) :][:1] not in ("", "/"):
            whole = path  # the number is followed by the rest of a file's name
        if chosen is not None and _is_at(path, whole, chosen):
            checkpoints.append(chosen)
        elif inside is not None:
            checkpoints.append(whole)
    return list(dict.fromkeys(checkpoints))


def _is_at(path: str, whole: str, chosen: str) -> bool:
    """Whether a path, maybe a relative one, is that of a checkpoint or of a file in it."""
    return path.startswith(f"{chosen}/") or f"/{chosen}".endswith(f"/{whole.removeprefix('./')}")


def _read_paths(text: str) -> list[str]:
    paths = (match[0].rstrip(".") for match in _PATH.finditer(text))
    return [path for path in paths if not path.endswith((".py", "/"))]


def _names_data(text: str) -> bool:
    """Whether a text names a file with data: the program may not have read the checkpoint."""
    return any(map(_DATA.search, _read_paths(text)))


def _as_corrupt(fault: Fault, path: str | None) -> Fault:
    """Give a fault the class of a damaged checkpoint, with the path that its output names."""
    if fault.fault_class is not FaultClass.CHECKPOINT_CORRUPT:
        fault = fault.of_class(FaultClass.CHECKPOINT_CORRUPT)
    if path is None or path in fault.explanation:
        return fault
    return replace(fault, explanation=f"The checkpoint is {path}. {fault.explanation}".strip())


def _tracebacks(text: str) -> list[str]:
    """Split an output into its tracebacks, or return its end; the last may be a launcher's."""
    begins = [match.start() for match in re.finditer(TRACEBACK, text)]
    parts = [
        text[begin:end][:_MAX_TEXT_CHARS] for begin, end in itertools.pairwise([*begins, len(text)])
    ]
    return parts or [text[-_MAX_TEXT_CHARS // 4 :]]


def _shows_damage(text: str) -> bool:
    """Whether an exception about damaged data came out of a function that loads."""
    return bool(_DAMAGE.search(text)) and any(map(_LOADS.search, _FRAME.findall(text)))
