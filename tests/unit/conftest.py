"""A process group of one process, for tests without peers, and servers without patience."""

from __future__ import annotations

import pytest

from perdure.storage import unauthenticated


@pytest.fixture(scope="module")
def group():
    import torch  # only where a group is needed: most tests start sooner without it
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def short_patience(monkeypatch):
    """Servers that wait for a token only for a moment."""
    monkeypatch.setattr(unauthenticated, "LIMIT_S", 0.3)
