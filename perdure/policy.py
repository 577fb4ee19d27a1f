"""The recovery policy: `perdure ladder` prints the rungs, `perdure policy` converts it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from perdure.console import AsJson, JobFile, Overrides, make_console, print_json, warn
from perdure.policy_import import import_policy
from perdure.training.config.engine import LaunchedEngineSpec
from perdure.training.config.job_file import load_job
from perdure.training.engines.launched.controllers import SHARES, shares_markdown
from perdure.training.errors import InputError
from perdure.training.platforms.forms import Platform
from perdure.training.platforms.printing import EntryPlace, ExportedPolicy
from perdure.training.platforms.settings import format_value
from perdure.training.recovery.ladder import ladder_markdown
from perdure.training.recovery.ladder_rules import RULES
from perdure.training.recovery.repeated_fault import (
    Outlook,
    Terms,
    outlook,
    outlook_markdown,
    outlooks,
)
from perdure.training.recovery.rungs import LADDER, RestartCount
from perdure.training.supervisor.job_ladder import fault_of_code, terms_of
from perdure.training.supervisor.policy_export import export_policy

app = typer.Typer(help="The restart policy of a job, for other platforms.", no_args_is_help=True)
app.command("import")(import_policy)


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

    A warning on stderr names each setting that the platform cannot hold. A job reads the entries
    back from its section restart.from_platform.
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
        warn(f"this policy needs no entry on {platform}: its mechanisms are off there by default")
        return
    print("\n\n".join(_section(place, entries) for place, entries in printed.by_place().items()))


def _document(platform: str, printed: ExportedPolicy) -> dict[str, Any]:
    return {
        "platform": platform,
        "entries": dict(printed.entries),
        "by_place": {str(place): entries for place, entries in printed.by_place().items()},
        "warnings": list(printed.warnings),
        "without_entry": {
            name: format_value(value) for name, value in printed.without_entry.items()
        },
    }


def _section(place: EntryPlace, entries: dict[str, str]) -> str:
    form = {EntryPlace.SHELL: 'export {}="{}"', EntryPlace.CONFIG: "{}: {}"}.get(place, '{}: "{}"')
    return "\n".join([f"# {place}", *(form.format(name, text) for name, text in entries.items())])


def ladder(
    *,
    job_file: Annotated[
        Path | None,
        typer.Option("--job", metavar="FILE", help="job file: show the effect of its policy"),
    ] = None,
    overrides: Overrides = None,
    codes: Annotated[
        list[str] | None,
        typer.Option(
            "--code",
            metavar="CODE",
            help="with --job: also show the answers to a chip's fault code",
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="print the source of the tables")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the recovery ladder from the tables that drive it, or its effect in a job.

    With --job, it prints the answers to a fault of each class that repeats without progress.
    """
    if job_file is None:
        for option, value in (("--set", overrides), ("--code", codes)):
            if value:
                raise InputError(option, "needs --job")
        _print(_general(), ladder_markdown(), markdown=markdown, as_json=as_json)
        return
    job = load_job(job_file, overrides or ())
    terms = terms_of(job)
    job_outlooks = [
        *outlooks(terms),
        *(outlook(fault_of_code(code), terms) for code in codes or ()),
    ]
    text = f"{_terms_text(job.run_id, terms)}\n\n{outlook_markdown(job_outlooks)}"
    document = _of_job(job.run_id, terms, job_outlooks)
    if isinstance(job.engine, LaunchedEngineSpec):
        text = f"{text}\n\n{shares_markdown()}"
        document["controllers"] = [asdict(share) for share in SHARES]
    _print(document, text, markdown=markdown, as_json=as_json)


def _print(document: dict[str, Any], text: str, *, markdown: bool, as_json: bool) -> None:
    if as_json:
        print_json(document)
    elif markdown or not sys.stdout.isatty():
        print(text)
    else:
        from rich.markdown import Markdown  # noqa: PLC0415 only for a terminal

        make_console().print(Markdown(text))


def _general() -> dict[str, Any]:
    return {
        "ladder": {str(fault_class): list(rungs) for fault_class, rungs in LADDER.items()},
        "rules": {name: asdict(rule) for name, rule in RULES.items()},
    }


def _of_job(run_id: str, terms: Terms, job_outlooks: Sequence[Outlook]) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "policy": terms.policy.model_dump(mode="json"),
        "nodes": terms.nodes,
        "spares": terms.spares,
        "answers_inside_processes": terms.inside is not None,
        "faults": [asdict(job_outlook) for job_outlook in job_outlooks],
    }


def _terms_text(run_id: str, terms: Terms) -> str:
    policy = terms.policy
    ever = policy.count is RestartCount.EVER
    counted = "since the run was started" if ever else "in a row without a new checkpoint"
    inside = "" if terms.inside is not None else " A command has no recovery inside its processes."
    return (
        f"{run_id}: the same fault repeats with no checkpoint committed in between; "
        f"nodes: {terms.nodes}, spares: {terms.spares}, max_restarts={policy.max_restarts} "
        f"({counted}).{inside}"
    )
