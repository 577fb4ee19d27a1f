"""A node's part of the Megatron checkpoints that all nodes save together, each on its own disk.

Without common storage each node has the files of its own ranks, and only the node of rank 0 has the
sign that a checkpoint is complete, written when all ranks are done. A part is useful only with the
other parts of the same save; a record beside the parts says whose they are, and which attempt
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
from perdure.storage.regular_file import NotRegularError, read_regular
from perdure.training.commands.checkpoint_layouts import (
    TRACKER,
    ProgramCheckpoint,
    Tracker,
    find_parts,
    part_path,
)
from perdure.training.commands.checkpoint_store import (
    MemberCheckpoints,
    Save,
    is_self_contained,
    save_prefix,
)
from perdure.training.files import write_whole
from perdure.training.wire.agent import StartOrder

RECORD = ".perdure-parts.json"
CLAIM = ".perdure-member-{member}.json"
Attempt = tuple[int, int]
_log = logging.getLogger("perdure.agent")


class Part(FrozenModel):
    """A part that was there when an attempt began.

    Attributes:
        saved_in: the attempt that saved it; None: it was never complete.
        is_brought: whether it came from the store, maybe with files of other parts.
    """

    step: int
    saved_in: Attempt | None
    size_bytes: int
    written_s: float
    is_brought: bool = False


class Claim(FrozenModel):
    """A member's claim to a folder for an attempt, written before it changes anything there."""

    run_id: str
    member: int
    attempt: Attempt


class PartsRecord(FrozenModel):
    """Whose parts are in a folder, written before each attempt.

    Attributes:
        member: member of the run whose node this was.
        attempt: attempt that is about to start, and saves everything that changes from then on.
        before: parts that were there.
        first_tracker: text of the program's sign before the run's first attempt here.
        coming: step that is being fetched: no attempt has saved what has changed there.
    """

    run_id: str
    member: int
    attempt: Attempt
    before: tuple[Part, ...]
    first_tracker: str | None
    coming: int | None = None

    def part_of(self, saved: ProgramCheckpoint) -> Part:
        """Describe a part that is there now."""
        part = _as_part(saved, self.attempt)
        for earlier in self.before:
            origin = {"saved_in": earlier.saved_in, "is_brought": earlier.is_brought}
            if earlier == part.model_copy(update=origin):
                return earlier
        return part if saved.step != self.coming else _as_part(saved, None)


