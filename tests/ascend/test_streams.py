"""Streams of emulated devices run later and in order, and wait for each other by events."""

from __future__ import annotations

import ctypes

import pytest

from tests.ascend.held import ascendcl, held

torch = pytest.importorskip("torch")

STREAM_SYNC_TIMEOUT = 507046  # ACL_ERROR_RT_STREAM_SYNC_TIMEOUT


@pytest.fixture
def stream():
    return torch.npu.Stream()


def ones(count: int = 4):
    made = torch.ones(count, device="npu:0")
    torch.npu.synchronize()
    return made


def test_an_operator_has_not_run_when_its_call_returns(stream):
    x = ones()
    with torch.npu.stream(stream), held(stream.npu_stream):
        y = x + 1
        x.fill_(5)
        assert not stream.query()
        host_sees = [x.data_ptr(), y.data_ptr()]
    stream.synchronize()
    assert stream.query()
    assert y.tolist() == [2.0] * 4
    assert x.tolist() == [5.0] * 4
    assert host_sees == [x.data_ptr(), y.data_ptr()]


def test_a_stream_that_stands_still_holds_up_no_other():
    first, second = torch.npu.Stream(), torch.npu.Stream()
    x = ones()
    with held(first.npu_stream):
        with torch.npu.stream(second):
            assert (x * 3).tolist() == [3.0] * 4
        assert not first.query()


def test_a_stream_waits_for_the_event_of_another():
    first, second = torch.npu.Stream(), torch.npu.Stream()
    x, event = ones(), torch.npu.Event()
    with held(first.npu_stream):
        with torch.npu.stream(first):
            x.add_(1)
            event.record()
        with torch.npu.stream(second):
            event.wait()
            y = x * 10
        assert not event.query()
        assert not second.query()
    second.synchronize()
    assert event.query()
    assert y.tolist() == [20.0] * 4


def test_an_event_that_is_recorded_again_stands_for_the_later_record():
    first, second = torch.npu.Stream(), torch.npu.Stream()
    event = torch.npu.Event()
    event.record(second)
    second.synchronize()
    with held(first.npu_stream):
        event.record(first)
        assert not event.query()
    first.synchronize()
    assert event.query()


def test_the_time_between_events_is_that_of_the_work_between_them(stream):
    begin, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    with torch.npu.stream(stream):
        begin.record()
        ones(1000).cumsum(0)
        end.record()
    end.synchronize()
    assert begin.elapsed_time(end) >= 0


def test_waiting_for_a_stream_ends_when_its_time_is_up(stream):
    handle = ctypes.c_void_p(stream.npu_stream)
    with held(stream.npu_stream):
        assert ascendcl().aclrtSynchronizeStreamWithTimeout(handle, 20) == STREAM_SYNC_TIMEOUT
        said = ascendcl().aclGetRecentErrMsg
        said.restype = ctypes.c_char_p
        assert said().startswith(b"EE1002: Stream synchronize timeout.")
    assert ascendcl().aclrtSynchronizeStreamWithTimeout(handle, 20) == 0


def test_a_copy_to_page_locked_memory_keeps_its_place_in_the_stream(stream):
    x, host = ones(), torch.zeros(4).pin_memory()
    with torch.npu.stream(stream), held(stream.npu_stream):
        x.add_(1)
        host.copy_(x, non_blocking=True)
        assert host.tolist() == [0.0] * 4
    stream.synchronize()
    assert host.tolist() == [2.0] * 4


def test_a_blocking_copy_waits_for_what_was_submitted_before_it():
    x = ones()
    for _ in range(50):
        x.add_(1)
    assert x.cpu().tolist() == [51.0] * 4


def test_memory_that_another_stream_still_reads_is_not_given_away(stream):
    torch.npu.empty_cache()
    x = torch.full((1 << 20,), 3.0, device="npu:0")
    torch.npu.synchronize()
    address = x.data_ptr()
    with held(stream.npu_stream):
        with torch.npu.stream(stream):
            y = x + 1
        x.record_stream(stream)
        del x
        others = [torch.zeros(1 << 20, device="npu:0") for _ in range(4)]
        torch.npu.current_stream().synchronize()
        assert address not in [other.data_ptr() for other in others]
    stream.synchronize()
    assert y.eq(4.0).all().item()
