"""The matmul whose result is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from perdure.training.node_checks.burn_in import (
    CPU_SIZE,
    DIGESTS,
    LARGEST,
    burn,
    check_device,
    digest_product,
    make_matrices,
)
from perdure.training.wire.node import CheckOutcome

CPU = torch.device("cpu")


def test_the_known_result_is_that_of_whole_numbers():
    a, b = make_matrices(CPU_SIZE)
    assert (
        digest_product((a.astype(np.int64) @ b.astype(np.int64)).astype(np.int32))
        == DIGESTS[CPU_SIZE]
    )


def test_the_large_one_is_exact_in_double_precision():
    a, b = make_matrices(2048)
    product = a.astype(np.float64) @ b.astype(np.float64)
    assert digest_product(product.astype(np.int32)) == DIGESTS[2048]


@pytest.mark.parametrize("size", sorted(DIGESTS))
def test_no_partial_sum_can_leave_the_exact_range_of_float32(size):
    assert size * LARGEST**2 < 2**24
    assert all(np.abs(m).max() <= LARGEST for m in make_matrices(size))


def test_a_device_that_computes_right_passes():
    times = iter([0.0, 1.0, 2.0])
    burnt = burn(CPU, 0.0, clock=lambda: next(times))
    assert (burnt.wrong, burnt.repeats) == (0, 1)
    assert burnt.flop_s == 2 * CPU_SIZE**3 / 2.0  # seconds
    assert check_device(CPU, 0.0).outcome is CheckOutcome.OK


def test_it_goes_on_for_the_time_that_it_is_given():
    times = iter([0.0, 1.0, 2.0, 3.0, 4.0])
    assert burn(CPU, 2.5, clock=lambda: next(times)).repeats == 3


def test_one_wrong_bit_in_one_product_is_found():
    calls = []

    def multiply(a, b):
        product = torch.matmul(a, b)
        calls.append(1)
        if len(calls) == 3:
            product[7, 7] += 1
        return product

    assert burn(CPU, 60.0, multiply=multiply).wrong == 1


def test_a_device_that_is_always_wrong_is_found():
    assert burn(CPU, 0.0, multiply=lambda a, b: torch.matmul(a, b) + 1).wrong == CPU_SIZE**2


def test_a_device_that_fails_is_a_failed_check(monkeypatch):
    def multiply(*_arguments, **_options):
        raise RuntimeError("ACL stream synchronize failed, error code:507010\nmore")

    monkeypatch.setattr("perdure.training.node_checks.burn_in.burn", multiply)
    check = check_device(CPU, 0.0)
    assert (check.outcome, check.seen) == (
        CheckOutcome.FAILED,
        "cpu: ACL stream synchronize failed, error code:507010",
    )
