"""The real torch_npu on emulated Ascend devices: calls and their contracts, no silicon, no timing.

`python -m tests.ascend.lab python train.py` builds what is needed and runs a command with it.
"""
