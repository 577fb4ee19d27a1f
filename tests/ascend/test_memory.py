"""Devices, their memory and its limit, page-locked memory of the host."""

from __future__ import annotations

import pytest

from tests.ascend.programs import run, said

torch = pytest.importorskip("torch")

MIB = 1 << 20


def test_the_devices_are_those_that_are_visible():
    source = "import json, torch_npu, torch; print(json.dumps(torch.npu.device_count()))"
    assert said(source, ASCEND_EMULATOR_DEVICES="4") == 4
    assert said(source, ASCEND_EMULATOR_DEVICES="16", ASCEND_RT_VISIBLE_DEVICES="2,5-7") == 4
    # As CANN reads it: what follows a device that is not there is ignored.
    assert said(source, ASCEND_EMULATOR_DEVICES="4", ASCEND_RT_VISIBLE_DEVICES="1,4,2") == 1


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(RuntimeError, match=r"EE1001.*invalid device, device=8"):
        torch.npu.set_device(8)


def test_memory_figures_follow_what_is_allocated():
    torch.ones(1, device="npu:0")  # a context, without which there are no figures
    torch.npu.empty_cache()
    free_before, total = torch.npu.mem_get_info(0)
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device="npu:0")
    free_after, _ = torch.npu.mem_get_info(0)
    assert total == 64 << 30
    assert 64 * MIB <= free_before - free_after < 128 * MIB
    del kept
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info(0)[0] == free_before


def test_the_properties_are_those_of_an_ascend_910b3():
    properties = torch.npu.get_device_properties(0)
    assert (properties.name, properties.total_memory) == ("Ascend910B3", 64 << 30)
    assert properties.L2_cache_size == 192 * MIB


def test_the_name_is_that_of_an_ascend_910b():
    assert torch.npu.get_device_name(0) == "Ascend910B3"


def test_more_than_a_device_has_is_torch_npus_out_of_memory_error():
    outcome = said(
        """
        import json, torch, torch_npu
        small = torch.ones(1 << 20, device="npu:0")
        try:
            torch.empty(1 << 28, dtype=torch.uint8, device="npu:0")
        except torch.OutOfMemoryError as error:
            text = str(error)
        del small
        torch.npu.empty_cache()
        again = torch.ones(20 << 20, device="npu:0").sum().item()
        print(json.dumps([text, again]))
        """,
        ASCEND_EMULATOR_MEMORY_BYTES=str(128 * MIB),
    )
    # torch_npu pads an allocation, which makes two further MiB of this one.
    assert outcome[0].startswith(
        "NPU out of memory. Tried to allocate 258.00 MiB (NPU 0; 128.00 MiB"
    )
    assert outcome[1] == 20 << 20


def test_page_locked_memory_is_known_as_such():
    assert torch.zeros(4).pin_memory().is_pinned()
    assert not torch.zeros(4).is_pinned()


def test_a_function_that_is_not_there_fails_by_its_name():
    done = run(
        """
        import torch, torch_npu
        torch_npu.npu_swiglu(torch.ones(4, 8, device="npu:0"))
        torch.npu.synchronize()
        """
    )
    assert done.returncode == 1
    assert "aclnnSwiGlu" in done.stderr


def test_a_function_that_is_linked_and_not_there_fails_by_its_name():
    done = run(
        """
        import ctypes, os, torch_npu
        ctypes.CDLL(os.environ["ASCEND_EMULATOR"] + "/lib/libascendcl.so").aclmdlInitDump()
        """
    )
    assert "aclmdlInitDump is not emulated" in done.stderr
