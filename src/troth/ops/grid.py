"""The shape grid of an op: named calls that its tests compare and its benchmarks time, and the numbers in them.

Each op declares its grid beside its reference, and makes its arguments there. Refuses to know any op. Next:
``registry.py`` for the declaration, ``attention.py`` for a grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from troth.contracts.cache_spec import TRAIL_TOKENS
from troth.ops.rows import Rows, recall_tensor

RowSpec = tuple[int, int, int]
"""(row of the persistent batch, tokens computed before, tokens fed)."""

SINGLE_STEPS: Final[Mapping[str, Sequence[RowSpec]]] = {
    "one-single": [(3, 9, 1)],
    "first-token": [(2, 0, 1)],
    "neighbours": [(1, 4, 1), (2, 0, 1), (3, 7, 1)],
    "scattered-singles": [(4, 3, 1), (0, 0, 1), (2, 1, 1)],
}
"""Steps of single tokens for ops that keep a state per row."""

TIMED_STEPS: Final[Mapping[str, Sequence[RowSpec]]] = {
    "decode-1": [(0, 1023, 1)],
    "decode-8": [(row, 1023, 1) for row in range(8)],
    "chunk-256": [(0, 768, 256)],
}
"""What engines compute most: one answer, eight side by side, a chunk of a prompt."""


@dataclass(frozen=True, slots=True)
class DraftStep:
    """A step with drafts, or after one, for ops that keep a state and a trail per row."""

    specs: Sequence[RowSpec]
    num_verifies: int = 0
    """Rows behind the single ones whose tokens, all but the first, are drafts."""
    recalls: Mapping[int, int] = field(default_factory=dict)
    """Row of the step -> tokens of its trail that its state takes in first."""

    def rows(self, device: torch.device) -> Rows:
        """As a provider gets them."""
        return rows_of(self.specs, device, num_verifies=self.num_verifies, recalls=self.recalls)


DRAFT_STEPS: Final[Mapping[str, DraftStep]] = {
    "verify": DraftStep([(2, 9, 4)], num_verifies=1),
    "verifies": DraftStep([(3, 9, 1), (0, 4, 2), (1, 7, 9), (2, 0, 6)], num_verifies=2),
    "recall": DraftStep([(1, 9, 1)], recalls={0: 1}),
    "recalls": DraftStep([(4, 9, 1), (0, 4, 1), (2, 20, 17)], recalls={0: 8, 2: 3}),
    "recall-and-verify": DraftStep([(3, 5, 1), (1, 9, 4), (4, 8, 2)], num_verifies=2, recalls={0: 2, 1: 5, 2: 1}),
}
"""Steps around drafts for ops that keep a state per row."""

StateStep = Sequence[RowSpec] | DraftStep

TIMED_STATE_STEPS: Final[Mapping[str, StateStep]] = {
    **TIMED_STEPS,
    "verify-1": DraftStep([(0, 1023, 4)], num_verifies=1, recalls={0: 3}),
    "verify-8": DraftStep([(row, 1023, 4) for row in range(8)], num_verifies=8, recalls=dict.fromkeys(range(8), 3)),
}
"""Those, and one answer, eight side by side, each with three drafts, behind as many right ones."""


@dataclass(frozen=True, slots=True)
class Case:
    """One call of an op."""

    name: str
    """Its shape in words: unique in the grid, the id of tests and the line of benchmarks."""
    make: Callable[[Inputs], tuple[Any, ...]]
    """Makes the arguments, in order and anew each time: an op may write to them."""
    timed: bool = False
    """Sizes of real models, for benchmarks alone; the others are small and odd, for tests."""


class Inputs:
    """Random numbers of one call, the same on every device.

    Args:
        dtype: of activations and caches.
        device: where the tensors go.
        seed: other numbers for the same shapes.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.dtype = dtype
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal values of ``dtype``; None: of activations."""
        return torch.randn(shape, generator=self._generator).to(self.device, dtype or self.dtype)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """float32 values in low .. high."""
        return torch.rand(shape, generator=self._generator).mul_(high - low).add_(low).to(self.device)

    def integers(self, end: int, *shape: int) -> Tensor:
        """int64 values in 0 .. end - 1."""
        return torch.randint(end, shape, generator=self._generator).to(self.device)

    def bytes(self, *shape: int) -> Tensor:
        """uint8 values, all of them equally likely, on the CPU: what a file may hold."""
        return torch.randint(256, shape, generator=self._generator, dtype=torch.uint8)

    def order(self, count: int) -> list[int]:
        """0 .. count - 1 in no order."""
        order: list[int] = torch.randperm(count, generator=self._generator).tolist()
        return order

    def trail(self, specs: Sequence[RowSpec], recalls: Mapping[int, int], shape: Sequence[int]) -> Tensor:
        """What each row of a step keeps of drafts, float32 [N, TRAIL_TOKENS, *shape]; NaN where nothing is recalled."""
        num_rows = max(row for row, _, _ in specs) + 2
        memory = torch.full((num_rows, TRAIL_TOKENS, *shape), torch.nan, device=self.device)
        for index, count in recalls.items():
            memory[specs[index][0], :count] = self.normal(count, *shape, dtype=torch.float32)
        return memory

    def state(self, specs: Sequence[RowSpec], shape: Sequence[int]) -> Tensor:
        """What each row of a step remembers, float32 [N, *shape]; NaN in rows that start at 0 or take no part."""
        memory = torch.full((max(row for row, _, _ in specs) + 2, *shape), torch.nan, device=self.device)
        for row, start, _ in specs:
            if start > 0:
                memory[row] = self.normal(*shape, dtype=torch.float32)
        return memory


def rows_of(
    specs: Sequence[RowSpec], device: torch.device, *, num_verifies: int = 0, recalls: Mapping[int, int] | None = None
) -> Rows:
    """A step's rows; those of single tokens come first, as in plans.

    Args:
        specs: of each row.
        device: of the tensors.
        num_verifies, recalls: as in Rows.
    """
    places, starts, num_new = (list(column) for column in zip(*specs, strict=True))
    assert [n == 1 for n in num_new] == sorted((n == 1 for n in num_new), reverse=True), num_new
    return Rows(
        num_new=num_new,
        starts=starts,
        rows=places,
        query_start_R1=torch.tensor([0, *num_new]).cumsum(0).int().to(device),
        context_len_R=torch.tensor(starts).add(torch.tensor(num_new)).int().to(device),
        row_R=torch.tensor(places, device=device),
        max_new=max(num_new),
        num_single=num_new.count(1),
        num_exact=sum(1 for start, n in zip(starts, num_new, strict=True) if n == 1 and start),
        num_verifies=num_verifies,
        recalls=recalls or {},
        recall_R=recall_tensor(recalls, len(specs), device) if recalls else None,
    )


def sizes(*numbers: int) -> str:
    """Numbers in the name of a case: 9x3x64."""
    return "x".join(map(str, numbers))
