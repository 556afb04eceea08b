"""Every test here may use torch: activate the op providers once, and keep thread counts small."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from troth.ops import registry

# Threads of a parallel region wait for each other by spinning: two on a busy machine are many times slower than one.
torch.set_num_threads(1)
registry.activate()


@pytest.fixture
def fresh_memory_is_nan() -> Iterator[None]:
    """New tensors nobody filled hold NaN, so that an op which leaves out a part of its output is found out."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
