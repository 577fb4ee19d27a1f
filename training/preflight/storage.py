"""The check of a store's place against the size of the model: a hint, before a run.

A state of gigabytes fits on any disk. A larger one is saved and restored by many nodes at once,
for which a local disk is neither fast enough nor reachable. The sizes are those of the recommended
save intervals: below 1 B parameters a local disk will do, up to 10 B a parallel file system, above
that an object store (OBS). A better place than the recommended one is never a complaint.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

from perdure.storage.address import StorageSpec
from perdure.training.config.job import is_temporary
from perdure.training.config.recovery import EPOCH_BELOW_PARAMETERS, STEPS_500_UP_TO_PARAMETERS
from perdure.training.wire.node import Check, CheckOutcome

NAME = "storage_place"
MOUNTS = Path("/proc/self/mounts")
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
# Names of file systems as the kernel lists them, without `fuse.`.
_SHARED = frozenset(
    {
        *("lustre", "gpfs", "beegfs", "beegfs_nodev", "panfs", "wekafs", "orangefs", "pvfs2"),
        *("nfs", "nfs4", "cifs", "smb3", "ceph", "gfs2", "ocfs2", "afs"),
        *("dpc", "juicefs", "glusterfs", "cephfs", "s3fs", "obsfs", "moosefs", "cubefs"),
    }
)


class StoragePlace(IntEnum):
    """The places of a store, the least first."""

    TEMPORARY = 0
    LOCAL_DISK = 1
    PARALLEL_FILE_SYSTEM = 2
    OBJECT_STORE = 3

    @property
    def text(self) -> str:
        """The name for people."""
        return self.name.lower().replace("_", " ")


def place_of(spec: StorageSpec, mounts: str) -> StoragePlace:
    """Find the place of a store.

    Args:
        spec: its folder need not exist yet.
        mounts: text of /proc/self/mounts.
    """
    if spec.folder is None:
        return StoragePlace.OBJECT_STORE
    if is_temporary(spec.folder):
        return StoragePlace.TEMPORARY
    kind = _file_system(spec.folder, mounts)
    if kind in _IN_MEMORY:
        return StoragePlace.TEMPORARY
    return StoragePlace.PARALLEL_FILE_SYSTEM if kind in _SHARED else StoragePlace.LOCAL_DISK


def _file_system(folder: Path, mounts: str) -> str:
    """Return the kind of the file system of a folder: the deepest mount above it has it."""
    above = [(path, kind) for path, kind in _mounted(mounts) if folder.is_relative_to(path)]
    # A later mount hides an earlier mount at the same path, and max() takes the first it meets.
    _, kind = max(reversed(above), key=lambda mount: len(mount[0].parts), default=("", ""))
    return kind.removeprefix("fuse.")


def _mounted(mounts: str) -> Iterator[tuple[Path, str]]:
    for line in mounts.splitlines():
        parts = line.split(" ")
        if len(parts) > 2:
            # The kernel writes a blank in a path as \040, and other characters so.
            yield Path(parts[1].encode().decode("unicode_escape")), parts[2]


def recommended_place(num_parameters: int) -> StoragePlace:
    """Return the least place for the checkpoints of a model of this many parameters."""
    if num_parameters < EPOCH_BELOW_PARAMETERS:
        return StoragePlace.LOCAL_DISK
    if num_parameters <= STEPS_500_UP_TO_PARAMETERS:
        return StoragePlace.PARALLEL_FILE_SYSTEM
    return StoragePlace.OBJECT_STORE


def check_place(place: StoragePlace, num_parameters: int | None) -> Check:
    """Compare the place of a store with the size of the model.

    Args:
        place: the store's.
        num_parameters: None: not known.
    """
    if place is StoragePlace.TEMPORARY:
        fact = "temporary: checkpoints and ledger are gone after a reboot"
        return Check(name=NAME, outcome=CheckOutcome.WARNING, seen=fact)
    if num_parameters is None:
        size = f"{place.text}; the size of the model is not known"
        return Check(name=NAME, outcome=CheckOutcome.SKIPPED, seen=size)
    least = recommended_place(num_parameters)
    return Check(
        name=NAME,
        outcome=CheckOutcome.OK if place >= least else CheckOutcome.WARNING,
        seen=f"{place.text} for {num_parameters / 1e9:,.3g} B parameters",
        allowed=least.text if place >= least else f"{least.text} recommended for this size",
    )
