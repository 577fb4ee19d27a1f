"""What is compared with what, and how far ours may be from the best.

Every section has one figure of ours, one or more baselines of which the fastest counts, and
peers. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.storage import ours, peers, raw
from benchmarks.storage.measuring import Contender

MEBIBYTE = 2**20
OURS = "perdure"


@dataclass(frozen=True, slots=True)
class Section:
    """One table.

    Attributes:
        limit: most that ours may take, in times of the fastest baseline.
        extra_limit_states: most memory beside the state that ours may need, in states, and 256
            MiB; None: no target.
    """

    title: str
    ours: Contender
    baselines: Mapping[str, Contender]
    peers: Mapping[str, Contender]
    limit: float
    extra_limit_states: int | None = None

    @property
    def contenders(self) -> Mapping[str, Contender]:
        """By name, ours first."""
        return {OURS: self.ours, **self.baselines, **self.peers}


_THREAD, _PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
_PEERS: Mapping[str, peers.PeerOf] = {
    "torch.save, upload_file": peers.torch_file,
    "safetensors, upload_file": peers.safetensors_file,
    "DCP, s3fs": peers.dcp_s3fs,
    "DCP, s3torchconnector": peers.dcp_s3torchconnector,
}
_RAW = {"2 x 64 MiB": (64, 2), "4 x 64 MiB": (64, 4), "4 x 16 MiB": (16, 4)}

SECTIONS: Mapping[str, Section] = {
    "blocking": Section(
        "time that a save holds training up",
        ours.blocking,
        {
            "copies by memmove": raw.copy_in(by_torch=False),
            "copies by torch": raw.copy_in(by_torch=True),
        },
        {
            "torch.save to disk": peers.save_to_disk,
            "async_save": peers.async_save(_THREAD, cached=False),
            "async_save, cached": peers.async_save(_THREAD, cached=True),
            "async_save, process": peers.async_save(_PROCESS, cached=False),
            "async_save, process, cached": peers.async_save(_PROCESS, cached=True),
        },
        limit=1.3,
    ),
    "hash": Section(
        "hash of a shard: what manifests hold, and what else they could",
        raw.hashing(lambda: xxhash.xxh3_128().update),
        {
            "crc32": raw.hashing(lambda: zlib.crc32),
            "blake2b": raw.hashing(lambda: hashlib.blake2b().update),
            "sha256": raw.hashing(lambda: hashlib.sha256().update),
        },
        {},
        limit=1.0,
    ),
    "save": Section(
        "save to the store, from handing over to committed",
        ours.publishing,
        {
            f"boto3 parts, {name}": raw.put(part_size_bytes=size * MEBIBYTE, num_threads=threads)
            for name, (size, threads) in _RAW.items()
        },
        {name: peers.saving(peer) for name, peer in _PEERS.items()},
        limit=1 / 0.85,
        extra_limit_states=1,
    ),
    "memory": Section(
        "restore from the node's memory",
        ours.from_memory,
        {
            "copies by memmove": raw.copy_out(by_torch=False),
            "copies by torch": raw.copy_out(by_torch=True),
        },
        {},
        limit=1.5,
    ),
    "restore": Section(
        "restore from the store, verified",
        ours.from_store,
        {
            f"boto3 ranges, {name}": raw.get(part_size_bytes=size * MEBIBYTE, num_threads=threads)
            for name, (size, threads) in _RAW.items()
        },
        {
            "boto3 ranges, hashed": raw.get(
                part_size_bytes=64 * MEBIBYTE, num_threads=4, is_hashed=True
            ),
            **{name: peers.loading(peer) for name, peer in _PEERS.items()},
        },
        limit=1 / 0.85,
    ),
}
