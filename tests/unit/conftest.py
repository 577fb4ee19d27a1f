"""A process group of one process, for what needs a group but no peers."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def group():
    import torch  # only where a group is needed: most tests start sooner without it
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
