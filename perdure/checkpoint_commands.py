"""`perdure checkpoints`: what a run has saved, whether it is intact, and what may be deleted.

Times are seconds since the epoch, ages seconds, sizes bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from perdure.console import EXIT_FAILED, AsJson, RunName, make_console, make_table, print_json, warn
from perdure.runs import named_job, store_of
from perdure.storage.checkpoint import (
    CheckpointStore,
    SetAside,
    StepObjects,
    StepState,
    Tier,
    read_manifest,
    set_aside_reason,
)
from perdure.storage.collect import Removal, abort_uploads, carry_out, totals
from perdure.storage.errors import StorageError
from perdure.storage.export import (
    WHOLE_NAME,
    OutputFile,
    bytes_to_read,
    other_exports,
    plan_files,
    weights_of,
)
from perdure.storage.export import export as write_export
from perdure.storage.manifest import Manifest
from perdure.storage.retention import reading
from perdure.storage.verification import Verified, last_outcome, record
from perdure.storage.verification import verify as read_all
from perdure.training.config.job import Job
from perdure.training.errors import InputError, PerdureError
from perdure.training.files import home_folder
from perdure.training.journal.ledger import Ledger
from perdure.training.reporting.ettr import duration_text
from perdure.training.reporting.markdown import clock_text
from perdure.training.supervisor.checkpoints import node_tiers, program_saves, removals

MODEL_PREFIX = "model/"  # before the model's names, see perdure.training.runtime.state
FILE_SUFFIX = ".safetensors"
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
MAX_LISTED = 10
STATE_NAMES = {
    StepState.COMMITTED: "committed",
    StepState.SET_ASIDE: "set_aside",
    StepState.UNCOMMITTED: "incomplete",
}

app = typer.Typer(help="The checkpoints of a run.", no_args_is_help=True)

StepNumber = Annotated[int | None, typer.Option("--step", help="default: the newest")]
Output = Annotated[
    Path,
    typer.Option(
        "--output", "-o", metavar="DIR|FILE", help="a name that ends with .safetensors is FILE"
    ),
]


class Dtype(StrEnum):
    """Types that weights can be converted to."""

    BF16 = "bf16"
    F32 = "f32"


@app.command("ls")
def show_list(run: RunName, *, as_json: AsJson = False) -> None:
    """List them, newest first: age, size, who saved it, state, last verification."""
    job = named_job(run)
    if job.worker.checkpoints is not None:
        _list_program_saves(job, as_json=as_json)
        return
    checkpoints = _checkpoints_of(run)
    on_nodes = node_tiers(home_folder(), checkpoints.run_id)
    rows = [_row(checkpoints, step, on_nodes) for step in reversed(checkpoints.list_steps())]
    if as_json:
        print_json(rows)
    elif rows:
        console = make_console()
        console.print(_rows_table(rows, checkpoints.clock()))
        for row in rows:
            if row["reason"]:  # in the table it would tear the columns apart
                console.print(f"step {row['step']} was set aside: {row['reason']}")
    else:
        print(f"{checkpoints.run_id}: no checkpoints")


def _list_program_saves(job: Job, *, as_json: bool) -> None:
    """What a command has saved itself, newest first."""
    store = store_of(job)
    history = Ledger(store, job.run_id).read()
    saves = program_saves(history)[::-1]
    if as_json:
        print_json([asdict(save_record) for save_record in saves])
        return
    table = make_table("step", "written (UTC)", "size", "by attempt", "path")
    for save in saves:
        deleted_mark = "" if save.is_kept is not False else " (gone)"
        written = clock_text(save.written_at_s)
        table.add_row(
            str(save.step),
            written,
            decimal(save.size_bytes),
            save.attempt,
            save.path + deleted_mark,
        )
    if saves:
        make_console().print(table)
    else:
        print(f"{job.run_id}: no checkpoints")
    for view in history.attempts:
        for aside in view.resume.set_aside if view.resume is not None else ():
            print(f"{aside.path} was set aside: {aside.why}")


@app.command()
def verify(
    run: RunName,
    *,
    step: StepNumber = None,
    every: Annotated[bool, typer.Option("--all", help="every committed step")] = False,
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="no longer offer damaged ones for a restore")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read and hash every shard; exit code 1 when something is damaged."""
    if every and step is not None:
        raise InputError("--all", "excludes --step")
    checkpoints = _checkpoints_of(run)
    outcomes: list[Verified] = []
    for committed in _all_committed(checkpoints) if every else [_pick(checkpoints, step)]:
        outcome = _verify_one(checkpoints, committed)
        outcomes.append(outcome)
        if set_aside and not outcome.is_intact:
            reason = SetAside(outcome.step, outcome.damages).reason
            checkpoints.set_aside(outcome.step, reason)
        if not as_json:
            _print_outcome(outcome, was_set_aside=set_aside)
    if as_json:
        print_json([_outcome_object(o, set_aside) for o in outcomes])
    if not all(outcome.is_intact for outcome in outcomes):
        raise typer.Exit(EXIT_FAILED)


