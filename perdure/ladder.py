"""`perdure ladder`: the recovery ladder, and what it comes to in one job."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from perdure.console import AsJson, Overrides, make_console, print_json
from perdure.training.config.job import load_job
from perdure.training.errors import InputError
from perdure.training.recovery.ladder import ladder_markdown
from perdure.training.recovery.ladder_rules import RULES
from perdure.training.recovery.outlook import Outlook, Terms, outlook, outlook_markdown, outlooks
from perdure.training.recovery.rungs import LADDER, RestartCount
from perdure.training.supervisor.job_ladder import fault_of_code, terms_of


def ladder(
    *,
    job_file: Annotated[
        Path | None,
        typer.Option("--job", metavar="FILE", help="job file: what its policy would do"),
    ] = None,
    overrides: Overrides = None,
    codes: Annotated[
        list[str] | None,
        typer.Option("--code", metavar="CODE", help="with --job: also what answers a chip's code"),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="not rendered")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the recovery ladder from the tables that drive it, or what it comes to in a job.

    With --job: what answers a fault of each class that comes again and again without progress.
    """
    if job_file is None:
        for option, given in (("--set", overrides), ("--code", codes)):
            if given:
                raise InputError(option, "needs --job, the job that is asked about")
        _print(_general(), ladder_markdown(), markdown=markdown, as_json=as_json)
        return
    job = load_job(job_file, overrides or ())
    terms = terms_of(job)
    found = [*outlooks(terms), *(outlook(fault_of_code(code), terms) for code in codes or ())]
    text = f"{_terms_text(job.run_id, terms)}\n\n{outlook_markdown(found)}"
    _print(_of_job(job.run_id, terms, found), text, markdown=markdown, as_json=as_json)


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
        "ladder": {str(one): list(rungs) for one, rungs in LADDER.items()},
        "rules": {name: asdict(rule) for name, rule in RULES.items()},
    }


def _of_job(run_id: str, terms: Terms, found: Sequence[Outlook]) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "policy": asdict(terms.policy),
        "nodes": terms.nodes,
        "spares": terms.spares,
        "answers_inside_processes": terms.inside is not None,
        "faults": [asdict(one) for one in found],
    }


def _terms_text(run_id: str, terms: Terms) -> str:
    policy = terms.policy
    ever = policy.count is RestartCount.EVER
    counted = "since the run was started" if ever else "in a row without a new checkpoint"
    inside = "" if terms.inside is not None else " A command has no recovery inside its processes."
    return (
        f"{run_id}: the same fault again and again, no checkpoint committed in between; "
        f"nodes: {terms.nodes}, spares: {terms.spares}, max_restarts={policy.max_restarts} "
        f"({counted}).{inside}"
    )
