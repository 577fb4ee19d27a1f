"""The checks of a MindSpore program that a command names: its end, and its evaluations.

Only the text of Python files that the command or its shell scripts name is read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from perdure.training.commands.arguments import MAX_SCRIPT_BYTES, read_script
from perdure.training.config.job import Job

_PYTHON_FILE = re.compile(r"[\w./-]+\.py(?=$|[\s\"';&|])")
_COMMUNICATION = ("mindspore.communication", "mindspore.communication.management")
_EVALUATIONS = frozenset({"eval", "fit"})
_VALIDATION = frozenset({"valid_dataset", "eval_dataset"})


@dataclass(frozen=True, slots=True)
class Program:
    """What the text of a program shows.

    Attributes:
        name: for messages.
        inits: whether it joins a cluster of MindSpore.
        releases: whether it leaves the cluster.
        evaluates: whether it evaluates while it trains.
    """

    name: str
    inits: bool
    releases: bool
    evaluates: bool

    @classmethod
    def parse(cls, name: str, text: str) -> Program | None:
        """Read a program; None: it is no Python, or does not use MindSpore."""
        try:
            nodes = list(ast.walk(ast.parse(text)))
        except (SyntaxError, ValueError):
            return None
        modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        modules |= {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
        if not any((module or "").split(".")[0] == "mindspore" for module in modules):
            return None
        names = {_name_of(node) for node in nodes}
        imported = {
            alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module in _COMMUNICATION
            for alias in node.names
        }
        calls = {_name_of(node.func) for node in nodes if isinstance(node, ast.Call)}
        keywords = {node.arg for node in nodes if isinstance(node, ast.keyword)}
        uses_module = "communication" in names
        return cls(
            name,
            inits="init" in calls and ("init" in imported or uses_module),
            releases="release" in names,
            evaluates=bool(calls & _EVALUATIONS or keywords & _VALIDATION),
        )


def _name_of(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def mindspore_notes(job: Job, cwd: Path) -> list[str]:
    """Warn of programs whose success looks like a failure, or whose evaluation like a hang."""
    return [
        note
        for program in _programs(job.worker.command or (), cwd)
        for note in _notes(job, program)
    ]


def _notes(job: Job, program: Program) -> Iterator[str]:
    if program.inits and not program.releases and job.worker.is_launcher:
        yield (
            f"{program.name} calls init() and never mindspore.communication.release(): its "
            "scheduler waits for 30 s after the end, and msrun exits with 1; call release() behind "
            "the last step, or give steps and worker.checkpoints, so that the end is judged by them"
        )
    if program.evaluates and job.worker.progress is not None:
        limit = job.restart.hang_timeout_s
        shown = f"{limit:g} s" if limit is not None else "60 s or 10 steps"
        yield (
            f"{program.name} evaluates while it trains, and no step is printed meanwhile: what is "
            f"longer than {shown} counts as a hang; set restart.hang_timeout_s beyond it"
        )


def _programs(command: Sequence[str], cwd: Path) -> Iterator[Program]:
    """Read the programs that a command names, also in its shell scripts."""
    scripts = (read_script(part, cwd) for part in command)
    texts = [*command, *(text for text in scripts if text is not None)]
    for name in dict.fromkeys(n for text in texts for n in _PYTHON_FILE.findall(text)):
        try:
            text = (cwd / name).read_bytes()[:MAX_SCRIPT_BYTES].decode("utf-8", "replace")
        except OSError:
            continue  # it is elsewhere, or in no folder of this machine
        program = Program.parse(name, text)
        if program is not None:
            yield program
