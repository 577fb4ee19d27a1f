"""The data sections of a job."""

from training.trainer.data.spec import DataSpec, TokenizerSpec

__all__ = ["DataSpec", "TokenizerSpec"]
