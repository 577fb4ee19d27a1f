"""Size of a job's reference model, in bytes."""

from __future__ import annotations

from perdure.training.config.job import Job
from perdure.training.trainer.data.tokenizer import open_tokenizer

# Weights, and both moments of AdamW, in fp32.
STATE_BYTES_PER_PARAMETER = 12


def num_parameters(job: Job) -> int | None:
    """Count the parameters of the job's model with its tokenizer's vocabulary.

    Returns:
        None for programs of the user's own.

    Raises:
        ValueError: the tokenizer's file is none.
        OSError: it cannot be read.
    """
    if not job.is_reference:
        return None
    return job.model.num_parameters(open_tokenizer(job.tokenizer).vocab_size)


def state_bytes(job: Job) -> int | None:
    """Compute the size of the job's model and optimizer state; None for the user's own programs."""
    parameters = num_parameters(job)
    return parameters * STATE_BYTES_PER_PARAMETER if parameters is not None else None