def read_record(root: Path) -> PartsRecord | None:
    """Read the record of a folder; None where there is none that can be read.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        return PartsRecord.model_validate_json(read_regular(root / RECORD))
    except (FileNotFoundError, NotADirectoryError, NotRegularError):
        return None
    except ValidationError:
        _log.warning(f"{root / RECORD} is not a record: the parts beside it may be of any run")
        return None


def parts_of(record: PartsRecord | None, root: Path, run_id: str, member: int) -> dict[int, Part]:
    """List a member's parts in a folder by step, with the attempts that saved them.

    Member 0 has the program's sign, and only its complete parts count. Other members list all
    parts of an attempt: member 0's parts show which of them are complete.
    """
    if record is None or (record.run_id, record.member) != (run_id, member):
        return {}
    signed = Tracker(root).step
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
    """Fetch this node's part from which the command resumes, and let the program's sign name it.

    Megatron takes the largest iteration that any rank's sign names: the sign of a node with a
    newer part than the others is set back.

    Raises:
        StorageError: the store does not answer, or lacks it, or has it damaged.
        OSError: it cannot be written.
        ValueError: another member has the same folder.
    """
    attempt = (order.placement, order.attempt)
    _claim(root, Claim(run_id=run_id, member=member, attempt=attempt))
    record = _record_of(root, run_id)
    first_tracker = record.first_tracker if record is not None else Tracker(root).text
    parts = _delete_later_copies(parts_of(record, root, run_id, member), root, order.resume_step)
    unknown = {saved.step: _as_part(saved, None) for saved in find_parts(root)}
    wanted = _resume_save(order)
    missing = wanted if wanted is not None and not _has_part(root, parts, wanted) else None
    updated = PartsRecord(
        run_id=run_id, member=member, attempt=attempt, first_tracker=first_tracker,
        before=tuple((unknown | parts).values()),
        coming=missing.step if missing is not None else None,
    )  # fmt: skip
    # Written before anything is fetched: if the agent ends meanwhile, no attempt has saved it.
    write_whole(root / RECORD, updated.model_dump_json())
    if missing is not None:
        checkpoints = MemberCheckpoints(store, run_id, member)
        checkpoints.fetch_part(missing, part_path(root, missing.step))
        fetched = _fetched_part(store, run_id, root, missing)
        remaining = (part for part in updated.before if part.step != missing.step)
        updated = updated.model_copy(update={"before": (*remaining, fetched), "coming": None})
        write_whole(root / RECORD, updated.model_dump_json())
    if wanted is not None:
        _set_sign(root, wanted.step, first_tracker)
    elif record is not None:
        _set_sign(root, None, first_tracker)


def _resume_save(order: StartOrder) -> Save | None:
    """Return the save from which all members resume."""
    if order.resume_step is None or order.resume_attempt is None:
        return None
    return Save(order.resume_step, order.resume_attempt)


def _has_part(root: Path, parts: dict[int, Part], wanted: Save) -> bool:
    part = parts.get(wanted.step)
    is_same = part is not None and part.saved_in == wanted.attempt
    return is_same and can_be_read_alone(part_path(root, wanted.step))


def _claim(root: Path, claim: Claim) -> None:
    """Claim a folder for one member: of two that come at once, at least one sees the other."""
    root.mkdir(parents=True, exist_ok=True)
    write_whole(root / CLAIM.format(member=claim.member), claim.model_dump_json())
    for path in root.glob(CLAIM.format(member="*")):
        try:
            other = Claim.model_validate_json(read_regular(path))
        except (FileNotFoundError, NotRegularError, ValidationError):
            continue
        is_same = (other.run_id, other.attempt) == (claim.run_id, claim.attempt)
        if is_same and other.member != claim.member:
            first, second = sorted((other.member, claim.member))
            raise ValueError(
                f"worker.checkpoints.path={root} is the same folder for members {first} and "
                f"{second}; with upload each node needs its own, as ${{PERDURE_NODE}} gives it"
            )


def _delete_later_copies(parts: dict[int, Part], root: Path, step: int | None) -> dict[int, Part]:
    """Delete fetched parts of later steps: files of other parts would mix with those saved anew."""
    deleted = {part.step for part in parts.values() if part.is_brought and part.step > (step or 0)}
    for later in deleted:
        shutil.rmtree(part_path(root, later))
    return {step: part for step, part in parts.items() if step not in deleted}


def _record_of(root: Path, run_id: str) -> PartsRecord | None:
    record = read_record(root)
    return record if record is not None and record.run_id == run_id else None


def _set_sign(root: Path, step: int | None, first_tracker: str | None) -> None:
    """Let the sign name a step, as on all other nodes, or else restore its first text."""
    text = str(step) if step is not None else first_tracker
    previous = Tracker(root).text
    if previous == text:
        return
    Tracker(root).write(text)
    if previous is None:
        return
    if step is not None:
        change = f"names step {step} now, {previous} before: all nodes resume from step {step}"
    elif text is not None:
        change = f"says {text} now, {previous} before: all nodes start over"
    else:
        change = f"is deleted, it named step {previous}: all nodes start over"
    _log.info(f"{TRACKER} in {root} {change}")


def _as_part(saved: ProgramCheckpoint, saved_in: Attempt | None) -> Part:
    size, written_s = saved.size_bytes, saved.written_s
    return Part(step=saved.step, saved_in=saved_in, size_bytes=size, written_s=written_s)


def _fetched_part(store: ObjectStore, run_id: str, root: Path, save: Save) -> Part:
    parts = [part for part in find_parts(root) if part.step == save.step]
    if not parts:
        where = store.url(save_prefix(run_id, save).rpartition("/")[0])
        raise NotFound(
            f"run {run_id}: step {save.step} of the command has no files in any member's part "
            f"below {where}, nothing is fetched to {part_path(root, save.step)}"
        )
    return _as_part(parts[0], save.attempt).model_copy(update={"is_brought": True})
