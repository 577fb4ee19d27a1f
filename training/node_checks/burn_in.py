"""The burn-in of a device: repeated products of matrices whose result is known.

All entries are small integers, so that every product and every partial sum is a whole number
below 2**24: float32 holds it exactly, and so do TF32 and HF32 with their shorter mantissas of
inputs. In any order of summation, a device that computes correctly agrees in every bit with the
digest below, which comes from whole numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from perdure.training.device import synchronize
from perdure.training.wire.node import Check, CheckOutcome

SEED = 20_260_000
LARGEST = 8
# xxh3_64 of the product as little-endian int32, by the size of the square matrices.
DIGESTS: Mapping[int, str] = {256: "f582db90cf495e69", 2048: "2adee5773a1d0767"}
CPU_SIZE, DEVICE_SIZE = 256, 2048
NAME = "burn_in"


@dataclass(frozen=True, slots=True)
class BurnInResult:
    """The result of a burn-in.

    Attributes:
        wrong: number of wrong entries in the first wrong product; 0 where all products were right.
        flop_s: floating-point operations per second over all products.
    """

    wrong: int
    repeats: int
    flop_s: float


def make_matrices(size: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Make two square matrices of whole numbers from -LARGEST to LARGEST, the same everywhere.

    A linear congruential generator (constants of Numerical Recipes): its bits are a matter of
    whole-number arithmetic, not of a library's version.
    """
    state = np.arange(2 * size * size, dtype=np.uint64) + np.uint64(SEED)
    for _ in range(3):
        state = (state * np.uint64(1_664_525) + np.uint64(1_013_904_223)) % np.uint64(2**32)
        state ^= state >> np.uint64(15)
    values = (state >> np.uint64(7)) % np.uint64(2 * LARGEST + 1)
    entries = values.astype(np.int32).reshape(2, size, size) - np.int32(LARGEST)
    return entries[0], entries[1]


def digest_product(product: npt.NDArray[np.int32]) -> str:
    """Compute the digest by which products are compared."""
    return xxhash.xxh3_64_hexdigest(product.astype("<i4").tobytes())


def burn(
    device: torch.device,
    seconds: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
) -> BurnInResult:
    """Multiply for some seconds, at least twice, so that a device also agrees with itself."""
    size = CPU_SIZE if device.type == "cpu" else DEVICE_SIZE
    a, b = (torch.from_numpy(m).to(device=device, dtype=torch.float32) for m in make_matrices(size))
    first = multiply(a, b)
    first_digest = digest_product(first.cpu().numpy().astype(np.int32))
    wrong = (
        0
        if first_digest == DIGESTS[size]
        else int((first != multiply(a, b)).sum()) or first.numel()
    )
    began_s = clock()
    repeats = 0
    while not wrong and (repeats < 1 or clock() - began_s < seconds):
        product = multiply(a, b)
        wrong = int((product != first).sum())  # waits for the device
        repeats += 1
    synchronize(device)
    took_s = max(clock() - began_s, 1e-9)
    return BurnInResult(wrong, repeats, 2.0 * size**3 * repeats / took_s)


def check_device(device: torch.device, seconds: float) -> Check:
    """Burn a device in."""
    try:
        burnt = burn(device, seconds)
    except RuntimeError as error:  # torch raises it for a device that fails
        reason = f"{device}: {str(error).strip().splitlines()[0]}"
        return Check(name=NAME, outcome=CheckOutcome.FAILED, seen=reason)
    figures = {"gflop_s": burnt.flop_s / 1e9}
    allowed = "every entry right"
    if burnt.wrong:
        text = f"{device}: {burnt.wrong} entries of product {burnt.repeats + 1} are wrong"
        return Check(
            name=NAME, outcome=CheckOutcome.FAILED, seen=text, allowed=allowed, figures=figures
        )
    text = f"{device}: {burnt.repeats} products right, {burnt.flop_s / 1e9:.1f} GFLOP/s"
    return Check(name=NAME, outcome=CheckOutcome.OK, seen=text, allowed=allowed, figures=figures)
