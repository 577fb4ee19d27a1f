"""The smallest job that is valid, for tests that need one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perdure.storage.address import StorageSpec, make_store
from perdure.training.config.job import Job, parse_job


def job_document(folder: Path | None = None, **sections: Any) -> dict[str, Any]:
    """The document of a job whose store is made below a folder, with these sections."""
    address = f"file://{folder}/store" if folder else "file:///nowhere"
    if folder is not None:
        make_store(StorageSpec(address=address))
    document = {"run_id": "run", "storage": {"address": address}, **sections}
    return document if "worker" in sections else {"data": {"sources": ["/corpus"]}, **document}


def small_job(folder: Path | None = None, **sections: Any) -> Job:
    """The same, parsed."""
    return parse_job(job_document(folder, **sections))
