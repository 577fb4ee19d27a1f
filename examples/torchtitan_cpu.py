"""`python -m torchtitan.train` on the CPU, where torchtitan 0.3.0 would take CUDA.

    torchrun --nproc_per_node=2 torchtitan_cpu.py --module torchtitan_tiny --config tiny

A GPU or NPU needs none of this. Torchtitan's own code is run as it is, with another device.
"""

import types

import psutil
from torchtitan.tools import utils

MEMORY = types.SimpleNamespace(total_memory=psutil.virtual_memory().total)

# What torchtitan asks of a device, of which torch.cpu has a part.
utils.device_type = "cpu"
utils.device_module = types.SimpleNamespace(
    set_device=lambda _device: None,
    current_device=lambda: 0,
    synchronize=lambda: None,
    get_device_name=lambda _device: "CPU",
    get_device_properties=lambda _device: MEMORY,
    memory_stats=lambda _device: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
)

if __name__ == "__main__":
    from torchtitan.train import main  # its modules take the device when they are imported

    main()
