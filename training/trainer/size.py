"""How large the reference model of a job is. Sizes are bytes."""

from __future__ import annotations

from training.job import Job
from training.trainer.data.tokenizer import open_tokenizer

# Weights, and both moments of AdamW, in fp32.
STATE_BYTES_PER_PARAMETER = 12


def num_parameters(job: Job) -> int:
    """Parameters of the job's model with its tokenizer's vocabulary.

    Raises:
        ValueError: the tokenizer's file is none.
        OSError: it cannot be read.
    """
    return job.model.num_parameters(open_tokenizer(job.tokenizer).vocab_size)


def state_bytes(job: Job) -> int | None:
    """Model and optimizer state of the whole job; None for programs of the user's own."""
    if job.worker.is_command or job.worker.recipe is not None:
        return None
    return num_parameters(job) * STATE_BYTES_PER_PARAMETER
