"""A loop in the form of megatron.training, over the real megatron-core: its names and collectives.

`megatron` is a namespace: megatron.core comes from the package, this from the tests.
"""

from .global_vars import get_args, get_timers
from .training import pretrain

__all__ = ["get_args", "get_timers", "pretrain"]