@app.command()
def export(
    run: RunName,
    *,
    output: Output,
    step: StepNumber = None,
    shard_size_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="several files of at most this size and an index, in DIR"),
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="of floating-point weights; default: as saved")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace files that are there")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the model's weights as safetensors files that other programs load."""
    folder, file_name = _target_of(output, shard_size_bytes)
    checkpoints = _checkpoints_of(run)
    picked = _pick(checkpoints, step).step
    with reading(checkpoints, picked):
        manifest = checkpoints.manifest(picked)
        weights = weights_of(manifest, prefix=MODEL_PREFIX, dtype=dtype.upper() if dtype else None)
        files = plan_files(weights, file_name=file_name, shard_size_bytes=shard_size_bytes)
        other_files = other_exports(folder, files) if file_name == WHOLE_NAME else []
        if other_files and not force:
            raise InputError(
                "--output", f"{other_files[0]} is of another export; --force removes it"
            )
        written = _write(checkpoints, manifest, files, folder, force=force)
    # A loader would take them for part of the new export; gone only once that is whole on disk.
    for path in other_files:
        path.unlink()
    result = {
        "step": manifest.step,
        "files": [str(path) for path in written],
        "num_tensors": len(weights),
        "size_bytes": sum(file.layout.size_bytes for file in files),
    }
    if as_json:
        print_json(result)
        return
    print("\n".join(map(str, written)))
    print("step {step}: {num_tensors} tensors, {size_bytes} bytes".format_map(result))


@app.command()
def gc(
    run: RunName,
    *,
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="younger objects stay: 90m, 24h, 7d")
    ] = "24h",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="only print what would be deleted")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete what broken saves left; never a committed checkpoint."""
    older_than_s = parse_age_s(older_than)
    job = named_job(run)
    checkpoints = CheckpointStore(store_of(job), job.run_id)
    # The policy is left to the run and its deployment: gc deletes no committed checkpoint.
    decided = removals(job, checkpoints, garbage_after_s=older_than_s, with_retention=False)
    removed = decided if dry_run else carry_out(checkpoints, decided)
    uploads = 0 if dry_run else abort_uploads(checkpoints, older_than_s)
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "removed": [_removal_object(removal) for removal in removed],
                "size_bytes": sum(removal.size_bytes for removal in removed),
                "uploads_aborted": uploads,
            }
        )
        return
    if removed:
        make_console().print(_removals_table(removed))
    print(f"{'would remove' if dry_run else 'removed'}: {totals(removed)}")
    if uploads:
        print(f"unfinished uploads aborted: {uploads}")


def parse_age_s(text: str) -> float:
    """Seconds of an age on the command line: a number with s, m, h or d.

    Raises:
        InputError: it is not such an age.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if match is None:
        raise InputError("--older-than", f"{text!r}: write a number with s, m, h or d, as 24h")
    return float(match[1]) * UNITS_S[match[2]]


