"""Names of runs, also from a template such as `nightly-{date}`, and the checkpoint they begin from.

A schedule starts the same job at each tick, and each tick needs a run of its own. Fields:

    {date}   2026-11-24, the day at which the tick was due, in the time zone of its schedule
    {time}   0200, hour and minute of the same
    {n}      1, 2, 3, ...: one more than the highest that is known with the other fields alike
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum

from pydantic import Field

from perdure.storage.frozen_model import SettingsModel

NAME = r"^[a-z0-9][a-z0-9-]{0,62}$"
TEMPLATE = r"^(?:[a-z0-9]|\{(?:date|time|n)\})(?:[a-z0-9-]|\{(?:date|time|n)\})*$"
NAME_RULE = "must be up to 63 lower-case letters, digits and hyphens, not beginning with a hyphen"
_FIELD = re.compile(r"\{(date|time|n)\}")
_VALUES = {"date": r"\d{4}-\d{2}-\d{2}", "time": r"\d{4}", "n": r"\d+"}


def is_template(run_id: str) -> bool:
    """Whether a run_id has a field that is filled when a flow run starts."""
    return _FIELD.search(run_id) is not None


def problem_of(name: str, pattern: str) -> str:
    """Explain why a name does not have the pattern, `NAME` or `TEMPLATE`."""
    if pattern == NAME and is_template(name):
        return f"{name!r} is a template, for deployments; name one run with --set run_id=..."
    fields = ", and of {date}, {time} and {n}" if pattern == TEMPLATE else ""
    return f"{json.dumps(name)[:120]}: {NAME_RULE}{fields}"


def is_of(template: str, name: str) -> bool:
    """Whether the template may become this name."""
    return _pattern(template).fullmatch(name) is not None


def name_of(template: str, *, due: datetime, run_names: Sequence[str], now_named: str) -> str:
    """Choose the run that a flow run is for.

    A flow run is given the name of its run. Started again, it has a name already, so whatever
    has become known since, it is the same.

    Args:
        template: run_id of the job; a template without fields is the name itself.
        due: scheduled start of the flow run, in the time zone of its schedule.
        run_names: names of the runs that there are.
        now_named: the name that the flow run has by now.
    """
    if is_of(template, now_named):
        return now_named
    dated = template.replace("{date}", f"{due:%Y-%m-%d}").replace("{time}", f"{due:%H%M}")
    matches = (_pattern(dated).fullmatch(name) for name in run_names)
    last = max((int(match["n"]) for match in matches if match and "{n}" in dated), default=0)
    return dated.replace("{n}", str(last + 1))


def _pattern(template: str) -> re.Pattern[str]:
    """Make the pattern of a template's names; a field that occurs again has the same value."""
    fields: set[str] = set()

    def value(match: re.Match[str]) -> str:
        field = match[1]
        if field in fields:
            return f"(?P={field})"
        fields.add(field)
        return f"(?P<{field}>{_VALUES[field]})"

    return re.compile(_FIELD.sub(value, template))


NAMED_STEPS = 5


class OptimizerStart(StrEnum):
    """Initial state of the optimizer."""

    KEEP = "keep"
    RESET = "reset"


class InitFromSpec(SettingsModel):
    """A checkpoint of another run in the same store; step, schedule and data start over."""

    run: str = Field(description="run_id of the other run, in the same store", pattern=NAME)
    step: int | None = Field(
        None, ge=1, description="committed step to load; default: the newest when this run starts"
    )
    optimizer: OptimizerStart = Field(
        OptimizerStart.KEEP,
        description="keep: continue with the saved moments, under this run's hyperparameters; "
        "reset: start from zero moments",
    )

    def check_run(self, run_id: str, *, is_command: bool) -> None:
        """Check that a run can begin from this checkpoint.

        Raises:
            ValueError: it cannot.
        """
        if is_command:
            raise ValueError("init_from is for sessions: a command loads its checkpoints itself")
        if self.run == run_id:
            raise ValueError(f"init_from.run={self.run} is this run, name another one")

    def missing(self, steps: Sequence[int]) -> tuple[str, str]:
        """Return the field at fault where there is no such checkpoint, and its fault.

        Args:
            steps: committed ones of the other run, ascending.
        """
        if not steps:
            return "init_from.run", f"{self.run!r}: the job's storage has no checkpoint of it"
        known_steps = ", ".join(str(step) for step in steps[-NAMED_STEPS:])
        text = f"{self.step}: run {self.run} has no such checkpoint; it has {known_steps}"
        return "init_from.step", text
