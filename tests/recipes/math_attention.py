"""The reference program with attention by its definition, on every device the same operations."""

from __future__ import annotations

from torch.nn.attention import SDPBackend, sdpa_kernel

from perdure.training.config.job import Job
from perdure.training.drill import recipe


def main(job: Job) -> None:
    """Train up to the job's target step."""
    with sdpa_kernel(SDPBackend.MATH):
        recipe.main(job)