def _checkpoints_of(run: str) -> CheckpointStore:
    job = named_job(run)
    return CheckpointStore(store_of(job), job.run_id)


def _all_committed(checkpoints: CheckpointStore) -> list[StepObjects]:
    """Newest first.

    Raises:
        InputError: there is none.
    """
    committed = [s for s in checkpoints.list_steps() if s.state is StepState.COMMITTED]
    if not committed:
        raise InputError("RUN", f"{checkpoints.run_id!r} has no committed checkpoint")
    return committed[::-1]


def _pick(checkpoints: CheckpointStore, step: int | None) -> StepObjects:
    """The committed checkpoint of that step, the newest for None.

    Raises:
        InputError: there is none, or it was set aside.
    """
    if step is None:
        return _all_committed(checkpoints)[0]
    picked = next((s for s in checkpoints.list_steps() if s.step == step), None)
    if picked is not None and picked.state is StepState.COMMITTED:
        return picked
    if picked is not None and picked.state is StepState.SET_ASIDE:
        reason = set_aside_reason(checkpoints, picked)
        raise InputError("--step", f"{step} was set aside: {reason}")
    newest = [str(s.step) for s in _all_committed(checkpoints)[:MAX_LISTED]]
    raise InputError("--step", f"{step} is not committed; committed: {', '.join(newest)}")


def _verify_one(checkpoints: CheckpointStore, step: StepObjects) -> Verified:
    # The retention of a living run would else delete the shards under the reader.
    with reading(checkpoints, step.step):
        manifest = read_manifest(checkpoints, step)
        total = manifest.size_bytes if manifest is not None else 0
        with _progress_bar(f"step {step.step}", total) as on_bytes:
            outcome = read_all(checkpoints, step.step, manifest, on_bytes=on_bytes)
    try:
        record(checkpoints, outcome)
    except StorageError as error:  # the outcome holds also where nothing may be written
        warn(f"the outcome is not kept: {error}")
    return outcome


def _print_outcome(outcome: Verified, *, was_set_aside: bool) -> None:
    if outcome.is_intact:
        print(f"step {outcome.step}: intact, {outcome.size_bytes} bytes read")
        return
    print(f"step {outcome.step}: damaged{', set aside' if was_set_aside else ''}")
    for damage in outcome.damages:
        print(f"  {damage.file} {damage.kind}: {damage.detail}")


def _outcome_object(outcome: Verified, set_aside: bool) -> dict[str, object]:  # noqa: FBT001
    damages = [
        {"file": damage.file, "kind": damage.kind, "detail": damage.detail}
        for damage in outcome.damages
    ]
    return {
        "step": outcome.step,
        "intact": outcome.is_intact,
        "verified_at_s": outcome.verified_at_s,
        "size_bytes": outcome.size_bytes,
        "damages": damages,
        "set_aside": set_aside and not outcome.is_intact,
    }


def _target_of(output: Path, shard_size_bytes: int | None) -> tuple[Path, str]:
    """(folder, name of a single file)."""
    if output.suffix == FILE_SUFFIX and not output.is_dir():
        if shard_size_bytes is not None:
            raise InputError("--shard-size-bytes", f"several files go into a folder, not {output}")
        return output.parent, output.name
    if output.exists() and not output.is_dir():
        raise InputError("--output", f"{output} is neither a folder nor named *{FILE_SUFFIX}")
    return output, WHOLE_NAME


def _write(
    checkpoints: CheckpointStore,
    manifest: Manifest,
    files: list[OutputFile],
    folder: Path,
    *,
    force: bool,
) -> list[Path]:
    total = bytes_to_read(manifest, files)
    with _one_line_errors(folder), _progress_bar(f"step {manifest.step}", total) as on_bytes:
        return write_export(
            checkpoints, manifest, files, folder=folder, force=force, on_bytes=on_bytes
        )


