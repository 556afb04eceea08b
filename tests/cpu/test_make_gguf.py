"""The quantisers of benchmark files: what the gguf package reads back is near what went in."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from benchmarks.make_gguf import Type, quantize


@pytest.mark.parametrize(
    ("name", "steps"),
    [("Q8_0", 127), ("Q6_K", 31), ("Q4_K", 7.5), ("Q4_0", 7)],
)
def test_quantize_is_read_back_within_a_step(name: str, steps: float) -> None:
    """The largest error is about half of a step of a group's largest number; scales are rounded too."""
    numbers = np.random.default_rng(0).standard_normal((6, 768), dtype=np.float32)
    numbers[1] *= 1e-3
    numbers[2, :256] = 0
    numbers[3] = np.abs(numbers[3])
    back = gguf.quants.dequantize(quantize(numbers, Type[name]), Type[name])
    assert back.shape == numbers.shape
    largest = np.abs(numbers).max(axis=1, keepdims=True)
    assert (np.abs(back - numbers) <= 1.1 * largest / steps).all()
    assert (np.square(back - numbers).mean(axis=1) <= np.square(0.5 * largest / steps).ravel()).all()
