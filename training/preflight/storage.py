"""Whether the place of a store suits the size of the model: a hint, before a run.

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
from perdure.training.config.recommendations import is_temporary
from perdure.training.config.recovery import EPOCH_BELOW_PARAMETERS, STEPS_500_UP_TO_PARAMETERS
from perdure.training.wire.node import Check, CheckOutcome

NAME = "storage_place"
MOUNTS = Path("/proc/self/mounts")
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
# Names of file systems as the kernel lists them; of FUSE what follows `fuse.`.
_SHARED = frozenset(
    {
        *("lustre", "gpfs", "beegfs", "beegfs_nodev", "panfs", "wekafs", "orangefs", "pvfs2"),
        *("nfs", "nfs4", "cifs", "smb3", "ceph", "gfs2", "ocfs2", "afs"),
        *("dpc", "juicefs", "glusterfs", "cephfs", "s3fs", "obsfs", "moosefs", "cubefs"),
    }
)


class StoragePlace(IntEnum):
    """What a store is on, the least first."""

    TEMPORARY = 0
    LOCAL_DISK = 1
    PARALLEL_FILE_SYSTEM = 2
    OBJECT_STORE = 3

    @property
    def text(self) -> str:
        """The same for people."""
        return self.name.lower().replace("_", " ")


def place_of(spec: StorageSpec, mounts: str) -> StoragePlace:
    """What a store is on.

    Args:
        spec: of the store; its folder need not exist yet.
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
    """Kind of the file system that a folder is on: that of the deepest mount above it."""
    above = [(point, kind) for point, kind in _mounted(mounts) if folder.is_relative_to(point)]
    # Of two mounts at one point the later one hides the other, and max() takes the first it meets.
    _, kind = max(reversed(above), key=lambda one: len(one[0].parts), default=("", ""))
    return kind.removeprefix("fuse.")


def _mounted(mounts: str) -> Iterator[tuple[Path, str]]:
    for line in mounts.splitlines():
        parts = line.split(" ")
        if len(parts) > 2:
            # The kernel writes a blank in a path as \040, and others likewise.
            yield Path(parts[1].encode().decode("unicode_escape")), parts[2]


def recommended_place(num_parameters: int) -> StoragePlace:
    """The least place for the checkpoints of a model of this many parameters."""
    if num_parameters < EPOCH_BELOW_PARAMETERS:
        return StoragePlace.LOCAL_DISK
    if num_parameters <= STEPS_500_UP_TO_PARAMETERS:
        return StoragePlace.PARALLEL_FILE_SYSTEM
    return StoragePlace.OBJECT_STORE


def check_place(place: StoragePlace, num_parameters: int | None) -> Check:
    """Compare the place of a store with the size of the model.

    Args:
        place: of the store.
        num_parameters: of the model; None: not known.
    """
    if place is StoragePlace.TEMPORARY:
        seen = "temporary: checkpoints and ledger are gone after a reboot"
        return Check(name=NAME, outcome=CheckOutcome.WARNING, seen=seen)
    if num_parameters is None:
        seen = f"{place.text}; the size of the model is not known"
        return Check(name=NAME, outcome=CheckOutcome.SKIPPED, seen=seen)
    least = recommended_place(num_parameters)
    return Check(
        name=NAME,
        outcome=CheckOutcome.OK if place >= least else CheckOutcome.WARNING,
        seen=f"{place.text} for {num_parameters / 1e9:,.3g} B parameters",
        allowed=least.text if place >= least else f"{least.text} recommended for this size",
    )
