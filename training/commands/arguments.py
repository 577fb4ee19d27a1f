"""The arguments of a command, with variables filled in.

`$NAME` and `${NAME}` become the value of a variable, `$$` becomes `$`. A name that nothing sets is
an error: a launcher would take the literal text for a number or an address. Only a script that is
given to a shell keeps it, because the shell may set it itself.
"""

from __future__ import annotations

import difflib
import re
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

_SHELLS = frozenset({"sh", "bash", "dash", "ash", "ksh", "zsh"})
MAX_SCRIPT_BYTES = 1 << 20
_WITH_VALUE = frozenset({"-o", "+o", "-O", "+O"})
# Names in other launchers' scripts; a command itself must not take itself for a rank.
WORLD_SIZE = "WORLD_SIZE"
NNODES = "NNODES"
NODE_RANK = "NODE_RANK"


# Variables that an agent sets, or that an argument alone may name; the job and the node add theirs.
NAMES_IN_ARGUMENTS = frozenset(
    {
        *("MASTER_ADDR", "MASTER_PORT", NNODES, NODE_RANK, WORLD_SIZE),
        *("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR"),
        "PET_MASTER_PORT",
        *("MA_CURRENT_IP", "MA_NUM_GPUS", "MA_NUM_HOSTS", "MA_TASK_NAME", "MA_HOME", "MA_JOB_DIR"),
        *("MA_MOUNT_PATH", "MA_LOG_DIR", "MA_SCHEDULE_CNT", "MA_PROC_START_CNT"),
        "MA_FAILOVER_TERMINATION_GRACE_PERIOD_SECONDS",
        *("VC_TASK_INDEX", "VC_WORKER_NUM", "VC_WORKER_HOSTS"),
        *("PERDURE_RUN_ID", "PERDURE_NODE", "PERDURE_PLACEMENT", "PERDURE_ATTEMPT"),
        *("PERDURE_HEARTBEAT", "PERDURE_JOB", "PERDURE_DATA_FOLDER", "PERDURE_DATA_MANIFEST"),
        *("PERDURE_CHECKPOINT", "PERDURE_CHECKPOINT_STEP"),  # when it resumes from a checkpoint
        *("PERDURE_METRICS", "PERDURE_CONTAINER", "PERDURE_SECRETS"),
        *("ASCEND_PROCESS_LOG_PATH", "TORCHELASTIC_ERROR_FILE", "GLOO_SOCKET_IFNAME"),
    }
)


def fill_in(command: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Fill variables into a command.

    Raises:
        ValueError: it names a variable that is not set.
    """
    for name in find_unknown_names(command, variables):
        raise ValueError(explain_unknown_name(name, variables))
    return [string.Template(part).safe_substitute(variables) for part in command]


def find_unknown_names(command: Sequence[str], names: Collection[str]) -> Iterator[str]:
    """Find names in a command that nothing sets, except in scripts of a shell."""
    for index, part in enumerate(command):
        if index and _is_script(command[:index]):
            continue
        template = string.Template(part)
        yield from (name for name in template.get_identifiers() if name not in names)


def explain_unknown_name(name: str, names: Collection[str]) -> str:
    """Explain that a name is not set, with the name that may have been meant."""
    near = difflib.get_close_matches(name, sorted(names), n=1)
    hint = f"did you mean ${{{near[0]}}}? " if near else ""
    return f"${{{name}}} is set by nothing; {hint}$$ stands for a plain $"


_BRACED = re.compile(r"\$\{(\w+)\}")


def fill_in_variables(variables: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Fill into the variables of these names what an agent sets, such as ${MASTER_PORT}.

    Other text with a dollar stays: it may be meant for the program.
    """
    values = argument_variables(variables)

    def value_of(match: re.Match[str]) -> str:
        is_set = match[1] in NAMES_IN_ARGUMENTS and match[1] in values
        return values[match[1]] if is_set else match[0]

    filled = {name: _BRACED.sub(value_of, variables[name]) for name in names if name in variables}
    return {**variables, **filled}


def argument_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Add to a process's variables those that only its arguments may name."""
    ranks = int(variables["MA_NUM_HOSTS"]) * int(variables["MA_NUM_GPUS"])
    return {WORLD_SIZE: str(ranks), **variables}


def read_script(argument: str, cwd: Path) -> str | None:
    """Read the shell script that an argument of a command names; None: it names none."""
    if not argument.endswith(".sh") or "$" in argument:
        return None
    try:
        with (cwd / argument).open("rb") as file:
            return file.read(MAX_SCRIPT_BYTES).decode("utf-8", "replace")
    except OSError:
        return None


def _is_script(arguments: Sequence[str]) -> bool:
    """Whether a shell's `-c` script follows these arguments, or an argument of it."""
    shells = [index for index, part in enumerate(arguments) if Path(part).name in _SHELLS]
    options = iter(arguments[shells[0] + 1 :] if shells else ())
    for option in options:
        if not option.startswith(("-", "+")):
            return False  # a file, whose arguments follow
        if option.endswith("c") and not option.startswith("--"):
            return True
        if option in _WITH_VALUE:
            next(options, None)
    return False
