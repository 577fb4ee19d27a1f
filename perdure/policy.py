"""`perdure policy export`: the restart policy of a job as another platform's own settings."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from perdure.console import AsJson, JobFile, Overrides, print_json, warn
from perdure.training.config.job import load_job
from perdure.training.errors import InputError
from perdure.training.platforms.forms import Platform
from perdure.training.platforms.printing import EntryPlace, Printed
from perdure.training.platforms.settings import shown
from perdure.training.supervisor.policy_export import export_policy

app = typer.Typer(help="The restart policy of a job, for other platforms.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Have `export` as a command of its own while it is the only one."""


@app.command()
def export(
    job_file: JobFile,
    overrides: Overrides = None,
    *,
    platform: Annotated[
        str, typer.Option(metavar="NAME", help=", ".join(Platform), show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """Print a job's restart policy as the annotations, labels and variables of a platform.

    What the platform cannot hold is a warning on stderr. Put under restart.from_platform, the
    entries are read back.
    """
    if platform not in list(Platform):
        raise InputError("--platform", f"{platform!r} must be one of {', '.join(Platform)}")
    printed = export_policy(load_job(job_file, overrides or ()), Platform(platform))
    if as_json:
        print_json(_document(platform, printed))
        return
    for line in printed.warnings:
        warn(line)
    if not printed.entries:
        warn(f"{platform} needs no entry for this policy: what it leaves out is off there")
        return
    print("\n\n".join(_section(place, entries) for place, entries in printed.by_place().items()))


def _document(platform: str, printed: Printed) -> dict[str, Any]:
    return {
        "platform": platform,
        "entries": dict(printed.entries),
        "by_place": {str(place): entries for place, entries in printed.by_place().items()},
        "warnings": list(printed.warnings),
        "without_entry": {name: shown(value) for name, value in printed.without_entry.items()},
    }


def _section(place: EntryPlace, entries: dict[str, str]) -> str:
    form = {EntryPlace.SHELL: 'export {}="{}"', EntryPlace.CONFIG: "{}: {}"}.get(place, '{}: "{}"')
    return "\n".join([f"# {place}", *(form.format(name, text) for name, text in entries.items())])
