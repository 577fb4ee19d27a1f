"""Stand-ins that let Megatron-LM's own tree train on the CPU: for worker.preload.

To those for megatron-core come the checks for devices of megatron.training, the one module that
needs triton, and the compiled helpers of the data sets, which the package has and the tree has not.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import megatron_cpu  # type: ignore[import-not-found]  # noqa: F401 the stand-ins come before megatron
import torch

HELPERS = "megatron.core.datasets.helpers_cpp"
KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"


def _of_package(name: str) -> ModuleType:
    """A compiled module of the installed megatron-core, whatever comes before it on the path."""
    for entry in sys.path:
        folder, _, leaf = f"{entry}/{name.replace('.', '/')}".rpartition("/")
        if (spec := PathFinder.find_spec(leaf, [folder])) is not None:
            assert spec.loader is not None
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise ModuleNotFoundError(name)


def _stand_in() -> None:
    cuda: Any = torch.cuda
    cuda.device_count = lambda: 1  # no groups are made otherwise
    cuda.set_device = lambda *_: None
    cuda.get_device_properties = lambda *_: SimpleNamespace(major=8, total_memory=1)
    cuda.get_device_capability = lambda *_: (8, 0)
    cuda.memory_stats = lambda *_: {}
    cuda.empty_cache = lambda: None
    for name in ("memory", "max_memory"):
        for kind in ("allocated", "reserved"):
            setattr(cuda, f"{name}_{kind}", lambda *_: 0)
    sys.modules[HELPERS] = _of_package(HELPERS)
    kernels: Any = ModuleType(KERNELS)
    kernels.enable_batch_invariant_mode = kernels.set_batch_invariant_mode = lambda *_: None
    kernels.is_batch_invariant_mode_enabled = lambda: False
    sys.modules[KERNELS] = kernels
    from megatron.core.datasets import utils
    from megatron.training import initialize, training

    utils.compile_helpers = lambda: None
    initialize._compile_dependencies = lambda: None
    training.initialize_megatron = partial(training.initialize_megatron, allow_no_cuda=True)
    training.set_jit_fusion_options = lambda: None


_stand_in()
