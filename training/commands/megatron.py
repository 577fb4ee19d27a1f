"""A node's own part of the Megatron checkpoints that all nodes save together, each on its own disk.

Without common storage each node has the files of its own ranks, and the sign that a checkpoint is
complete is on the node of rank 0 alone, written when all ranks are done. A part is useful only with
the other parts of the same save; a record beside the parts says whose they are, and which attempt
saved each. Steps are completed optimizer steps.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from pydantic import ValidationError

from perdure.storage.errors import NotFound
from perdure.storage.frozen_model import FrozenModel
from perdure.storage.objects import ObjectStore
from perdure.training.commands.checkpoint_layouts import (
    TRACKER,
    ProgramCheckpoint,
    find_parts,
    is_self_contained,
    part_path,
    set_tracker,
    tracked_step,
    tracker_text,
)
from perdure.training.commands.checkpoint_store import Save, fetch_part, save_prefix
from perdure.training.files import write_whole
from perdure.training.wire.agent import StartOrder

RECORD = ".perdure-parts.json"
CLAIM = ".perdure-member-{member}.json"
Attempt = tuple[int, int]
_log = logging.getLogger("perdure.agent")


class Part(FrozenModel):
    """A part that was there when an attempt began.

    Attributes:
        saved_in: the attempt that has saved it; None: it was never complete.
        is_brought: whether it came from the store, maybe with files of others.
    """

    step: int
    saved_in: Attempt | None
    size_bytes: int
    written_s: float
    is_brought: bool = False


class Claim(FrozenModel):
    """That a member has a folder for an attempt, written before it touches anything there."""

    run_id: str
    member: int
    attempt: Attempt


class PartsRecord(FrozenModel):
    """Whose parts are in a folder, written before each attempt.

    Attributes:
        member: of the run, whose node this was.
        attempt: that is about to start; what changes from then on, it has saved.
        before: what was there.
        first_tracker: what the program's sign said before the run's first attempt here.
        coming: a step that is being brought: what has changed there, no attempt has saved.
    """

    run_id: str
    member: int
    attempt: Attempt
    before: tuple[Part, ...]
    first_tracker: str | None
    coming: int | None = None

    def part_of(self, saved: ProgramCheckpoint) -> Part:
        """What is known of a part that is there now."""
        part = _as_part(saved, self.attempt)
        for earlier in self.before:
            origin = {"saved_in": earlier.saved_in, "is_brought": earlier.is_brought}
            if earlier == part.model_copy(update=origin):
                return earlier
        return part if saved.step != self.coming else _as_part(saved, None)


def read_record(root: Path) -> PartsRecord | None:
    """The record of a folder; None where there is none that can be read.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        return PartsRecord.model_validate_json((root / RECORD).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValidationError:
        _log.warning(f"{root / RECORD} is no record: whose the parts beside it are is not known")
        return None


def parts_of(record: PartsRecord | None, root: Path, run_id: str, member: int) -> dict[int, Part]:
    """A member's parts in a folder, by steps, with the attempts that have saved them.

    Of member 0 the complete ones: it has the program's sign. Of others all of an attempt: which
    of them are complete is known from member 0's.
    """
    if record is None or (record.run_id, record.member) != (run_id, member):
        return {}
    signed = tracked_step(root)
    parts = {}
    for saved in find_parts(root):
        part = record.part_of(saved)
        is_new = part.saved_in == record.attempt
        if member == 0 and is_new and (signed is None or saved.step > signed):
            part = _as_part(saved, None)
        parts[saved.step] = part
    return parts


def can_be_read_alone(path: Path) -> bool:
    """Whether a part is enough for the ranks of its node."""
    names = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    return is_self_contained(names, [entry.name for entry in path.iterdir() if entry.is_dir()])


def prepare_parts(
    store: ObjectStore, order: StartOrder, run_id: str, member: int, root: Path
) -> None:
    """Have this node's part from which the command goes on, and the program's sign name it.

    Megatron takes the largest iteration that any rank's sign names, so that a node with a newer
    part than the others is led back.

    Raises:
        StorageError: the store does not answer, or lacks it, or has it damaged.
        OSError: it cannot be written.
        ValueError: another member has the same folder.
    """
    attempt = (order.placement, order.attempt)
    _claim(root, Claim(run_id=run_id, member=member, attempt=attempt))
    record = _record_of(root, run_id)
    first_tracker = record.first_tracker if record is not None else tracker_text(root)
    parts = _without_later_copies(parts_of(record, root, run_id, member), root, order.resume_step)
    unknown = {saved.step: _as_part(saved, None) for saved in find_parts(root)}
    wanted = _wanted(order)
    lacks = wanted if wanted is not None and not _has(root, parts, wanted) else None
    updated = PartsRecord(
        run_id=run_id, member=member, attempt=attempt, first_tracker=first_tracker,
        before=tuple((unknown | parts).values()),
        coming=lacks.step if lacks is not None else None,
    )  # fmt: skip
    # Before anything is brought: an agent that ends meanwhile leaves it on record as nobody's.
    write_whole(root / RECORD, updated.model_dump_json())
    if lacks is not None:
        fetch_part(store, run_id, member, lacks, part_path(root, lacks.step))
        brought = _brought(store, run_id, root, lacks)
        remaining = (part for part in updated.before if part.step != lacks.step)
        updated = updated.model_copy(update={"before": (*remaining, brought), "coming": None})
        write_whole(root / RECORD, updated.model_dump_json())
    if wanted is not None:
        _lead(root, wanted.step, first_tracker)
    elif record is not None:
        _lead(root, None, first_tracker)


def _wanted(order: StartOrder) -> Save | None:
    """The save from which all members go on."""
    if order.resume_step is None or order.resume_attempt is None:
        return None
    return Save(order.resume_step, order.resume_attempt)


def _has(root: Path, parts: dict[int, Part], wanted: Save) -> bool:
    part = parts.get(wanted.step)
    is_same = part is not None and part.saved_in == wanted.attempt
    return is_same and can_be_read_alone(part_path(root, wanted.step))


def _claim(root: Path, claim: Claim) -> None:
    """Have a folder for one member alone: of two that come at once, one at least sees the other."""
    root.mkdir(parents=True, exist_ok=True)
    write_whole(root / CLAIM.format(member=claim.member), claim.model_dump_json())
    for path in root.glob(CLAIM.format(member="*")):
        try:
            other = Claim.model_validate_json(path.read_bytes())
        except (FileNotFoundError, ValidationError):
            continue
        is_same = (other.run_id, other.attempt) == (claim.run_id, claim.attempt)
        if is_same and other.member != claim.member:
            first, second = sorted((other.member, claim.member))
            raise ValueError(
                f"worker.checkpoints.path={root} is the same folder for members {first} and "
                f"{second}; with upload each node needs its own, as ${{PERDURE_NODE}} gives it"
            )


def _without_later_copies(parts: dict[int, Part], root: Path, step: int | None) -> dict[int, Part]:
    """Delete what was brought of later steps: saved anew, files of others would stay in between."""
    deleted = {part.step for part in parts.values() if part.is_brought and part.step > (step or 0)}
    for later in deleted:
        shutil.rmtree(part_path(root, later))
    return {step: part for step, part in parts.items() if step not in deleted}


def _record_of(root: Path, run_id: str) -> PartsRecord | None:
    record = read_record(root)
    return record if record is not None and record.run_id == run_id else None


def _lead(root: Path, step: int | None, first_tracker: str | None) -> None:
    """Have the sign name a step, as on all other nodes, or else say what it first did."""
    text = str(step) if step is not None else first_tracker
    previous = tracker_text(root)
    if previous == text:
        return
    set_tracker(root, text)
    if previous is None:
        return
    if step is not None:
        change = f"names step {step} now, {previous} before: all nodes go on from step {step}"
    elif text is not None:
        change = f"says {text} now, {previous} before: all nodes begin anew"
    else:
        change = f"is deleted, it named step {previous}: all nodes begin anew"
    _log.info(f"{TRACKER} in {root} {change}")


def _as_part(saved: ProgramCheckpoint, saved_in: Attempt | None) -> Part:
    size, written_s = saved.size_bytes, saved.written_s
    return Part(step=saved.step, saved_in=saved_in, size_bytes=size, written_s=written_s)


def _brought(store: ObjectStore, run_id: str, root: Path, save: Save) -> Part:
    parts = [part for part in find_parts(root) if part.step == save.step]
    if not parts:
        where = store.url(save_prefix(run_id, save).rpartition("/")[0])
        raise NotFound(
            f"run {run_id}: step {save.step} of the command has no files in any member's part "
            f"below {where}, nothing is brought to {part_path(root, save.step)}"
        )
    return _as_part(parts[0], save.attempt).model_copy(update={"is_brought": True})
