"""How large the reference model of a job is. Sizes are bytes."""

from __future__ import annotations

from perdure.training.config.job import Job
from perdure.training.trainer.data.tokenizer import open_tokenizer

# Weights, and both moments of AdamW, in fp32.
STATE_BYTES_PER_PARAMETER = 12


def num_parameters(job: Job) -> int | None:
    """Parameters of the job's model with its tokenizer's vocabulary.

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
    """Model and optimizer state of the whole job; None for programs of the user's own."""
    parameters = num_parameters(job)
    return parameters * STATE_BYTES_PER_PARAMETER if parameters is not None else None
