"""`perdure checkpoints`: what a run has saved, whether it is whole, and what may go.

Exit codes as of every command: 0 fine, 1 a checkpoint is damaged or the store failed, 2 the
input is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from perdure.checkpoint_views import (
    reading_bar,
    removal_object,
    removals_table,
    row_object,
    rows_of,
    rows_view,
)
from perdure.runs import make_console, named_run
from storage.checkpoint import (
    CheckpointStore,
    SetAside,
    StepObjects,
    StepState,
    read_manifest,
    set_aside_reason,
)
from storage.collect import abort_uploads, carry_out, totals
from storage.errors import StorageError
from storage.export import (
    WHOLE_NAME,
    OutputFile,
    bytes_to_read,
    other_exports,
    plan_files,
    weights_of,
)
from storage.export import export as write_export
from storage.leases import reading
from storage.manifest import Manifest
from storage.verification import Verified, record
from storage.verification import verify as read_all
from training.errors import InputError, PerdureError
from training.files import home_folder
from training.supervisor.checkpoints import node_tiers, removals

MODEL_PREFIX = "model/"  # training.runtime.state.checkpointer puts it before the model's names
FILE_SUFFIX = ".safetensors"
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
MAX_LISTED = 10
EXIT_DAMAGED = 1

app = typer.Typer(help="The checkpoints of a run.", no_args_is_help=True)

RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="run_id of a run that is known on this machine, or a job file",
        show_default=False,
    ),
]
StepNumber = Annotated[int | None, typer.Option("--step", help="default: the newest")]
Output = Annotated[
    Path,
    typer.Option(
        "--output", "-o", metavar="DIR|FILE", help="a name that ends with .safetensors is FILE"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="for scripts")]


class Dtype(StrEnum):
    """Types that weights can be converted to."""

    BF16 = "bf16"
    F32 = "f32"


@app.command("ls")
def show_list(run: RunName, *, as_json: AsJson = False) -> None:
    """List them, newest first: age, size, who saved it, state, last verification."""
    checkpoints = _checkpoints_of(run)
    rows = rows_of(checkpoints, tiers=node_tiers(home_folder(), checkpoints.run_id))
    if as_json:
        typer.echo(json.dumps([row_object(row) for row in rows], indent=1))
    elif rows:
        make_console().print(rows_view(rows, now_s=checkpoints.clock()))
    else:
        typer.echo(f"{checkpoints.run_id}: no checkpoints")


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
    for one in _all_committed(checkpoints) if every else [_pick(checkpoints, step)]:
        outcome = _verify_one(checkpoints, one)
        outcomes.append(outcome)
        if set_aside and not outcome.is_intact:
            reason = SetAside(outcome.step, outcome.damages).reason
            checkpoints.set_aside(outcome.step, reason)
        if not as_json:
            _tell_outcome(outcome, was_set_aside=set_aside)
    if as_json:
        typer.echo(json.dumps([_outcome_object(o, set_aside) for o in outcomes], indent=1))
    if not all(outcome.is_intact for outcome in outcomes):
        raise typer.Exit(EXIT_DAMAGED)


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
        others = other_exports(folder, files) if file_name == WHOLE_NAME else []
        if others and not force:
            raise InputError("--output", f"{others[0]} is of another export; --force removes it")
        written = _write(checkpoints, manifest, files, folder, force=force)
    for path in others:
        path.unlink()
    told = {
        "step": manifest.step,
        "files": [str(path) for path in written],
        "num_tensors": len(weights),
        "size_bytes": sum(file.layout.size_bytes for file in files),
    }
    if as_json:
        typer.echo(json.dumps(told, indent=1))
        return
    typer.echo("\n".join(map(str, written)))
    typer.echo("step {step}: {num_tensors} tensors, {size_bytes} bytes".format_map(told))


@app.command()
def gc(
    run: RunName,
    *,
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="what is younger stays: 90m, 24h, 7d")
    ] = "24h",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would go")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete what broken saves left; never a committed checkpoint."""
    older_than_s = parse_age_s(older_than)
    job, store = named_run(run)
    checkpoints = CheckpointStore(store, job.run_id)
    decided = removals(job, checkpoints, garbage_after_s=older_than_s, with_retention=False)
    gone = decided if dry_run else carry_out(checkpoints, decided)
    uploads = 0 if dry_run else abort_uploads(checkpoints, older_than_s)
    if as_json:
        told = {
            "dry_run": dry_run,
            "removed": [removal_object(removal) for removal in gone],
            "size_bytes": sum(removal.size_bytes for removal in gone),
            "uploads_aborted": uploads,
        }
        typer.echo(json.dumps(told, indent=1))
        return
    if gone:
        make_console().print(removals_table(gone))
    typer.echo(f"{'would remove' if dry_run else 'removed'}: {totals(gone)}")
    if uploads:
        typer.echo(f"unfinished uploads aborted: {uploads}")


def parse_age_s(text: str) -> float:
    """Seconds of an age as a person writes it: a number with s, m, h or d.

    Raises:
        InputError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if match is None:
        raise InputError("--older-than", f"{text!r}: write a number with s, m, h or d, as 24h")
    return float(match[1]) * UNITS_S[match[2]]


def _checkpoints_of(run: str) -> CheckpointStore:
    job, store = named_run(run)
    return CheckpointStore(store, job.run_id)


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
    found = next((s for s in checkpoints.list_steps() if s.step == step), None)
    if found is not None and found.state is StepState.COMMITTED:
        return found
    if found is not None and found.state is StepState.SET_ASIDE:
        reason = set_aside_reason(checkpoints, found)
        raise InputError("--step", f"{step} was set aside: {reason}")
    newest = [str(s.step) for s in _all_committed(checkpoints)[:MAX_LISTED]]
    raise InputError("--step", f"{step} is not committed; committed: {', '.join(newest)}")


def _verify_one(checkpoints: CheckpointStore, step: StepObjects) -> Verified:
    with reading(checkpoints, step.step):
        manifest = read_manifest(checkpoints, step)
        total = manifest.size_bytes if manifest is not None else 0
        with reading_bar(f"step {step.step}", total) as on_bytes:
            outcome = read_all(checkpoints, step.step, manifest, on_bytes=on_bytes)
    try:
        record(checkpoints, outcome)
    except StorageError as error:  # the outcome holds also where nothing may be written
        typer.echo(f"perdure: the outcome is not kept: {error}", err=True)
    return outcome


def _tell_outcome(outcome: Verified, *, was_set_aside: bool) -> None:
    if outcome.is_intact:
        typer.echo(f"step {outcome.step}: intact, {outcome.size_bytes} bytes read")
        return
    typer.echo(f"step {outcome.step}: damaged{', set aside' if was_set_aside else ''}")
    for damage in outcome.damages:
        typer.echo(f"  {damage.file} {damage.kind}: {damage.detail}")


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
    with _told_in_one_line(folder), reading_bar(f"step {manifest.step}", total) as on_bytes:
        return write_export(
            checkpoints, manifest, files, folder=folder, force=force, on_bytes=on_bytes
        )


@contextmanager
def _told_in_one_line(folder: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError as error:
        raise InputError("--output", f"{error}; --force replaces it") from error
    except OSError as error:
        raise PerdureError(f"{error.filename or folder}: {error.strerror}") from error