@contextmanager
def _one_line_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError as error:
        raise InputError("--output", f"{error}; --force replaces it") from error
    except OSError as error:
        raise PerdureError(f"{error.filename or folder}: {error.strerror}") from error


def _row(
    checkpoints: CheckpointStore, step: StepObjects, tiers: Mapping[int, Sequence[Tier]]
) -> dict[str, Any]:
    """One checkpoint, as `--json` prints it; what only a manifest knows is None without one.

    Its time is that of the manifest, else of its newest object; its size that of all objects.
    """
    manifest = read_manifest(checkpoints, step)
    written_at_s = manifest.written_at_s if manifest is not None else step.modified_s
    verified = last_outcome(checkpoints, step, manifest)
    loss = manifest.loss if manifest is not None else None
    return {
        "step": step.step,
        "written_at_s": written_at_s,
        # The clock of the node that saved it may be ahead of this machine's.
        "age_s": round(max(0.0, checkpoints.clock() - written_at_s), 3),
        "size_bytes": step.size_bytes,
        # JSON knows no NaN.
        "loss": loss if loss is not None and math.isfinite(loss) else None,
        "world_size": manifest.world_size if manifest is not None else None,
        "placement": manifest.placement if manifest is not None else None,
        "attempt": manifest.attempt if manifest is not None else None,
        "state": STATE_NAMES[step.state],
        "reason": set_aside_reason(checkpoints, step),
        "verified": {
            "verified_at_s": verified.verified_at_s,
            "intact": verified.is_intact,
            "damages": len(verified.damages),
        }
        if verified is not None
        else None,
        "tiers": list(step.tiers(tiers)),
    }


def _rows_table(rows: Sequence[dict[str, Any]], now_s: float) -> Table:
    numbers = ("step", "age", "size", "loss", "ranks", "attempt")
    table = make_table(*numbers, "state", "verified", "tiers", right=numbers)
    for row in rows:
        is_committed = row["state"] == STATE_NAMES[StepState.COMMITTED]
        table.add_row(
            str(row["step"]),
            duration_text(row["age_s"]),
            decimal(row["size_bytes"]),
            "" if row["loss"] is None else f"{row['loss']:.4g}",
            str(row["world_size"] or ""),
            "" if row["placement"] is None else f"{row['placement']}.{row['attempt']}",
            Text(row["state"].replace("_", " "), style="" if is_committed else "yellow"),
            _verified_text(row["verified"], now_s),
            ", ".join(row["tiers"]),
        )
    return table


def _verified_text(verified: dict[str, Any] | None, now_s: float) -> Text:
    if verified is None:
        return Text("never", style="dim")
    age = duration_text(max(0.0, now_s - verified["verified_at_s"]))
    if verified["intact"]:
        return Text(f"intact, {age} ago", style="green")
    number = verified["damages"]
    return Text(f"{number} damage{'s' if number > 1 else ''}, {age} ago", style="red")


def _removals_table(removals: Sequence[Removal]) -> Table:
    numbers = ("step", "objects", "size")
    table = make_table("what", *numbers, "why", right=numbers)
    for removal in removals:
        table.add_row(
            removal.kind.replace("_", " "),
            "" if removal.step is None else str(removal.step),
            str(len(removal.objects)),
            decimal(removal.size_bytes),
            removal.reason,
        )
    return table


def _removal_object(removal: Removal) -> dict[str, Any]:
    return {
        "kind": removal.kind,
        "step": removal.step,
        "keys": [info.key for info in removal.objects],
        "size_bytes": removal.size_bytes,
        "reason": removal.reason,
    }


@contextmanager
def _progress_bar(description: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, on stderr so that stdout stays for a script; elsewhere nothing."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(description, total=total_bytes)
        yield lambda count: progress.advance(task, count)
